"""The files of a run directory -> RunData, headline tiles and sample tables: everything of a report but the charts.

page.py puts it on the page. Nothing here knows HTML. A file that is missing, and a line that is not JSON
(a run that was killed while writing), cost their part of the report and are named in `RunData.remarks`.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunData:
    """What a run left in its directory."""

    name: str
    """Name of the run directory."""
    rows: list[Row]
    """metrics.jsonl: one mapping per step, in the order of `step`."""
    samples: list[Row]
    config: Row
    """config.yaml; `defaults` holds the choice of each group."""
    environment: Row
    status: Row
    accounting: Row
    """What the fractions of the hardware's limits stand on."""
    remarks: list[str]
    """What could not be read."""

    @property
    def choices(self) -> dict[str, str]:
        """Group -> chosen member, for example {"correction": "tis"}."""
        found = {}
        document: Mapping[str, Any] = self.config  # the saved YAML, which may be absent: not a config object
        for entry in document.get("defaults", ()):
            if isinstance(entry, Mapping):
                for key, value in entry.items():
                    found[str(key).rsplit("/", 1)[-1]] = str(value)
        return found

    def values(self, key: str) -> list[float]:
        """The values of a metric where it is present, in step order."""
        return [row[key] for row in self.rows if is_number(row, key)]

    def has(self, key: str) -> bool:
        return any(is_number(row, key) for row in self.rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """One headline number."""

    label: str
    value: str
    before: str = ""
    """Shown before an arrow."""
    detail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleTable:
    """The samples of one step, the worst K3 first."""

    step: int
    rows: list[Row]


def load_run(run_dir: Path) -> RunData:
    """Read a run directory; raises FileNotFoundError if it holds no metrics.jsonl."""
    metrics = run_dir / "metrics.jsonl"
    if not metrics.is_file():
        raise FileNotFoundError(f"{metrics} is missing: {run_dir} is not the directory of a run")
    remarks: list[str] = []
    rows = {row["step"]: row for row in _read_lines(metrics, remarks) if is_number(row, "step")}
    return RunData(
        name=run_dir.resolve().name,
        rows=[rows[step] for step in sorted(rows)],
        samples=_read_lines(run_dir / "samples.jsonl", remarks),
        config=_read_mapping(run_dir / "config.yaml", remarks),
        environment=_read_mapping(run_dir / "environment.json", remarks),
        status=_read_mapping(run_dir / "status.json", []),
        accounting=_read_mapping(run_dir / "accounting.json", []),
        remarks=remarks,
    )


def is_number(row: Row, key: str) -> bool:
    """Whether the row has this metric, and it is a number."""
    return key in row and isinstance(row[key], (int, float)) and not isinstance(row[key], bool)


def at(config: Row, *path: str) -> Any:
    """The value at a path of nested mappings, None if there is none."""
    found: Any = config
    for key in path:
        if not isinstance(found, Mapping) or key not in found:
            return None
        found = found[key]
    return found


def evaluation_rows(run: RunData) -> list[dict[str, Any]]:
    """The rows with a held-out accuracy; `step` is 0 for the policy before its first update (policy version 0)."""
    found = []
    for row in run.rows:
        if is_number(row, "eval/accuracy") or is_number(row, "eval/accuracy_sampled"):
            untouched = is_number(row, "eval/policy_version") and row["eval/policy_version"] == 0
            found.append({**row, "step": 0 if untouched else row["step"]})
    return found


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


def sample_tables(run: RunData) -> list[SampleTable]:
    """The samples of the first and of the last step that has any."""
    by_step: dict[int, list[Row]] = {}
    for row in run.samples:
        if is_number(row, "step"):
            by_step.setdefault(row["step"], []).append(row)
    steps = sorted({min(by_step), max(by_step)}) if by_step else []
    return [SampleTable(step=step, rows=sorted(by_step[step], key=_worst_first)) for step in steps]


def thin(rows: Sequence[Row], most: int) -> list[int]:
    """Indices of at most `most` rows: of each stretch the one with the largest K3, so that no peak is lost."""
    if len(rows) <= most:
        return list(range(len(rows)))
    edges = [round(index * len(rows) / most) for index in range(most + 1)]

    def k3(index: int) -> float:
        return float(rows[index]["mismatch/k3"]) if is_number(rows[index], "mismatch/k3") else -1.0

    return [max(range(low, high), key=k3) for low, high in pairwise(edges)]


def show(value: float, form: str) -> str:
    """A number for people: "percent", "exponent", or three or four significant digits."""
    if form == "percent":
        edge = min(abs(value), abs(1 - value))  # "100.0 %" would hide a share of 99.998 %
        return f"{100 * value:.{4 if 0 < edge < 0.001 else 1}f} %"
    if form == "exponent":
        return f"{value:.2e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


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
    """How near the step came to what the hardware allows; each phase with its median seconds."""
    shares = run.values("perf/step_floor_frac")
    if not shares:
        return None
    phases = [
        f"{name} {show(statistics.median(run.values(f'time/{name}_s')), 'number')} s at "
        f"{show(statistics.median(run.values(f'perf/{name}_floor_frac')), 'percent')}"
        for name in ("rollout", "train", "sync")
        if run.has(f"time/{name}_s") and run.has(f"perf/{name}_floor_frac")
    ]
    mfu = [f"MFU {show(statistics.median(run.values('perf/mfu')), 'percent')}"] if run.has("perf/mfu") else []
    detail = ", ".join(["median", *phases, *mfu])
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


def _worst_first(row: Row) -> float:
    """Sort key: the largest K3 first; K3 is never negative, so samples without one come last."""
    return -float(row["k3"]) if is_number(row, "k3") else 1.0


def _read_lines(path: Path, remarks: list[str]) -> list[Row]:
    if not path.is_file():
        remarks.append(f"{path.name} is missing")
        return []
    rows: list[Row] = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if isinstance(row, dict):
                rows.append(row)
            else:
                remarks.append(f"{path.name} line {number} is not a JSON object and is left out")
    return rows


def _read_mapping(path: Path, remarks: list[str]) -> Row:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON is YAML
    except (OSError, ValueError, yaml.YAMLError) as error:
        remarks.append(f"{path.name} cannot be read ({type(error).__name__})")
        return {}
    return found if isinstance(found, dict) else {}
