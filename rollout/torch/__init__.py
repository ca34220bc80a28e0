"""The embedded engine: a transformers model in the worker's own process. `engine.py` is the entry.

`model_limits.py` and `onednn_linear.py` serve the policy too, so that engine and policy refuse and compute the same.
"""
