"""RunData -> the content around the charts: headline numbers, status, facts, phases, config, sample tables."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainer.report.data import Row, RunData, at, show
from trainer.report.sections import PHASES


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """One headline number."""

    label: str
    value: str
    before: str = ""
    """Value shown before an arrow."""
    detail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """Status of a run."""

    text: str
    kind: str
    """CSS class that gives the colour."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseRow:
    """One phase of the step, for one run or several."""

    name: str
    cells: list[PhaseCell]
    """Cells, one per run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseCell:
    """Times of one phase in one run; "" for an unknown value."""

    seconds: str = ""
    """Median seconds over the steps that had the phase."""
    share: str = ""
    """Share of the seconds of all steps."""
    limit: str = ""
    """Median fraction of the hardware's limit."""


def tiles(run: RunData) -> list[Tile]:
    """The headline numbers that the run has."""
    found = [
        _before_after(run, "eval/accuracy", "Held-out, greedy", percent=True),
        _before_after(run, "eval/accuracy_sampled", "Held-out, sampled", percent=True),
        _before_after(run, "reward/mean", "Reward", percent=False),
        _mismatch(run),
        _step_time(run),
        _limits(run),
        _sync(run),
    ]
    return [tile for tile in found if tile is not None]


def phases(runs: Sequence[RunData]) -> list[PhaseRow]:
    """Seconds of each phase and their fraction of the hardware's limit; the whole step last."""
    named = [name for name in (*PHASES, "step") if any(run.has(f"time/{name}_s") for run in runs)]
    return [PhaseRow(name=name, cells=[_phase(run, name) for run in runs]) for name in named]


def _phase(run: RunData, name: str) -> PhaseCell:
    seconds = run.values(f"time/{name}_s")
    total = sum(run.values("time/step_s"))
    if not seconds:
        return PhaseCell()
    limits = run.values(f"perf/{name}_floor_frac")
    return PhaseCell(
        seconds=_seconds(statistics.median(seconds)),
        share=show(sum(seconds) / total, "percent") if total else "",
        limit=show(statistics.median(limits), "percent") if limits else "",
    )


def _seconds(value: float) -> str:
    return f"{show(value, 'number')} s" if value >= 0.001 or value == 0 else "< 0.001 s"


def config_difference(runs: Sequence[RunData]) -> list[tuple[str, list[str]]]:
    """(key, value in each run) of every key that differs, chosen group members first; always contains run.dir."""
    flat = [dict(run.choices) | _flat(run.config) for run in runs]
    absent = dict.fromkeys((key for values in flat for key in values), "")
    whole = [absent | values for values in flat]
    rows = [(key, [values[key] for values in whole]) for key in absent if key != "run.dir"]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _flat(config: Row, above: str = "") -> dict[str, str]:
    """Dotted key -> value as text; `defaults` holds the choices, one entry per group."""
    found: dict[str, str] = {}
    for key, value in config.items():
        name = f"{above}{key}"
        if isinstance(value, dict) and value:
            found |= _flat(value, f"{name}.")
        elif name != "defaults":
            found[name] = _plain(value)
    return found


def status_of(run: RunData) -> Status:
    """The Status of a run: its state, and its number of steps."""
    last = run.rows[-1]["step"] if run.rows else 0
    planned = at(run.config, "run", "num_steps")
    steps = f"{last} of {planned} steps" if planned else f"{last} steps"
    state = at(run.status, "status") or ("completed" if planned == last else "")
    return Status(text=f"{state}, {steps}" if state else steps, kind=state or "open")


def facts(run: RunData) -> list[str]:
    """The line under the title: model, method and date of the run."""
    found = [run.name, *(f"{name} {run.choices[name]}" for name in ("model", "data", "rollout") if name in run.choices)]
    if "correction" in run.choices:
        cap = at(run.config, "correction", "cap")
        bound = f", C = {cap:g}" if isinstance(cap, (int, float)) else ""
        found.append(f"correction {run.choices['correction']}{bound}")
    if at(run.config, "advantage", "estimator"):
        found.append(f"advantage {at(run.config, 'advantage', 'estimator')}")
    if at(run.environment, "started_at"):
        found.append(f"started {str(at(run.environment, 'started_at'))[:16].replace('T', ' ')} UTC")
    return found


def config_sections(run: RunData) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """(section, chosen group member, [(key, value)]) of the configuration."""
    sections = []
    for name, values in run.config.items():
        if name != "defaults" and isinstance(values, dict):
            choice = run.choices.get(name, "")
            sections.append((name, choice, [(str(key), _plain(value)) for key, value in values.items()]))
    return sections


def environment_facts(run: RunData) -> list[tuple[str, str]]:
    """Machine, revision, command line and versions."""
    found: list[tuple[str, str]] = []
    for key, value in run.environment.items():
        if key == "versions" and isinstance(value, dict):
            continue
        if key == "memory_bytes" and isinstance(value, (int, float)):
            found.append(("memory", f"{value / 2**30:.1f} GiB"))
        elif key == "argv" and isinstance(value, list):
            found.append(("command", " ".join(str(word) for word in value)))
        elif key == "git" and isinstance(value, dict):
            found.append(("revision", f"{value['revision']}{' with local changes' if value['dirty'] else ''}"))
        elif value not in (None, [], ""):
            found.append((key.replace("_", " "), _plain(value)))
    versions = at(run.environment, "versions")
    if isinstance(versions, dict):
        found += [(str(name), str(version)) for name, version in versions.items() if version]
    return found


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _before_after(run: RunData, key: str, label: str, *, percent: bool) -> Tile | None:
    values = run.values(key)
    if not values:
        return None
    form = "percent" if percent else "number"
    if len(values) == 1:
        return Tile(label=label, value=show(values[0], form), detail="measured once")
    change = values[-1] - values[0]
    detail = f"{100 * change:+.1f} points" if percent else f"{change:+.3g}, first to last step"
    return Tile(label=label, before=show(values[0], form), value=show(values[-1], form), detail=detail)


def _mismatch(run: RunData) -> Tile | None:
    values, floors = run.values("mismatch/k3"), run.values("mismatch/k3_floor")
    if not values:
        return None
    floor = f", rounding floor {show(statistics.median(floors), 'exponent')}" if floors else ""
    return Tile(label="Mismatch K3", value=show(statistics.median(values), "exponent"), detail=f"median{floor}")


def _step_time(run: RunData) -> Tile | None:
    steps = run.values("time/step_s")
    if not steps:
        return None
    total = sum(steps)
    shares = [f"{name} {100 * sum(run.values(f'time/{name}_s')) / total:.0f} %" for name in ("rollout", "train", "sync")
              if run.has(f"time/{name}_s")]  # fmt: skip
    detail = ", ".join(["median", *shares])
    return Tile(label="Time per step", value=f"{show(statistics.median(steps), 'number')} s", detail=detail)


def _limits(run: RunData) -> Tile | None:
    """The fraction of the hardware's limit that a step reached; each phase with its median seconds."""
    shares = run.values("perf/step_floor_frac")
    if not shares:
        return None
    parts = [
        f"{name} {show(statistics.median(run.values(f'time/{name}_s')), 'number')} s at "
        f"{show(statistics.median(run.values(f'perf/{name}_floor_frac')), 'percent')}"
        for name in ("rollout", "train", "sync")
        if run.has(f"time/{name}_s") and run.has(f"perf/{name}_floor_frac")
    ]
    mfu = [f"MFU {show(statistics.median(run.values('perf/mfu')), 'percent')}"] if run.has("perf/mfu") else []
    detail = ", ".join(["median", *parts, *mfu])
    return Tile(label="Share of the hardware's limit", value=show(statistics.median(shares), "percent"), detail=detail)


def _sync(run: RunData) -> Tile | None:
    speeds = run.values("sync/gb_per_s")
    if not speeds:
        return None
    details = ["median"]
    if run.has("sync/bytes"):
        details.append(f"{show(statistics.median(run.values('sync/bytes')) / 1e6, 'number')} MB")
    if run.has("sync/seconds"):
        details.append(f"{1000 * statistics.median(run.values('sync/seconds')):.0f} ms")
    return Tile(
        label="Weight sync", value=f"{show(statistics.median(speeds), 'number')} GB/s", detail=", ".join(details)
    )
