"""Rows of numbers -> event files for TensorBoard, with tensorboardX: the optional extra parity-rl[tensorboard].

Used only by tracker.py, in a thread of its own as trackers of a user are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from trainer.config.outputs import CustomSink

DIRECTORY = "tensorboard"
"""In run.dir."""
FLUSH_S = 5
"""Seconds of points that a killed run loses at most; a thread of the package writes the points."""


@dataclass(kw_only=True)
class TensorBoardSink(CustomSink):
    """The TensorBoard side of one run, in `run_dir/tensorboard`."""

    source: ClassVar[str] = "TensorBoard"
    writer: Any = None

    def start(self, run_dir: Path, config: Mapping[str, object], *, last_step: int | None) -> None:
        """Begin; of a run that goes on after `last_step`, later points are taken back."""
        from tensorboardX import SummaryWriter

        purge_step = None if last_step is None else last_step + 1
        # The package names a file after the second, and overwrites one of the same name.
        suffix = f".after_step_{last_step or 0}"
        self.writer = SummaryWriter(
            str(run_dir / DIRECTORY), purge_step=purge_step, flush_secs=FLUSH_S, filename_suffix=suffix
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def log_event(self, step: int, kind: str, text: str) -> None:
        self.writer.add_text(f"events/{kind}", text, step)

    def close(self, status: str) -> None:
        self.writer.close()
