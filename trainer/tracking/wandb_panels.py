"""Defines the view of a run in W&B: axes, summaries, the table of samples, histograms, alerts.

Every function here calls wandb, and only the thread of wandb_sink.py calls these functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from algorithms.histograms import HistogramArrays
from trainer.rundir.events import Event

SUMMARIES = (
    ("reward/mean", "max,last"),
    ("eval/", "max,last"),
    ("mismatch/k3", "max,last"),
    ("mismatch/ess/", "min,last"),
    ("guard/level", "max,last"),
    ("time/", "mean,last"),
    ("perf/", "mean,last"),
)
"""(metric or group, what the summary of the run keeps of it); of all others it keeps the last value."""
SHARE_OF_TABLE = 0.1
"""An increment of the table is sent when it holds this share of what was sent: W&B shows the last hundred."""


class Panels:
    """The panels of one run."""

    def __init__(self, run: Any) -> None:
        """`run` is what wandb.init returned."""
        self._run = run
        self._table: Any = None
        self._sent = self._waiting = self._step = 0
        self._known: set[str] = set()
        # Rows are placed by our step: W&B silently drops rows whose own counter would go back.
        run.define_metric("global_step", hidden=True)
        run.define_metric("*", step_metric="global_step")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """One row of finite numbers."""
        for name in numbers:
            self._define(name)
        self._run.log({"global_step": step, **numbers})

    def _define(self, name: str) -> None:
        """Name by name: where two patterns fit a metric, W&B takes one of them by chance."""
        if name in self._known:
            return
        self._known.add(name)
        for key, summary in SUMMARIES:
            if name == key or (key.endswith("/") and name.startswith(key)):
                self._run.define_metric(name, step_metric="global_step", summary=summary)

    def log_histograms(self, step: int, histograms: HistogramArrays) -> None:
        """The sum of |Delta| by octave of mu, and by octave of the position in the response."""
        import wandb

        drawn = {}
        for name, axis in (("log2_probability", histograms.by_probability), ("log2_position", histograms.by_position)):
            mass = np.array([count * (mean or 0.0) for count, mean in zip(axis.counts, axis.abs_logdiff, strict=True)])
            octaves = np.arange(len(axis.edges), dtype=float)
            if axis.edges[0] > axis.edges[1]:
                mass, octaves = mass[::-1], -octaves[::-1]
            drawn[f"mismatch/{name}"] = wandb.Histogram(np_histogram=(mass, octaves))
        self._run.log({"global_step": step, **drawn})

    def alert(self, event: Event) -> None:
        """An event as an alert."""
        # W&B takes 0 for its own pause of a minute between alerts with one title.
        self._run.alert(title=f"Parity: {event.kind}", text=event.text, level=event.severity.value, wait_duration=1)

    def log_samples(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        """Rows of the table of samples, JSON values under the same keys every time."""
        import wandb

        for row in rows:
            if self._table is None:
                self._table = wandb.Table(columns=list(row), log_mode="INCREMENTAL")
            self._table.add_data(*row.values())
        self._waiting, self._step = self._waiting + len(rows), step
        if self._waiting > SHARE_OF_TABLE * self._sent:
            self.send_samples()

    def send_samples(self) -> None:
        """Send what the table has gained: an increment, not the table again."""
        if not self._waiting:
            return
        self._run.log({"global_step": self._step, "samples": self._table})
        self._sent, self._waiting = self._sent + self._waiting, 0
        # wandb has copied the increment to run.dir/wandb and would leave the original, prompts and responses, in the
        # temporary directory until the process exits in order.
        self._table._artifact_target.artifact._tmp_dir.cleanup()
