"""Attention over the slots of `rollout/torch/kv_cache.py` in exact arithmetic (`rollout/exact/attention.py`).

N: active slots, U: distinct prompts, P: padded prompt length, H: heads, K: key/value heads, D: size of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from rollout.exact.attention import attend, num_columns
from rollout.torch.kv_cache import Prefill, Step


class ExactPrefill(Prefill):
    """Reads prompts with the bits that their tokens have in decoding and in training."""

    def attention(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """Causal attention within each prompt: query [U, H, P, D], key and value [U, K, P, D] -> [U, H, P, D]."""
        room = num_columns(self.longest) - self.longest
        keys, values = (pad(states, (0, 0, 0, room)) for states in (key, value))
        positions = torch.arange(self.longest, device=query.device).expand(len(query), -1)
        return attend(query, keys, values, positions, scaling=scaling).transpose(1, 2)


class ExactStep(Step):
    """Reads one token per slot with the bits that it has in a prompt and in training."""

    def columns(self, longest: int) -> int:
        """Whole blocks."""
        return num_columns(longest)

    def attention(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float | None) -> Tensor:
        """query [N, H, 1, D], keys and values [N, K, C, D] with columns to spare -> [N, H, 1, D]."""
        keys, values = (states[:, :, : self.columns(self.longest)] for states in (keys, values))
        return attend(query, keys, values, self.positions[:, None], scaling=scaling).transpose(1, 2)
