"""Data sources -> prompts and reference answers. `dataset.py` is the entry."""
