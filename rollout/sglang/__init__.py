"""The SGLang engine: `engine.py` is what the rest of the project uses."""
