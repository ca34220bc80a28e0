"""Peak memory of a rank's training device: allocated on a GPU, resident on a CPU. Not yet run on a GPU."""

from __future__ import annotations

import psutil
import torch

from rollout.processes.process_memory import peak_bytes, reset_peak


def start_peak(device: torch.device) -> int:
    """Begin a new peak; returns the bytes held now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    reset_peak()
    return int(psutil.Process().memory_info().rss)


def read_peak(device: torch.device) -> int | None:
    """Maximum of bytes held since `start_peak`; None if the system does not report it."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_bytes()
