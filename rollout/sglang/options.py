"""What both the config of the SGLang engine and the engine name. Imports no torch."""

from __future__ import annotations

SGLANG_REMEDY = 'make setup in the checkout, or pip install -e ".[sglang]" there, or use rollout=torch'
"""Remedy if SGLang is not installed."""
MAX_REPLY_BYTES = 64 << 20
"""Size at which a reply of a server is given up. A token takes about 60 bytes, and 7 per kept token of its support."""
SLEEPING_SHARE = 0.80
"""Share of a GPU for weights and cache of a server while the rank sleeps; graphs and activations take the rest."""
