"""SGLang as the rollout: its own scheduler and models, unforked, with hooks where values are quantised.

`server` starts the engine and serves it, `plugin` is loaded by SGLang in each of its processes and records.
"""
