"""RunData -> the content around the charts: headline numbers, status, facts, configuration."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from trainer.report.data import RunData, at, flat_config, is_number, plain, settings, show
from trainer.report.sections import PHASES
from trainer.text.plain import size


class Tile(NamedTuple):
    """One headline number; `before` is shown before an arrow."""

    label: str
    value: str
    detail: str
    before: str = ""


class StatusLabel(NamedTuple):
    """State of a run with its number of steps, and the CSS class that gives the colour."""

    text: str
    kind: str


def tiles(run: RunData) -> list[Tile]:
    """The headline numbers that the run has."""
    return [
        *_first_and_last(run, "eval/accuracy", "Held-out, greedy", form="percent"),
        *_first_and_last(run, "eval/accuracy_sampled", "Held-out, sampled", form="percent"),
        *_first_and_last(run, "reward/mean", "Reward", form="number"),
        *_medians(run),
    ]


def _first_and_last(run: RunData, key: str, label: str, *, form: str) -> Iterator[Tile]:
    values = run.values(key)
    if len(values) == 1:
        yield Tile(label, show(values[0], form), "measured once")
    elif values:
        change = values[-1] - values[0]
        detail = f"{100 * change:+.1f} points" if form == "percent" else f"{change:+.3g}, first to last step"
        yield Tile(label, show(values[-1], form), detail, before=show(values[0], form))


def _medians(run: RunData) -> Iterator[Tile]:
    """Mismatch and seconds, medians over the steps."""
    if run.has("mismatch/k3"):
        floor = median(run, "mismatch/k3_floor", "exponent", before=", rounding floor ")
        yield Tile("Mismatch K3", median(run, "mismatch/k3", "exponent"), f"median{floor}{_cause(run)}")
    if run.has("time/step_s"):
        total = sum(run.values("time/step_s")) or 1.0
        seconds = {name: sum(run.values(f"time/{name}_s")) for name in PHASES}
        largest = sorted(filter(seconds.__getitem__, PHASES), key=lambda name: -seconds[name])[:3]
        shares = "".join(f", {name} {100 * seconds[name] / total:.0f} %" for name in largest)
        yield Tile("Time per step", f"{median(run, 'time/step_s')} s", f"median{shares}")


_OLDER = re.compile(r"mismatch/by_lag/[1-9]\d*/k3")
"""K3 of the tokens that were sampled so many optimizer steps before."""


def _cause(run: RunData) -> str:
    """Which part of the mismatch is the larger one; "" where the parts were not measured, or not in most steps.

    Rounding and arithmetic are measured on tokens of the newest weights only.
    """
    total = run.values("mismatch/k3")
    weights, arithmetic = run.values("mismatch/k3_weights"), run.values("mismatch/k3_arithmetic")
    if not weights or not arithmetic:
        return ""
    parts = {
        "the rounding of the weights": statistics.median(weights),
        "the arithmetic": statistics.median(arithmetic),
    }
    if any(map(_OLDER.fullmatch, run.rows[-1])) and statistics.median(total) > 2 * sum(parts.values()):
        return ", mostly from tokens of older weights"
    if 2 * min(len(weights), len(arithmetic)) < len(total):
        return ""
    (larger, most), (_, least) = sorted(parts.items(), key=lambda part: -part[1])
    if most < 2 * least:
        return ", from weights and arithmetic alike"
    return f", mostly from {larger}"


def median(run: RunData, key: str, form: str = "number", *, before: str = "") -> str:
    """`before` and the median of a metric; "" if the run does not have it."""
    values = run.values(key)
    return before + show(statistics.median(values), form) if values else ""


def config_difference(runs: Sequence[RunData]) -> list[tuple[str, list[str]]]:
    """(key, value in each run) of every key that differs, chosen group members first.

    The value is "" where a run lacks the key, which is no difference from null; it tells the earlier values of a run
    that was resumed with others.
    """
    flat = [settings(run.config) | dict(_histories(run)) for run in runs]
    keys = dict.fromkeys(key for values in flat for key in values if key != "run.dir")
    rows = [(key, [values.get(key, "") for values in flat]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1 and not set(values) <= {"", "null"}]


def changes(run: RunData) -> list[tuple[str, str]]:
    """(key, its values with their steps) of every setting that a resume has changed, chosen group members first.

    Keys of another group member came and went with the choice of the member and are left out.
    """
    kept = set.intersection(*(set(settings(config)) for config in (run.config, *(config for _, config in run.earlier))))
    return [(key, text) for key, text in _histories(run) if key in kept]


def _histories(run: RunData) -> Iterator[tuple[str, str]]:
    """(key, for example "mis until step 9, then tis") of every key that a resume has changed."""
    stages = [(f" until step {step}", settings(config)) for step, config in run.earlier] + [("", settings(run.config))]
    for key in dict.fromkeys(key for _, flat in reversed(stages) for key in flat):
        values = [(flat.get(key, "-"), until) for until, flat in stages]
        # A value that a later resume kept counts until the last of its steps.
        parts = [f"{value}{until}" for (value, until), (after, _) in pairwise([*values, (None, "")]) if value != after]
        if len({value for value, _ in values}) > 1:
            yield key, ", then ".join(parts)


def status_of(run: RunData) -> StatusLabel:
    """The state of a run, and its number of steps."""
    last = run.rows[-1]["step"] if run.rows else 0
    planned = at(run.config, "run", "num_steps")
    steps = f"{last} of {planned} steps" if planned else f"{last} steps"
    state = at(run.status, "status") or ("completed" if planned == last else "")
    return StatusLabel(f"{state}, {steps}" if state else steps, state or "open")


def facts(run: RunData) -> list[str]:
    """The line under the title: model, method and date of the run."""
    line = [run.name, *(f"{name} {run.choices[name]}" for name in ("model", "data", "rollout") if name in run.choices)]
    if "correction" in run.choices:
        correction = at(run.config, "correction")
        bound = f", C = {correction['cap']:g}" if isinstance(correction, dict) and is_number(correction, "cap") else ""
        before = dict(changes(run)).get("correction")
        line.append(f"correction {before or run.choices['correction'] + bound}")
    if at(run.config, "advantage", "estimator"):
        line.append(f"advantage {at(run.config, 'advantage', 'estimator')}")
    first, last = (at(run.environment, key) for key in ("first_started_at", "started_at"))
    if first or last:
        line.append(f"started {_minute(first or last)}")
    if first:
        line.append(f"resumed {_minute(last)}")
    return line


def _minute(time: object) -> str:
    return f"{str(time)[:16].replace('T', ' ')} UTC"


def config_sections(run: RunData) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """(section, chosen group member, [(key, value)]) of the configuration."""
    return [
        (str(name), run.choices.get(name, ""), [(str(key), plain(value)) for key, value in values.items()])
        for name, values in run.config.items()
        if name != "defaults" and isinstance(values, dict)
    ]


def environment_facts(run: RunData) -> list[tuple[str, str]]:
    """Machine, revision, command line and versions."""
    record = dict(run.environment)
    if is_number(record, "memory_bytes"):
        record["memory"] = size(record.pop("memory_bytes"))
    if isinstance(at(record, "argv"), list):
        record["argv"] = " ".join(map(str, record["argv"]))
    return [(key, value) for key, value in flat_config(record).items() if value not in ("null", "[]", "{}", "")]
