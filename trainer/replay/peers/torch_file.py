"""A torch file of another trainer, read without running anything in it.

`torch.load(weights_only=True)` makes tensors, numbers, texts and containers, and nothing else. What a file holds beyond
these is named before it is refused.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

from trainer.replay.bundle import BundleError
from trainer.replay.peers.rows import HOW


def load_torch_file(path: Path) -> dict[object, object]:
    """The dict in the file `path`, tensors on the host. Raises BundleError if it is damaged or holds more than data."""
    try:
        foreign = get_unsafe_globals_in_checkpoint(path)
        if not foreign:
            # mmap: routed experts and the like may be many times as large as what is read.
            found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # torch raises a class of pickle's, and several others, for a damaged file
        raise BundleError(f"{path} is no torch file that can be read: {error}") from error
    if foreign:
        raise BundleError(
            f"{path} holds objects of {', '.join(sorted(foreign))}: only tensors, numbers, texts and containers are "
            f"loaded, because anything else can run code. In the trainer, make them plain numbers before the file is "
            f"written (float(x), x.tolist()), or write a bundle ({HOW})"
        )
    if not isinstance(found, dict):
        raise BundleError(f"{path} holds a {type(found).__name__}, not the dict that slime and miles write ({HOW})")
    return found
