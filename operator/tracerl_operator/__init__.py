"""The operator's pure core: what a `TraceRLJob` needs on a cluster, and what is true of it.

`tracerl_operator.reconcile.reconcile` is a function of the job, of what was observed and of the time. It
talks to nobody: a shell observes, calls it, and does what the answer says. Imports `tracerl.api` and nothing
else of tracerl, no Kubernetes client and no kopf.
"""
