"""Records what torch computes in this process, as a trace that https://ui.perfetto.dev shows."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

MEMORY_ENTRIES = 200_000
"""Newest allocations of a GPU that a snapshot of its memory keeps."""


class Recorder:
    """One record at a time of a process, of all its threads."""

    def __init__(self) -> None:
        self._profile: profile | None = None
        self._path = Path()

    def start(self, path: Path) -> None:
        """Begin; `stop` writes the trace to `path`, <name>.json.gz.

        On a GPU the allocations are recorded too, and their snapshot is written beside it, <name>.memory.pickle, for
        https://pytorch.org/memory_viz. Not yet run on a GPU.
        """
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_ENTRIES)
        # Engines and autograd compute in threads of their own.
        threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        self._profile, self._path = profile(activities=activities, experimental_config=threads), path
        self._profile.start()

    def stop(self) -> None:
        """End, and write the trace; nothing happens if nothing is recorded."""
        if self._profile is None:
            return
        recorded, self._profile = self._profile, None
        recorded.stop()
        recorded.export_chrome_trace(str(self._path))
        if torch.cuda.is_available():
            torch.cuda.memory._dump_snapshot(str(self._path).removesuffix(".json.gz") + ".memory.pickle")
            torch.cuda.memory._record_memory_history(enabled=None)
