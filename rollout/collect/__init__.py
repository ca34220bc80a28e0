"""Prompts -> rewarded, filtered groups of one step, and evaluations. `collector.py` is the entry."""
