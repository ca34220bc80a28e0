"""Output of a run: metrics and samples, the console and W&B. `tracker.py` is the entry."""
