"""A ranking -> the table as Markdown that is also readable in a terminal, and the sentences under the table."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.study.config import StudyConfig
from trainer.study.ranking import TARGET_SHARE, Ranking, Standings
from trainer.study.results import CellResult, Spread

TITLES = (
    "precision", "place", "mode", "held-out, last", "collapsed", "worst K3", "entropy, last", "largest gradient",
    "least ESS", "steps to target", "s per step", "seeds",
)  # fmt: skip
_LEFT_ALIGNED = ("precision", "place", "mode")


def table_rows(ranking: Ranking) -> list[tuple[str, ...]]:
    """The cells of the table, a row per mode and precision, in the order of `TITLES`."""
    return [_row(row, ranking) for row in ranking.rows]


def render_table(ranking: Ranking) -> list[str]:
    """The table as lines of Markdown, columns padded to one width."""
    rows = [TITLES, *table_rows(ranking)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(TITLES))]
    lines = []
    for number, row in enumerate(rows):
        cells = [
            text.ljust(width) if title in _LEFT_ALIGNED else text.rjust(width)
            for title, text, width in zip(TITLES, row, widths, strict=True)
        ]
        lines.append(f"| {' | '.join(cells)} |".rstrip())
        if number == 0:
            marks = [
                "-" * width if title in _LEFT_ALIGNED else "-" * (width - 1) + ":"
                for title, width in zip(TITLES, widths, strict=True)
            ]
            lines.append(f"| {' | '.join(marks)} |")
    return lines


def study_notes(study: StudyConfig, results: Sequence[CellResult], ranking: Ranking) -> list[str]:
    """Explanations of the table, one or two sentences each; every failed run is named."""
    notes = [
        "Modes are ranked within a precision by the mean over seeds of the greedy held-out accuracy after the last "
        "step; behind a mean stand the least and the largest seed. A place is a range where modes are not told apart, "
        "because their ranges overlap."
    ]
    for precision, *modes in ranking.same:
        notes.append(
            f"{precision}: {', '.join(modes[:-1])} and {modes[-1]} were the same run, step by step, with every seed: "
            "what sets them apart never came into play. They count as one."
        )
    if ranking.pairs:
        by_chance = f"{ranking.parted_by_chance:.1f}".removesuffix(".0")
        notes.append(
            f"{ranking.parted} of {ranking.pairs} pairs of modes are told apart. If all modes were equal, chance "
            f"alone would part up to {by_chance} of them with so few seeds."
            if ranking.parted_by_chance
            else "One seed tells nothing apart: there is no range to compare."
        )
    notes.append(
        f"Collapsed: the last held-out accuracy is more than {study.collapse_drop:g} below the best of the run. "
        "Entropy: mean of the last five steps. K3, gradient (norm before clipping) and ESS (raw weights): the worst "
        "step. Seconds per step: median."
    )
    if ranking.target is not None:
        why = "study.target" if study.target is not None else f"{TARGET_SHARE:.0%} of the way to the best mean"
        notes.append(
            f"Target: held-out accuracy {ranking.target:.3f} ({why}), looked for at the evaluated steps; behind it the "
            "runs that reach it."
        )
    notes.append("A quantised engine answers the held-out prompts as it samples: with its quantised weights.")
    notes += [f"{result.name} {_failure(result)}" for result in results if result.error]
    open_runs = sum(not result.finished and not result.error for result in results)
    if open_runs:
        notes.append(f"{open_runs} of {len(results)} runs have not ended, and are not in the table.")
    return notes


def _failure(result: CellResult) -> str:
    where = f"after step {result.last_step} of {result.num_steps}" if result.last_step else "before its first step"
    return f"FAILED {where}: {result.error}. It is not in the table."


def _row(row: Standings, ranking: Ranking) -> tuple[str, ...]:
    reached = "-"
    if ranking.target is not None and row.finished:
        steps = "" if row.steps_to_target is None else f"{row.steps_to_target.mean:.0f} "
        reached = f"{steps}({row.reached} of {row.finished})"
    failed = f", {row.failed} failed" if row.failed else ""
    return (
        row.precision,
        _place(row),
        row.mode,
        show_spread(row.score, ".3f"),
        f"{row.collapsed} of {row.finished}" if row.finished else "-",
        "-" if row.worst_k3 is None else f"{row.worst_k3.high:.1e}",
        show_spread(row.entropy, ".3f"),
        "-" if row.gradient is None else f"{row.gradient.high:.3g}",
        "-" if row.ess is None else f"{row.ess.low:.3f}",
        reached,
        "-" if row.step_seconds is None else f"{row.step_seconds.mean:.2g}",
        f"{row.finished} of {row.planned}{failed}",
    )


def _place(row: Standings) -> str:
    if row.places is None:
        return "-"
    first, last = row.places
    return str(first) if first == last else f"{first}-{last}"


def show_spread(found: Spread | None, form: str) -> str:
    """Mean and range, "0.91 (0.88-0.93)"; the number itself for one seed; "-" for None."""
    if found is None:
        return "-"
    if found.count == 1:
        return format(found.mean, form)
    return f"{found.mean:{form}} ({found.low:{form}}-{found.high:{form}})"
