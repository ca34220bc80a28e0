"""The runs that a command would start, also those that go on with an earlier one: `parity resume`, `resume=auto`.

`parity resume` uses the config.yaml of the run as the recipe. Used by `train.py` and by the Python API.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from algorithms.config import NOT_SET, Problem
from trainer.cli.arguments import RecipeArguments
from trainer.compose.compose import Resolution, resolve
from trainer.compose.overrides import directory_override, path_override
from trainer.config.train import GROUPS
from trainer.config.training import Resume
from trainer.rundir.run_dir import (
    CONFIG_FILE,
    completed_steps,
    first_start,
    has_checkpoint,
    is_run,
    last_start_place,
    logged_step,
    runs_inside,
    with_changed_files,
)
from trainer.text.plain import command_line
from trainer.text.redact import REDACTED
from trainer.text.yaml_text import leaves, load_yaml

COMMAND = "parity resume"
TIME_NAME = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d")
"""Name of a run.dir that nobody chose."""
_FIXED_WORDS = ("run.dir=", "run.resume=")


@contextmanager
def recorded_recipe(run_dir: Path, overrides: Sequence[str]) -> Iterator[Path | Problem]:
    """Yield the configuration of the run in `run_dir` as a recipe file, which exists until the end of the block.

    The recipe omits the section of a group that `overrides` choose anew, because its keys belong to another type.
    Yields a Problem for a directory without a run, and for a secret that config.yaml does not contain.
    """
    path, reason = run_dir / CONFIG_FILE, ""
    try:
        record = load_yaml(path.read_text(encoding="utf-8")) if is_run(run_dir) else None
    except FileNotFoundError:
        record = None
    except (OSError, ValueError) as error:
        record, reason = None, f", which cannot be read ({error})"
    if not isinstance(record, dict) or not isinstance(record.get("run"), dict):
        rule = f"must be the directory of a run of Parity, with its {CONFIG_FILE}{reason}"
        remedy = (
            "Mend the file; parity train <recipe> --cfg job prints one of its form." if reason else runs_inside(run_dir)
        )
        yield Problem(key="run.dir", rule=rule, value=str(run_dir), remedy=remedy)
        return
    names = [word.partition("=")[0] for word in overrides]
    record = {section: values for section, values in record.items() if section not in GROUPS or section not in names}
    redacted = [".".join(path) for path, value in leaves(record) if isinstance(value, str) and REDACTED in value]
    missing = [key for key in redacted if key not in [name.lstrip("+") for name in names]]
    if missing:
        remedy = f"Add {' '.join(f'{key}=...' for key in missing)}."
        yield Problem(
            key=missing[0], rule=f"was redacted in {path} and must be given again", value=NOT_SET, remedy=remedy
        )
        return
    name = str(record["run"].get("recipe") or "config")
    with TemporaryDirectory(prefix="parity-resume-") as directory:
        recipe = Path(directory) / f"{name}.yaml"
        recipe.write_text(yaml.safe_dump(record, sort_keys=False, allow_unicode=True), encoding="utf-8")
        yield recipe


def resume_words(run_dir: Path, overrides: Sequence[str]) -> tuple[list[str], list[Problem]]:
    """(overrides with which the run continues, a Problem for each key that `parity resume` sets itself)."""
    own = [word for word in overrides if not word.startswith(_FIXED_WORDS)]
    problems = [
        Problem(key=word.partition("=")[0], rule=f"is set by {COMMAND}", value=word, remedy="Remove it.")
        for word in overrides
        if word.startswith(_FIXED_WORDS)
    ]
    if own and not has_checkpoint(run_dir) and completed_steps(run_dir):
        rule = "must hold a checkpoint to go on from: the run has ended, and it saved none"
        own_dir = command_line(path_override("run.dir", run_dir))
        remedy = f"parity train <recipe> run.resume=clean {own_dir} moves it aside and begins again."
        problems.append(Problem(key="run.dir", rule=rule, value=str(run_dir), remedy=remedy))
    return [*own, directory_override(run_dir), f"run.resume={Resume.auto.name}"], problems


def resolve_start(
    recipe: Path, arguments: RecipeArguments, *, shown_as: Path | None = None
) -> tuple[Resolution, list[Problem]]:
    """(all runs that the arguments ask for, all problems of starting them); an earlier run gives the directory.

    If `shown_as` is given, the config.yaml of a run, problems name this file instead of `recipe`.
    """
    from trainer.start.checks import start_problems

    words, own_dir, multirun = arguments.overrides, arguments.own_dir, arguments.multirun
    resolution = resolve(recipe, words, own_dir=own_dir, multirun=multirun)
    earlier = earlier_run(resolution)
    if earlier is not None:
        resolution = resolve(recipe, (*words, directory_override(earlier)), own_dir=own_dir, multirun=multirun)
    problems = [*resolution.problems, *start_problems(resolution)]
    if shown_as is not None:
        named = [replace(problem, key=problem.key.replace(str(recipe), str(shown_as))) for problem in problems]
        problems = [_with_place(problem, last_start_place(shown_as.parent)) for problem in named]
        problems = with_changed_files(problems, shown_as.parent)
    return resolution, problems


def _with_place(problem: Problem, place: Path | None) -> Problem:
    """The problem of a relative path, with the way to it if it leads to something from `place`, and here to nothing."""
    path = Path(str(problem.value).rpartition(":")[0] or str(problem.value))  # of path.py:function too
    # os.path: a value that no path can have exists nowhere.
    if place is None or path.is_absolute() or os.path.exists(path) or not os.path.exists(place / path):
        return problem
    way = f"The run was in {place}, which has {path}: resume it from there, or give {problem.key} the whole path."
    return replace(problem, remedy=f"{problem.remedy} {way}".strip())


def earlier_run(resolution: Resolution) -> Path | None:
    """The newest run of the recipe, if the command resumes without naming run.dir; None if a new run begins.

    The default run.dir is named after the time, so earlier runs are in the same parent directory. The newest began
    last, whatever its directory is called now; a copy began with its run, and comes after the run with such a name.
    Runs without a first step are skipped if another run exists: the failed start of a resume must not hide the run to
    be resumed.
    """
    if resolution.multirun or len(resolution.runs) != 1:
        return None
    [run] = resolution.runs
    if run.config is None or run.config.run.resume is not Resume.auto or not run.named_after_time:
        return None
    beside = Path(run.config.run.dir).absolute().parent
    runs = [path for path in beside.iterdir() if path.is_dir() and is_run(path)] if beside.is_dir() else []
    begun = [path for path in runs if has_checkpoint(path) or logged_step(path)]

    def age(path: Path) -> tuple[str, bool, str]:
        return first_start(path) or "", TIME_NAME.fullmatch(path.name) is not None, path.name

    return max(begun or runs, key=age, default=None)
