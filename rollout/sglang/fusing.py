"""How SGLang holds and digests weights: shares of ranks, digests of bytes.

SGLang keeps some parameters fused (`rollout/weights/fusion.py`) and pads the vocabulary. Its `/weights_checker` digests
the fused, padded parameter; `rollout/sglang/expected.py` makes the same digest of the tensors that the trainer sends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from rollout.weights.adapter import A_SENT, B_SENT, last_part
from rollout.weights.experts import GATE_UP, is_experts
from rollout.weights.fusion import VOCABULARY_PARAMETERS

VOCABULARY_MULTIPLE = 64
"""Multiple to which SGLang pads the rows of vocabulary parameters with zeros."""

ROW_SPLIT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Modules whose rows (and biases) tensor parallelism splits among ranks."""
KV_MODULES = ("k_proj", "v_proj")
COLUMN_SPLIT = ("o_proj", "down_proj")
"""Modules whose columns (and block scales) it splits; biases and channel scales are whole on every rank."""

TILE_WORDS = 8192
"""32-bit words per tile of the GPU digest."""
TILES_PER_CHUNK = 16
"""Tiles that one thread mixes at a time: 512 KiB, which stay in the thread's cache."""
HASH_SEED = 0x243F6A88
MIXERS = (
    (0x27D4EB2D, 15, HASH_SEED),
    (0x165667B1, 13, (HASH_SEED * 0x9E3779B1 ^ 0xDEADBEEF) & 0xFFFFFFFF),
)
"""Factor, rotation and seed of a word's position, for the upper and the lower half of the GPU digest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """The part of every parameter that one rank of a tensor-parallel engine holds."""

    rank: int = 0
    size: int = 1
    num_kv_heads: int = 1
    """Number of key/value heads; with fewer heads than ranks, several ranks hold the same head."""

    def of(self, source: str, tensor: torch.Tensor) -> torch.Tensor:
        """The rank's part of the HF tensor `source`; the vocabulary is padded before the split."""
        if is_experts(source):
            return self._of_experts(source, tensor)
        # The rows of B are those of the layer's weight, the columns of A are its columns.
        is_a, is_b = source.endswith(A_SENT), source.endswith(B_SENT)
        module, _, kind = source.replace(A_SENT, ".weight").replace(B_SENT, ".weight").rpartition(".")
        layer = last_part(module)
        if source.endswith(VOCABULARY_PARAMETERS):
            return _padded_vocabulary(tensor, self.size).chunk(self.size)[self.rank]
        if (is_a and layer not in COLUMN_SPLIT) or (is_b and layer not in ROW_SPLIT):
            return tensor
        if layer in ROW_SPLIT:
            ranks_per_part = max(1, self.size // self.num_kv_heads) if layer in KV_MODULES else 1
            return tensor.chunk(self.size // ranks_per_part)[self.rank // ranks_per_part]
        if layer in COLUMN_SPLIT and kind in ("weight", "weight_scale_inv"):
            return tensor.chunk(self.size, dim=1)[self.rank]
        return tensor

    def _of_experts(self, source: str, tensor: torch.Tensor) -> torch.Tensor:
        """The rank's features of every expert, of gate and of up, [E, O, I]."""
        if self.size == 1:
            return tensor
        if not source.endswith(GATE_UP):
            return tensor.chunk(self.size, dim=2)[self.rank]
        return torch.cat([part.chunk(self.size, dim=1)[self.rank] for part in tensor.chunk(2, dim=1)], dim=1)


def host_digest(pieces: Sequence[np.ndarray]) -> str:
    """First 64 bits of SHA-256 over the pieces in order: SGLang's `tensor_hash` of a CPU tensor."""
    hasher = hashlib.sha256()
    for piece in pieces:
        hasher.update(piece.data)
    return hasher.hexdigest()[:16]


def tile_digest(pieces: Sequence[np.ndarray]) -> str:
    """SGLang's `gpu_tensor_hash` of a CUDA tensor, on the CPU.

    Each 32-bit word is mixed with its position by two MurmurHash3 finalizers; sums per tile of 8192 words are mixed
    once more, added up and finished with SplitMix64. All arithmetic wraps.
    """
    flat = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    if flat.size % 4:
        flat = np.concatenate([flat, np.zeros(-flat.size % 4, dtype=np.uint8)])
    words = flat.view(np.uint32)
    if words.size == 0:
        return f"{0:016x}"
    chunk = TILE_WORDS * TILES_PER_CHUNK
    with ThreadPoolExecutor() as pool:
        sums = pool.map(lambda start: _sum_tiles(words, start, start + chunk), range(0, words.size, chunk))
        total = sum(sums)
    return finished(total)


def finished(total: int) -> str:
    """The sum of all tiles' values, of which the lower 64 bits count -> the digest, 16 hex digits."""
    total &= 0xFFFFFFFFFFFFFFFF
    total ^= total >> 30
    total = total * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    total ^= total >> 27
    total = total * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return f"{total ^ (total >> 31):016x}"


DIGESTS: dict[str, Callable[[Sequence[np.ndarray]], str]] = {"cpu": host_digest, "cuda": tile_digest}
"""Device of the engine -> function with which SGLang digests a parameter there."""


def _sum_tiles(words: np.ndarray, start: int, stop: int) -> int:
    """Sum of the 64-bit values of the tiles in words[start:stop]; `start` is the beginning of a tile."""
    chunk = words[start:stop]
    num_bytes = np.uint32(words.size * 4 & 0xFFFFFFFF)
    position = np.arange(start, start + chunk.size, dtype=np.uint64).astype(np.uint32)
    tile_starts = np.arange(0, chunk.size, TILE_WORDS)
    halves = []
    for factor, rotation, seed in MIXERS:
        rotated = (position << np.uint32(rotation)) | (position >> np.uint32(32 - rotation))
        mixed = _fmix32(chunk ^ ((position * np.uint32(factor) + np.uint32(seed)) ^ rotated))
        halves.append(_fmix32(np.add.reduceat(mixed, tile_starts, dtype=np.uint32) ^ num_bytes))
    return sum(int(high) << 32 | int(low) for high, low in zip(*halves, strict=True))


def _fmix32(value: np.ndarray) -> np.ndarray:
    """Finalizer of MurmurHash3, elementwise on uint32."""
    value = (value ^ (value >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    value = (value ^ (value >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    value ^= value >> np.uint32(16)
    return value


def raw_bytes(tensor: torch.Tensor) -> np.ndarray:
    """[num_bytes] uint8, the bytes of the tensor."""
    flat: np.ndarray = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return flat


def _padded_vocabulary(tensor: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """The tensor with rows of zeros up to a multiple of 64, or of 64 * `num_ranks` if ranks could not share evenly."""
    multiple = VOCABULARY_MULTIPLE
    if (tensor.shape[0] + -tensor.shape[0] % multiple) % num_ranks:
        multiple *= num_ranks
    missing = -tensor.shape[0] % multiple
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor
