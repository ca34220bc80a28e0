"""The embedded engine: a transformers model in the worker's own process. `engine.py` is the entry."""
