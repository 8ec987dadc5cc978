"""Dashboards and alerts of the chart, made from the table of all metrics. `make dashboards` writes them.

Nothing at run time imports this: what is installed are the files that it writes.
"""
