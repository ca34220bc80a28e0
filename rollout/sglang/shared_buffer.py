"""Weight bytes in memory that another process can map: the trainer's buckets -> the SGLang server, without a copy on
the wire.

The writer (`rollout/sglang/weight_update.py`) fills an anonymous memory file and sends its path; the reader
(`rollout/sglang/loader.py`, inside the server) maps it. Nothing has a name in a file system, so nothing can be left
behind when either side is killed, and the size of /dev/shm does not matter.
"""

from __future__ import annotations

import mmap
import os
from types import TracebackType

import numpy as np


class SharedBuffer:
    """An anonymous memory file of this process. A context manager: leaving it frees the memory once nobody maps it."""

    def __init__(self, num_bytes: int) -> None:
        """Raises OSError if the system cannot give the memory."""
        self._descriptor = os.memfd_create("parity-weights")
        try:
            os.ftruncate(self._descriptor, num_bytes)
            self._map = mmap.mmap(self._descriptor, num_bytes)
        except OSError:
            os.close(self._descriptor)
            raise

    @property
    def path(self) -> str:
        """Where a process of the same user opens the memory while this object lives."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def write(self, data: np.ndarray) -> None:
        """Copy [n] uint8, n <= num_bytes, to the beginning."""
        np.frombuffer(self._map, dtype=np.uint8, count=data.size)[:] = data

    def __enter__(self) -> SharedBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._map.close()
        os.close(self._descriptor)


def map_shared(path: str, *, num_bytes: int) -> mmap.mmap:
    """Map a SharedBuffer of another process, copy-on-write: what happens here never reaches the writer."""
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), num_bytes, access=mmap.ACCESS_COPY)
