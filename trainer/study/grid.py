"""Recipe, overrides and axes -> the cells of a study, each with a checked config, or the problems of all cells.

    precision x (correction=a,b run.seed=0,1)  -the sweep of parity train -m->  Cell, one run of `parity train`

Hydra composes the grid like the sweep of `parity train -m`; `run.py` starts the runs. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from algorithms.config import Problem
from rollout.config import Quantization
from rollout.user_code.custom_code import is_custom
from trainer.compose.compose import resolve
from trainer.compose.hydra_session import hydra_session
from trainer.compose.overrides import literal, parse
from trainer.compose.unknown_keys import field_names
from trainer.config.train import TrainConfig
from trainer.start.checks import start_problems
from trainer.study.config import StudyConfig, precision_words

_OWNED = {
    "correction": "Name the corrections with study.modes=[...].",
    "rollout.quantization": "Name the precisions with study.precisions=[...].",
    "run.seed": "Name the seeds with study.seeds=[...].",
    "run.dir": "Name the directory of the study with study.dir=...; each run has one in it.",
    "run.resume": "A study goes on with what is in study.dir.",
}
"""Key that the study sets -> advice to the user."""
_AXES = {"correction": "study.modes", "run.seed": "study.seeds"}
"""Key that the study sets in each run -> its own key, with which the user named the value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One run of a study."""

    mode: str
    precision: str
    seed: int
    words: tuple[str, ...]
    """Overrides of the run, without run.dir and run.resume."""
    config: TrainConfig

    @property
    def name(self) -> str:
        """Name of the cell's directory."""
        return f"{self.mode.rpartition(':')[2]}-{self.precision}-seed{self.seed}"

    @property
    def num_steps(self) -> int:
        return self.config.run.num_steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """Recipe, overrides and cells of a study."""

    recipe: Path
    """File of the recipe."""
    own_dir: Path | None
    """Directory of the option --config-dir."""
    words: tuple[str, ...]
    """Overrides of all runs."""
    config: StudyConfig
    """Settings of the study, with the precisions that are used."""
    cells: tuple[Cell, ...]
    """Every mode and precision with the first seed, then with the next: a study that ends early compares equally."""


def compose_study(
    recipe: Path, words: Sequence[str], config: StudyConfig, *, own_dir: Path | None
) -> tuple[Study, list[Problem]]:
    """Compose and check every run of the study; with any problem some cells are missing."""
    wrong = _word_problems(recipe, words, own_dir=own_dir)
    words = tuple(word for word in words if word not in wrong)
    config = replace(config, precisions=config.precisions or _default_precisions(recipe, words, own_dir=own_dir))
    modes = [literal(mode) if is_custom(mode) else mode for mode in config.modes]
    axes = (f"correction={','.join(modes)}", f"run.seed={','.join(map(str, config.seeds))}")
    cells: list[Cell] = []
    problems: dict[str, list[Problem]] = {}
    for precision in config.precisions:
        resolution = resolve(recipe, [*words, *precision_words(precision), *axes], own_dir=own_dir, multirun=True)
        problems[precision] = [_under_axis(found) for found in (*resolution.problems, *start_problems(resolution))]
        if problems[precision]:
            continue
        for (mode, seed), run in zip(product(config.modes, config.seeds), resolution.runs, strict=True):
            assert run.config is not None
            cells.append(Cell(mode=mode, precision=precision, seed=seed, words=run.overrides, config=run.config))
    cells.sort(key=lambda cell: config.seeds.index(cell.seed))
    study = Study(recipe=recipe, own_dir=own_dir, words=words, config=config, cells=tuple(cells))
    return study, [*wrong.values(), *_without_repetition(problems)]


def _word_problems(recipe: Path, words: Sequence[str], *, own_dir: Path | None) -> dict[str, Problem]:
    """Word -> its problem in a study, whatever its value."""
    problems: dict[str, Problem] = {}
    with hydra_session(recipe, own_dir) as loader:
        for word in words:
            key, _, value = word.lstrip("+~").partition("=")
            if key in _OWNED:
                rule, remedy = "is set by the study", _OWNED[key]
            elif key in field_names(StudyConfig):
                rule, remedy = "is a key of the study", f"Write study.{key}={value}"
            elif key.startswith(("hydra.", "hydra/")):
                rule, remedy = "has no effect in a study", "Remove it."
            elif any(override.is_sweep_override() for override in parse([word], loader=loader, multirun=True)[0]):
                rule = "cannot be swept in a study"
                remedy = "Its axes are study.modes, study.precisions and study.seeds; make one study per value."
            else:
                continue
            problems[word] = Problem(key=key, rule=rule, value=value, remedy=remedy)
    return problems


def _under_axis(problem: Problem) -> Problem:
    """The same problem under the key of the study, if the value of one of its axes is the problem.

    The run in which it was found, `[correction=tiss run.seed=0]`, is left out: the value is wrong in any run.
    """
    axis = _AXES.get(problem.key.rpartition("] ")[2])
    if axis is None:
        return problem
    # An axis is a list, so the one value that was probably meant is named without a key. The default of the key of a
    # run is not that of the axis.
    remedy = problem.remedy.replace("correction=", "") if axis == "study.modes" else ""
    return replace(problem, key=axis, remedy=remedy)


def _default_precisions(recipe: Path, words: Sequence[str], *, own_dir: Path | None) -> list[str]:
    """The precision of the recipe's engines, and int8."""
    [run] = resolve(recipe, words, own_dir=own_dir, multirun=False).runs or [None]
    plain = "bfloat16" if run is None or run.config is None else run.config.rollout.dtype.name
    return [plain, Quantization.int8.name]


def _without_repetition(by_precision: dict[str, list[Problem]]) -> list[Problem]:
    """Problems of all precisions, each once; a problem of some precisions names the first of them."""
    first: dict[str, tuple[str, Problem]] = {}
    counts: dict[str, int] = {}
    for precision, problems in by_precision.items():
        for problem in problems:
            first.setdefault(str(problem), (precision, problem))
            counts[str(problem)] = counts.get(str(problem), 0) + 1
    return [
        problem if counts[text] == len(by_precision) else replace(problem, key=f"[{precision}] {problem.key}")
        for text, (precision, problem) in first.items()
    ]
