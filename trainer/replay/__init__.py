"""Recorded steps of a run, scored again under every correction."""
