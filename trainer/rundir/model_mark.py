"""A short text that tells the weights of two models apart, without reading them whole."""

from __future__ import annotations

from pathlib import Path

import xxhash

SAMPLES = 64
"""Places of each file that are read, at equal distances."""
SAMPLE_BYTES = 4096


def model_mark(directory: Path) -> str | None:
    """xxh3-128 over the safetensors files of a model: their names, their sizes and SAMPLES places of each.

    Training moves all weights, so a few places tell two models of the same shape apart. None if there is no such file.
    """
    digest = xxhash.xxh3_128()
    files = sorted(directory.glob("*.safetensors"))
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for number in range(SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * number // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest() if files else None
