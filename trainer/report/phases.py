"""RunData -> where the time goes: the table of phases, shares of the hardware's limit, and the recorded steps."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from trainer.report.data import RunData, show
from trainer.report.headline import Tile, median
from trainer.report.sections import PHASES
from trainer.tracking.operations import IDLE, KINDS, OTHER, Operations


class PhaseCell(NamedTuple):
    """Times of one phase in one run; "" for an unknown value."""

    seconds: str = ""
    """Median seconds over the steps that had the phase."""
    share: str = ""
    """Share of the seconds of all steps."""
    limit: str = ""
    """Median fraction of the hardware's limit."""


class PhaseRow(NamedTuple):
    """One phase of the step, with a cell per run."""

    name: str
    cells: list[PhaseCell]


def speeds(run: RunData) -> Iterator[Tile]:
    """The numbers beside the table of phases: share of the hardware's limit, speed of the weight sync; medians."""
    if run.has("perf/step_floor_frac"):
        parts = [
            f", {name} {median(run, f'time/{name}_s')} s at {median(run, f'perf/{name}_floor_frac', 'percent')}"
            for name in PHASES
            if run.has(f"time/{name}_s") and run.has(f"perf/{name}_floor_frac")
        ]
        mfu = median(run, "perf/mfu", "percent", before=", MFU of the measured rate ")
        value = median(run, "perf/step_floor_frac", "percent")
        yield Tile("Share of the hardware's limit", value, f"median{''.join(parts)}{mfu}")
    if run.has("sync/gb_per_s"):
        megabytes = [number / 1e6 for number in run.values("sync/bytes")]
        seconds = run.values("sync/seconds")
        detail = f", {show(statistics.median(megabytes), 'number')} MB" if megabytes else ""
        detail += f", {1000 * statistics.median(seconds):.0f} ms" if seconds else ""
        yield Tile("Weight sync", f"{median(run, 'sync/gb_per_s')} GB/s", f"median{detail}")


def phases(runs: Sequence[RunData]) -> list[PhaseRow]:
    """Seconds of each phase and their fraction of the hardware's limit; the whole step last."""
    names = [name for name in (*PHASES, "step") if any(run.has(f"time/{name}_s") for run in runs)]
    return [PhaseRow(name, [_phase(run, name) for run in runs]) for name in names]


def _phase(run: RunData, name: str) -> PhaseCell:
    seconds = run.values(f"time/{name}_s")
    if not seconds:
        return PhaseCell()
    total, middle = sum(run.values("time/step_s")), statistics.median(seconds)
    return PhaseCell(
        seconds="< 0.001 s" if 0 < middle < 0.001 else f"{show(middle, 'number')} s",
        share=show(sum(seconds) / total, "percent") if total else "",
        limit=median(run, f"perf/{name}_floor_frac", "percent"),
    )


class Profile(NamedTuple):
    """What the processes computed in a step that was recorded; rows of text."""

    step: str
    shares: list[list[str]]
    """Process, seconds, then the share of each of PROFILE_KINDS."""
    operations: list[list[str]]
    """Process, operator, seconds, calls."""


PROFILE_KINDS = (*KINDS, OTHER, IDLE)


def profiles(run: RunData) -> list[Profile]:
    """The tables of the recorded steps."""
    return [
        Profile(
            step,
            shares=[[each.process, f"{each.seconds:.2f}", *_shares(each)] for each in found],
            operations=[
                [each.process, name, f"{seconds:.3f}", f"{calls:,}"]
                for each in found
                for name, seconds, calls in each.operations
            ],
        )
        for step, found in run.profiles.items()
    ]


def _shares(process: Operations) -> list[str]:
    return [show(process.shares.get(kind, 0.0), "percent") for kind in PROFILE_KINDS]
