"""The training side and the command line. `loop.py` is the system on one page; everything it calls is beside it."""
