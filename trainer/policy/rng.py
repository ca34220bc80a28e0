"""The random number generators of one process: Python's, numpy's, torch's on the CPU and on its GPU.

Kept as plain JSON values, because what numpy and torch would write by themselves is a pickle. Used by
`trainer/policy/shards.py`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class RngState:
    """States of all generators of a process, as JSON values."""

    python: list[object]
    """Version, words of the Mersenne Twister, the second normal number of a pair or None."""
    numpy: list[object]
    """Name, words as a list, position, whether a normal number is kept, that number: the legacy generator."""
    torch: str
    """Bytes of torch's CPU generator, hexadecimal."""
    cuda: str | None
    """The same for the GPU of this rank; None on a CPU."""


def capture_rng(device: torch.device) -> RngState:
    """States of all generators of this process; `device` is the rank's."""
    version, words, kept = random.getstate()
    name, keys, position, has_normal, normal = np.random.get_state(legacy=True)
    return RngState(
        python=[version, list(words), kept],
        numpy=[name, np.asarray(keys).tolist(), int(position), int(has_normal), float(normal)],
        torch=_to_text(torch.get_rng_state()),
        cuda=_to_text(torch.cuda.get_rng_state(device)) if device.type == "cuda" else None,
    )


def restore_rng(state: RngState, device: torch.device) -> None:
    """Set all generators of this process to `state`; a state of a GPU is left out on a CPU."""
    version, words, kept = state.python
    random.setstate((version, tuple(words), kept))  # type: ignore[arg-type]
    name, keys, position, has_normal, normal = state.numpy
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), position, has_normal, normal))  # type: ignore[arg-type]
    torch.set_rng_state(_from_text(state.torch))
    if device.type == "cuda" and state.cuda is not None:
        torch.cuda.set_rng_state(_from_text(state.cuda), device)


def reseed_rng(*, seed: int, step: int, rank: int) -> None:
    """Seed all generators anew, every rank and step in its own way, on every device."""
    for_python, for_numpy, for_torch = np.random.SeedSequence([seed, step, rank]).generate_state(3)
    random.seed(int(for_python))
    np.random.seed(int(for_numpy))
    torch.manual_seed(int(for_torch))


def _to_text(state: torch.Tensor) -> str:
    return bytes(state.cpu().numpy()).hex()


def _from_text(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
