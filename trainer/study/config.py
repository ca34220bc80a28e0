"""Configuration of `parity study`: the axes of the grid, the runs at a time, the definition of a collapse.

Words `study.key=value` of the command line become a StudyConfig (trainer/cli/study.py). Does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from algorithms.config import Checked, Problem
from algorithms.config.home import PathText
from algorithms.config.rules import above, at_least, ruled, within
from rollout.config import DType, Quantization
from rollout.user_code.custom_code import is_custom

DEFAULT_MODES = ("recompute", "ppo_is", "vanilla_is", "tis", "mis", "bypass")
"""Corrections that are compared by default; custom has no meaning without its keys."""
PRECISIONS = tuple(
    [dtype.name for dtype in DType] + [grid.name for grid in Quantization if grid is not Quantization.none]
)
"""Valid rollout precisions: a type of the engine, or a quantisation format of its weights."""
_NAME = re.compile(r"[\w.-]+")


@dataclass(kw_only=True, slots=True)
class StudyConfig(Checked):
    """The axes of a study, and settings for its runs and their comparison."""

    modes: list[str] = field(default_factory=lambda: list(DEFAULT_MODES))
    """Corrections: members and presets of the group `correction`, and corrections of your own, path/to/file.py:Name."""
    precisions: list[str] = field(default_factory=list)
    """Precisions of the engines: float32, bfloat16, float16, fp8, int8, int4. Empty: the recipe's, and int8."""
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    """Values of run.seed."""
    parallel: int = ruled(1, at_least(1))
    """Number of runs at a time, each in a process with its own Ray."""
    dir: PathText | None = None
    """Directory of the study; an earlier study in it is continued. null: outputs/studies/<recipe>/<time>."""
    collapse_drop: float = ruled(0.1, within(0, 1, "()"))
    """Drop of the last held-out accuracy below the best from which a run counts as collapsed."""
    cell_timeout_s: float | None = ruled(None, above(0, "seconds"))
    """Seconds after which a run is ended and counts as failed; null for no limit besides the run's own deadlines."""
    stop_timeout_s: float = ruled(300.0, above(0, "seconds"))
    """Seconds that the runs get to finish and save their step when the study must end; then they are killed."""

    def conflicts(self) -> Iterator[Problem]:
        for key in ("modes", "seeds"):
            if not getattr(self, key):
                yield self.broken(key, "must name at least one")
        for key in ("modes", "precisions", "seeds"):
            values = getattr(self, key)
            if len({str(value).rpartition(":")[2] for value in values}) < len(values):
                of_classes = len({*map(str, values)}) == len(values)
                remedy = "Runs have the names of classes: make a subclass of another name." if of_classes else ""
                yield Problem(key=key, rule="must name everything once", value=values, remedy=remedy)
        for mode in self.modes:
            if not _NAME.fullmatch(mode) and not is_custom(mode):
                yield Problem(key="modes", rule="must be options of the group correction", value=mode)
        for precision in self.precisions:
            if precision not in PRECISIONS:
                yield Problem(key="precisions", rule=f"must be of {', '.join(PRECISIONS)}", value=precision)


def precision_words(precision: str) -> tuple[str, ...]:
    """The overrides for engines of this precision; a quantisation format keeps their rollout.dtype."""
    if precision in Quantization.__members__:
        return (f"rollout.quantization={precision}",)
    return (f"rollout.dtype={precision}", "rollout.quantization=none")
