"""The soft overlong penalty of DAPO: response length -> amount that `rollout/rewards/scorer.py` adds to the reward."""

from __future__ import annotations


def overlong_penalty(num_tokens: int, *, max_new_tokens: int, buffer_tokens: int, penalty: float) -> float:
    """0 up to max - buffer tokens, then falling linearly to -penalty at max; 0 everywhere with a buffer of 0.

    With L = num_tokens: -penalty * min(1, (L - (max - buffer)) / buffer) where L > max - buffer.
    Source: DAPO, arXiv:2503.14476, equation 13.
    """
    excess = num_tokens - (max_new_tokens - buffer_tokens)
    if buffer_tokens == 0 or excess <= 0:
        return 0.0
    return -penalty * min(1.0, excess / buffer_tokens)
