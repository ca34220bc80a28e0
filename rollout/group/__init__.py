"""Engines in Ray actors behind one handle, `engine_group.py`: load balance, restarts, sharing of GPUs."""
