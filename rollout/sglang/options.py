"""What both the config of the SGLang engine and the engine name. Imports no torch."""

from __future__ import annotations

from enum import Enum

SGLANG_REMEDY = 'make setup in the checkout, or pip install -e ".[sglang]" there, or use rollout=torch'
"""Remedy if SGLang is not installed."""
MAX_REPLY_BYTES = 64 << 20
"""Size at which a reply of a server is given up. A token takes about 60 bytes, and 7 per kept token of its support."""
SLEEPING_SHARE = 0.80
"""Share of a GPU for weights and cache of a server while the rank sleeps; graphs and activations take the rest."""


class PauseMode(Enum):
    """Treatment of unfinished responses while an engine loads new weights."""

    retract = "retract"
    """Responses continue with the new weights after a new prefill of prompt and tokens so far: exact, at the cost of
    the prefill."""
    in_place = "in_place"
    """Responses continue with the new weights and the KV cache of the old weights: no prefill, but later tokens are
    sampled from a mix of old KV cache and new weights, which is the policy of no version."""
    abort = "abort"
    """Responses end at the tokens so far; the collector may resume them."""
