"""Rows of numbers -> event files for TensorBoard, with tensorboardX: the optional extra parity-rl[tensorboard].

Used only by tracker.py. metrics.jsonl is the source of truth: a failure here is a warning.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trainer.rundir.events import Event

DIRECTORY = "tensorboard"
"""In run.dir."""
FLUSH_S = 5
"""Seconds of points that a killed run loses at most; a thread of the package writes the points."""


class TensorBoardSink:
    """The TensorBoard side of one run. Raises ImportError without the package."""

    def __init__(self, run_dir: Path, *, last_step: int | None) -> None:
        """Write to `run_dir/tensorboard`; of a run that goes on after `last_step`, later points are taken back."""
        from tensorboardX import SummaryWriter

        purge_step = None if last_step is None else last_step + 1
        # The package names a file after the second, and overwrites one of the same name.
        self._writer = SummaryWriter(
            str(run_dir / DIRECTORY),
            purge_step=purge_step,
            flush_secs=FLUSH_S,
            filename_suffix=f".after_step_{last_step or 0}",
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """One point per number."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def log_event(self, event: Event) -> None:
        """Show an event among the texts."""
        self._writer.add_text(f"events/{event.kind}", event.text, event.step)

    def close(self) -> None:
        """Write everything out."""
        self._writer.close()
