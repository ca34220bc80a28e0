"""The training side and the command line; each folder is a room. `run/loop.py` is the system on one page."""
