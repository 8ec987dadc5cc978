"""The operator's shell: it watches, asks the core what to do about a job, and does it.

kopf watches (`watches`) and fills a cache (`informer`, `store`). Every change of an object puts the key of
its job into one queue (`workqueue`), from which a worker has the controller observe, ask the core and do what
it answers (`workers`, `controller`). Of two operators, the one that holds a Lease works (`lease`), while the
other keeps its cache warm. Nothing about jobs is decided here.
"""
