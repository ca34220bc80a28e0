"""What a run leaves behind: metrics and samples, the console and W&B. `tracker.py` is the entry."""
