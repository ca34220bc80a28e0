"""The SGLang engine: `engine.py` is the entry for the rest of the project."""
