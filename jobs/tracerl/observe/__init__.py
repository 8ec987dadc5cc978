"""What a run leaves behind and shows: the run log, metrics, the summary and the report.

Everything here reads step records and events; nothing here changes a run. `runlog` writes and reads the two
files of a run, `run` loads a run directory, `summary` turns it into numbers, a table and `summary.json`,
`report` into `report.html`, and `metrics` serves a step record to Prometheus.
"""
