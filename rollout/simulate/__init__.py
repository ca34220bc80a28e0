"""Simulated rollouts, for `parity simulate`."""
