"""What a run leaves behind: metrics and samples, the console, W&B, and the report. `tracker.py` is the entry."""
