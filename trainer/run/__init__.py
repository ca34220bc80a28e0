"""The driver of a run. `loop.py` is the system on one page; the other files are what it calls."""
