"""The device of a check: how to wait for it, how to time and to measure memory on it, and where to put files."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from gpu_check.rows import NotRunError
from trainer.limits.device_memory import read_peak, start_peak

T = TypeVar("T")

NEEDS_CUDA = "needs CUDA"
WARM_UPS = 3
"""Calls before the first one that is timed, on a GPU; one on a CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """Where a check runs."""

    device: torch.device
    out: Path
    """Directory for results of a check besides its rows."""
    scratch: Path
    """Directory for models and checkpoints, which is removed afterwards."""
    threads: int
    """Torch threads of a rank on a CPU."""

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def pick(self, on_cuda: T, on_cpu: T) -> T:
        """The size for this device."""
        return on_cuda if self.is_cuda else on_cpu

    def wait(self) -> None:
        """Until everything that was started on the device has ended."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def require_cuda(self) -> None:
        """Raise NotRunError without a GPU."""
        if not self.is_cuda:
            raise NotRunError(NEEDS_CUDA)

    def seconds(self, work: Callable[[], object], *, repeats: int = 5) -> float:
        """Median seconds of `repeats` calls, each to its end on the device, after warm-up calls."""
        for _ in range(self.pick(WARM_UPS, 1)):
            work()
        times = []
        for _ in range(repeats):
            self.wait()
            started = time.perf_counter()
            work()
            self.wait()
            times.append(time.perf_counter() - started)
        return statistics.median(times)

    def once(self, work: Callable[[], T]) -> tuple[T, float]:
        """The result of one call, and its seconds to its end on the device."""
        self.wait()
        started = time.perf_counter()
        result = work()
        self.wait()
        return result, time.perf_counter() - started

    def peak(self, work: Callable[[], object]) -> int:
        """Bytes that the call needs above what was held before: tensors on a GPU, resident memory on a CPU."""
        self.wait()
        before = start_peak(self.device)
        work()
        self.wait()
        return max(0, (read_peak(self.device) or before) - before)

    def used(self) -> int:
        """Bytes of the GPU's memory that are not free, those of other processes included. Needs CUDA."""
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free


def gib(number: float) -> str:
    return f"{number / 2**30:.2f} GiB" if number >= 2**27 else f"{number / 2**20:.1f} MiB"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def rate(num_bytes: float, seconds: float) -> str:
    return f"{num_bytes / seconds / 1e9:.1f} GB/s"
