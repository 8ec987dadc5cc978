"""Starting things: the processes of a local run, their entry points, and what a run directory holds.

Nothing is imported here, so that `tracerl --help` and `tracerl validate` stay fast.
"""
