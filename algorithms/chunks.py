"""Long packed tensors cut at sequences, so that a chain of elementwise steps stays in a processor's cache.

A chain of n steps over a tensor that does not fit the cache reads and writes main memory n times; over a piece that
fits, once. `algorithms.correction` and the statistics work piece by piece and join. T: packed tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_TOKENS = 2**17
"""Tokens of a piece on a CPU: 0.5 MiB per float32 vector. About twenty vectors of a piece fit the last-level cache, and
their memory is too little for the allocator to give it back and ask for it again. The 2 microseconds that a call takes
on its own are a small part of a step."""
DEVICE_CHUNK_TOKENS = 2**22
"""Tokens of a piece elsewhere: long kernels, and not much memory besides the batch."""


def chunk_tokens(device: torch.device) -> int:
    """Tokens that are worked on at a time on `device`."""
    return CHUNK_TOKENS if device.type == "cpu" else DEVICE_CHUNK_TOKENS


def sequence_chunks(cu_seqlens: Tensor, *, num_tokens: int) -> list[tuple[slice, Tensor]]:
    """Consecutive sequences of about CHUNK_TOKENS tokens: (their tokens, their own cu_seqlens [n+1] from 0).

    A longer sequence is a piece by itself; padding behind the last sequence belongs to the last piece. Anywhere but
    on a CPU all tokens are one piece: an accelerator wants long kernels, and reading cu_seqlens would wait for it.
    """
    if cu_seqlens.device.type != "cpu" or num_tokens <= CHUNK_TOKENS:
        return [(slice(0, num_tokens), cu_seqlens)]
    bounds = cu_seqlens.tolist()
    chunks = []
    first = 0
    for last in range(1, len(bounds)):
        ends = last == len(bounds) - 1
        if ends or bounds[last + 1] - bounds[first] > CHUNK_TOKENS:
            stop = num_tokens if ends else bounds[last]
            chunks.append((slice(bounds[first], stop), cu_seqlens[first : last + 1] - bounds[first]))
            first = last
    return chunks or [(slice(0, num_tokens), cu_seqlens)]
