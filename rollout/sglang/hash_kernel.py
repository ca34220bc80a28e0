"""SGLang's digest of a GPU tensor, on the GPU that holds the bytes: every word is read once.

`tile_digest` of `rollout/sglang/fusing.py` says what is computed, and is the reference. Imported only where Triton is
installed. Run by Triton's interpreter on a CPU (tests); not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import tensor as Block

from rollout.sglang.fusing import MIXERS, TILE_WORDS

TILE = tl.constexpr(TILE_WORDS)
BLOCK = tl.constexpr(1024)
"""Words that one program reads at a time."""
HIGH_FACTOR, HIGH_TURN, HIGH_SEED = map(tl.constexpr, MIXERS[0])
LOW_FACTOR, LOW_TURN, LOW_SEED = map(tl.constexpr, MIXERS[1])


@triton.jit
def _fmix32(value: Block) -> Block:
    """Finalizer of MurmurHash3, elementwise on uint32."""
    value = (value ^ (value >> 16)) * tl.full((), 0x85EBCA6B, tl.uint32)
    value = (value ^ (value >> 13)) * tl.full((), 0xC2B2AE35, tl.uint32)
    return value ^ (value >> 16)


@triton.jit
def _mixed(word: Block, position: Block, FACTOR: tl.constexpr, TURN: tl.constexpr, SEED: tl.constexpr) -> Block:
    """Words mixed with their positions, elementwise on uint32."""
    placed = position * tl.full((), FACTOR, tl.uint32) + tl.full((), SEED, tl.uint32)
    return _fmix32(word ^ placed ^ ((position << TURN) | (position >> (32 - TURN))))


@triton.jit(do_not_specialize=["count"])
def _tile_kernel(words: Block, sums: Block, count: int) -> None:
    """One tile: the sums of its words, mixed in two ways, mixed once more and put together to 64 bits."""
    tile = tl.program_id(0).to(tl.int64)
    high = tl.zeros((), tl.uint32)
    low = tl.zeros((), tl.uint32)
    for start in range(0, TILE, BLOCK):
        place = tile * TILE + start + tl.arange(0, BLOCK)
        inside = place < count
        word = tl.load(words + place, mask=inside, other=0).to(tl.uint32)
        position = place.to(tl.uint32)
        nothing = tl.zeros_like(word)
        upper = tl.where(inside, _mixed(word, position, HIGH_FACTOR, HIGH_TURN, HIGH_SEED), nothing)
        lower = tl.where(inside, _mixed(word, position, LOW_FACTOR, LOW_TURN, LOW_SEED), nothing)
        high += tl.sum(upper, 0).to(tl.uint32)
        low += tl.sum(lower, 0).to(tl.uint32)
    num_bytes = tl.full((), count * 4, tl.uint32)
    both = (_fmix32(high ^ num_bytes).to(tl.uint64) << 32) | _fmix32(low ^ num_bytes).to(tl.uint64)
    tl.store(sums + tile, both.to(tl.int64))


def tile_sum(pieces: Sequence[Tensor]) -> Tensor:
    """Sum of the tiles' values over the bytes of the pieces in order: a scalar int64 on their device, which wraps.

    `fusing.finished` makes the digest of it. The call returns before the GPU has computed it.
    """
    flat = [piece.contiguous().view(-1).view(torch.uint8) for piece in pieces]
    num_bytes = sum(len(each) for each in flat)
    if num_bytes == 0:
        return torch.zeros((), dtype=torch.int64, device=pieces[0].device)
    # Words lie on boundaries of 4 bytes, and zeros fill the last one.
    whole = len(flat) == 1 and num_bytes % 4 == 0 and flat[0].storage_offset() % 4 == 0
    raw = flat[0] if whole else torch.cat([*flat, flat[0].new_zeros(-num_bytes % 4)])
    count = len(raw) // 4
    sums = torch.empty(triton.cdiv(count, TILE_WORDS), dtype=torch.int64, device=raw.device)
    _tile_kernel[(len(sums),)](raw.view(torch.int32), sums, count)
    return sums.sum()
