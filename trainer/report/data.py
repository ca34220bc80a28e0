"""The files of a run directory -> RunData. This file does not know HTML.

The files may be damaged or a stranger's. A file that is missing, and a line of another form (a run that was killed
while writing), cost their part of the report and are named in `RunData.remarks`; a number that no chart can show counts
as missing, and long text is cut. So what follows needs not doubt the rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from trainer.rundir.rows import read_lines
from trainer.rundir.run_dir import (
    EVALUATIONS_FILE,
    EVENTS_FILE,
    HISTOGRAMS_FILE,
    METRICS_FILE,
    PROFILE,
    SAMPLES_FILE,
    STATUS_FILE,
    earlier_configs,
)
from trainer.text.yaml_text import leaves, load_yaml
from trainer.tracking.operations import Operations, load_operations

Row = Mapping[str, Any]

LARGEST = 1e30
"""Largest value of a number on the page; sums and squares of it are still numbers."""
MAX_STEP = 2**31 - 1
MAX_CHARS = 50_000
"""Characters of one text on the page."""
_SHOWN_LINES = 5
_TEXTS = ("prompt", "response", "answer")
"""Keys of a sample that hold text."""


DIAGNOSIS_FILE = Path("diagnosis", "diagnosis.json")
"""Of `parity diagnose`, in the directory of the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunData:
    """Content of the files in a run directory."""

    name: str
    """Name of the run directory."""
    rows: list[Row]
    """metrics.jsonl: one mapping per step, in the order of `step`; that of step 0 has the evaluation before training
    only."""
    samples: list[Row]
    histograms: list[Row]
    """histograms.jsonl: difference of the engines, one mapping per step, in the order of `step`."""
    evaluations: dict[int, list[Row]]
    """evaluations.jsonl: step -> prompts with their greedy response, of the first evaluation and of the last one."""
    events: list[Row]
    """events.jsonl: what happened beside the numbers, in the order of the file."""
    config: Row
    """config.yaml; `defaults` holds the choice of each group."""
    earlier: list[tuple[int, Row]]
    """(last step with it, configuration) before each resume that changed it, the oldest first."""
    environment: Row
    status: Row
    accounting: Row
    """Accounting of the hardware's limits, on which the fractions are based."""
    diagnosis: Row
    """What `parity diagnose` found; empty if nobody asked."""
    profiles: dict[str, list[Operations]]
    """Step that was recorded -> what each process computed."""
    remarks: list[str]
    """Problems of unreadable files and lines."""

    @property
    def choices(self) -> dict[str, str]:
        """Group -> chosen member, for example {"correction": "tis"}."""
        return group_members(self.config)

    @property
    def steps(self) -> list[Row]:
        """The rows of steps, without that of step 0."""
        return [row for row in self.rows if row["step"]]

    def values(self, key: str) -> list[float]:
        """The values of a metric in the steps that have it, in step order.

        Seconds and rates leave out the steps that were recorded, which take longer.
        """
        is_speed = key.startswith(("time/", "perf/"))
        return [row[key] for row in self.rows if is_number(row, key) and not (is_speed and "perf/profiled" in row)]

    def has(self, key: str) -> bool:
        return any(is_number(row, key) for row in self.rows)


def load_run(run_dir: Path) -> RunData:
    """Read a run directory; raises FileNotFoundError if it has no metrics.jsonl."""
    metrics = run_dir / METRICS_FILE
    if not metrics.is_file():
        raise FileNotFoundError(
            f"{metrics} is missing: {run_dir} is not the directory of a run, or of one without a step yet"
        )
    remarks: list[str] = []
    return RunData(
        name=run_dir.resolve().name,
        rows=rows_by_step(_read_lines(metrics, remarks)),
        samples=[_cut(row) for row in _read_lines(run_dir / SAMPLES_FILE, remarks, needed=_is_sample)],
        histograms=rows_by_step(_read_lines(run_dir / HISTOGRAMS_FILE, remarks)),
        evaluations=_read_evaluations(run_dir / EVALUATIONS_FILE, remarks),
        events=list(_read_lines(run_dir / EVENTS_FILE, remarks, needed=_is_event)),
        config=_read_mapping(run_dir / "config.yaml", remarks),
        earlier=[(step, _read_mapping(path, remarks)) for step, path in earlier_configs(run_dir)],
        environment=_read_mapping(run_dir / "environment.json", remarks),
        status=_read_mapping(run_dir / STATUS_FILE, []),
        accounting=_read_mapping(run_dir / "accounting.json", []),
        diagnosis=_read_mapping(run_dir / DIAGNOSIS_FILE, []) if (run_dir / DIAGNOSIS_FILE).is_file() else {},
        profiles=_read_profiles(run_dir / PROFILE, remarks),
        remarks=remarks,
    )


def is_number(row: Row, key: str) -> bool:
    """True if the row has this metric, and the value is a number that a chart can show."""
    if key not in row or not isinstance(row[key], (int, float)) or isinstance(row[key], bool):
        return False
    return -LARGEST <= row[key] <= LARGEST  # false for NaN


def has_step(row: Row) -> bool:
    """True if the row belongs to a step."""
    return is_number(row, "step") and isinstance(row["step"], int) and 0 <= row["step"] <= MAX_STEP


def at(config: Row, *path: str) -> Any:
    """The value at a path of nested mappings; None if there is no value."""
    value: Any = config
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return value


def group_members(config: Row) -> dict[str, str]:
    """Group -> chosen member, from the `defaults` of config.yaml."""
    entries = at(config, "defaults") or []
    members = [item for entry in entries if isinstance(entry, Mapping) for item in entry.items()]
    return {str(group).rsplit("/", 1)[-1]: str(member) for group, member in members}


def flat_config(config: Row) -> dict[str, str]:
    """Dotted key -> value as text; `defaults` is left out."""
    return {".".join(path): plain(value) for path, value in leaves(config) if path and path[-1] != "defaults"}


def settings(config: Row) -> dict[str, str]:
    """Choice of each group, and dotted key -> value as text."""
    members = group_members(config)
    # A section without keys of its own, as schedule=sync has, must not hide the option that was chosen.
    return members | {key: value for key, value in flat_config(config).items() if key not in members}


def plain(value: Any) -> str:
    """A value of a YAML or JSON file as text."""
    # YAML knows dates, sets and other keys than text.
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str, skipkeys=True)
    return cut(text)


def cut(text: str) -> str:
    """The text, as much of it as the page shows."""
    if len(text) <= MAX_CHARS:
        return text
    return f"{text[:MAX_CHARS]} … and {len(text) - MAX_CHARS:,} more characters"


def evaluation_rows(rows: Sequence[Row]) -> list[Row]:
    """The rows with a held-out accuracy."""
    return [row for row in rows if is_number(row, "eval/accuracy") or is_number(row, "eval/accuracy_sampled")]


def thin(rows: Sequence[Row], most: int) -> list[int]:
    """Indices of at most `most` rows: of each stretch the row with the largest K3, so that no peak is lost."""
    if len(rows) <= most:
        return list(range(len(rows)))
    edges = [round(index * len(rows) / most) for index in range(most + 1)]

    def k3(index: int) -> float:
        return float(rows[index]["mismatch/k3"]) if is_number(rows[index], "mismatch/k3") else -1.0

    return [max(range(low, high), key=k3) for low, high in pairwise(edges)]


def show(value: float, form: str) -> str:
    """Text of a number for people: "percent", "exponent", or three or four significant digits."""
    if form == "percent":
        edge = min(abs(value), abs(1 - value))  # "100.0 %" would hide a share of 99.998 %
        return f"{100 * value:.{4 if 0 < edge < 0.001 else 1}f} %"
    if form == "exponent":
        return f"{value:.2e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def load_runs(run_dirs: Sequence[Path]) -> list[RunData]:
    """Read run directories; the parent directories distinguish runs of the same name.

    Raises FileNotFoundError if a directory has no metrics.jsonl.
    """
    runs = [load_run(run_dir) for run_dir in run_dirs]
    parts = [run_dir.resolve().parts for run_dir in run_dirs]
    depth = 1
    while depth < max(map(len, parts)) and len({one[-depth:] for one in parts}) < len(set(parts)):
        depth += 1
    return [replace(run, name="/".join(one[-depth:])) for run, one in zip(runs, parts, strict=True)]


def rows_by_step(rows: Iterable[Row]) -> list[Row]:
    """One row per step, in the order of `step`: an evaluation that was made up for has a row of its own."""
    by_step: dict[int, Row] = {}
    for row in filter(has_step, rows):
        by_step[row["step"]] = {**by_step.get(row["step"], {}), **row}
    return [by_step[step] for step in sorted(by_step)]


def _read_lines(path: Path, remarks: list[str], *, needed: Callable[[Row], bool] = has_step) -> Iterator[Row]:
    if not path.is_file():
        remarks.append(f"{path.name} is missing")
        return
    wrong: list[str] = []
    for line in read_lines(path):
        if line.row is None:
            wrong.append(f"{path.name} line {line.number} is not a JSON object and is left out")
        elif not needed(line.row):
            wrong.append(f"{path.name} line {line.number} is not a row of a run and is left out")
        else:
            yield line.row
    remarks += wrong[:_SHOWN_LINES]
    if len(wrong) > _SHOWN_LINES:
        remarks.append(f"{path.name}: {len(wrong) - _SHOWN_LINES:,} more lines are left out")


def _read_evaluations(path: Path, remarks: list[str]) -> dict[int, list[Row]]:
    """Only two evaluations are held at a time: their texts may be large."""
    found: dict[int, list[Row]] = {}
    for row in _read_lines(path, remarks, needed=_is_answered):
        kept = {key: row[key] for key in ("step", "set", "prompt_id", "prompt", "answer")}
        found.setdefault(row["step"], []).append(_cut({**row["greedy"], **kept}))
        for between in sorted(found)[1:-1]:
            del found[between]
    return found


def _is_sample(row: Row) -> bool:
    """True for a row with what every sample has."""
    return has_step(row) and {"prompt_id", "sample_index"} <= row.keys() and all(key in row for key in _TEXTS)


def _is_answered(row: Row) -> bool:
    """True for a prompt of an evaluation, with its greedy response."""
    has_response = at(row, "greedy", "response") is not None
    return has_step(row) and has_response and {"set", "prompt_id", "prompt", "answer"} <= row.keys()


def _is_event(row: Row) -> bool:
    """True for a row with what every event has."""
    return has_step(row) and {"kind", "text"} <= row.keys()


def _cut(sample: Row) -> Row:
    return {**sample, **{key: cut(str(sample[key])) for key in _TEXTS}}


def _read_profiles(directory: Path, remarks: list[str]) -> dict[str, list[Operations]]:
    found = {}
    for step in sorted(directory.glob("step_*")):
        try:
            found[step.name.removeprefix("step_").lstrip("0")] = load_operations(step)
        except (OSError, ValueError) as error:
            remarks.append(f"the profile of {step.name} cannot be read ({error})")
    return found


def _read_mapping(path: Path, remarks: list[str]) -> Row:
    try:
        content = load_yaml(path.read_text(encoding="utf-8"))  # JSON is YAML
    except (OSError, ValueError) as error:
        remarks.append(f"{path.name} cannot be read ({error})")
        return {}
    return content if isinstance(content, dict) else {}
