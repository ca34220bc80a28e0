"""Recipe + overrides -> TrainConfig, through Hydra. The DictConfig ends in `build_config`.

`resolve` checks everything that a command would start, one run or every run of a sweep, and gives all problems
together: what Hydra cannot compose (`diagnose.py`), the rules of each component and the rules across them.
Nothing here imports torch, Ray or SGLang.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from hydra import compose
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from algorithms.config import Checked, Problem
from rollout.config import SGLANG_REMEDY, SGLangConfig
from rollout.rewards import function_problem, rule_names
from trainer.compose import keys
from trainer.compose.diagnose import diagnose, order_problem
from trainer.compose.overrides import expand, parse, recipe_override
from trainer.compose.session import hydra_session
from trainer.config.components import Resume, RunConfig
from trainer.config.train import GROUPS, TrainConfig
from trainer.rundir.run_dir import is_run, steps_taken

BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
"""The sweeper whose runs are known before it starts them."""
HYDRA_KEY = "hydra"
TENSORBOARD_PACKAGE = "tensorboardX"


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run that a command would start."""

    overrides: tuple[str, ...]
    """What was overridden, without the name of the recipe."""
    config: TrainConfig | None
    """None if it has problems."""
    problems: tuple[Problem, ...]
    composition_problems: tuple[Problem, ...]
    """Those of `problems` for which Hydra has no config at all."""
    engine: type | None
    """Class of the chosen engine's config, also where the config has problems; None if there is no choice."""
    output_dir: Path | None
    """Absolute directory of the run; in a sweep that of all runs. None if it cannot be known."""
    named_after_time: bool
    """Whether the directory is the default one, which no other run has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolution:
    """Everything that a command would start."""

    runs: tuple[Run, ...]
    """One, or one per combination of a sweep; none if the recipe does not start from configs/train.yaml."""
    multirun: bool
    """Whether it is a sweep: by -m or by hydra.mode=MULTIRUN."""
    problems: tuple[Problem, ...]
    """Of the command line and of all runs; one that not every run has names the combination. Empty if all may start."""
    composition_problems: tuple[Problem, ...]
    """Those of `problems` without which Hydra could at least show the config."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _HydraSettings:
    """What the recipe and the hydra.* overrides ask of Hydra."""

    multirun: bool = False
    sweeper: str = BASIC_SWEEPER
    params: tuple[str, ...] = field(default_factory=tuple)
    """Overrides, sweeps among them, from hydra.sweeper.params."""
    misplaced: Problem | None = None
    """Of a recipe that does not start from configs/train.yaml."""


def resolve(recipe: Path, words: Sequence[str], *, own_dir: Path | None, multirun: bool) -> Resolution:
    """Compose and check every run of `parity train <recipe> <words>`; `own_dir` is the user's --config-dir."""
    with hydra_session(recipe, own_dir) as loader:
        hydra_words = [word for word in words if word.startswith((f"{HYDRA_KEY}.", f"{HYDRA_KEY}/"))]
        settings = _hydra_settings(recipe, hydra_words, loader=loader)
        multirun = multirun or settings.multirun
        params = settings.params if multirun else ()
        overrides, unreadable = parse([*params, *words], loader=loader, multirun=multirun)
        if settings.misplaced is not None:
            unreadable.append(settings.misplaced)
            return Resolution(
                runs=(), multirun=multirun, problems=tuple(unreadable), composition_problems=tuple(unreadable)
            )
        if settings.sweeper != BASIC_SWEEPER:
            # Another sweeper decides while it runs; what is fixed is checked now, and each run when it starts.
            overrides = [override for override in overrides if not override.is_sweep_override()]
        runs = tuple(
            _compose_run(recipe, combination, loader=loader, multirun=multirun) for combination in expand(overrides)
        )
    return Resolution(
        runs=runs,
        multirun=multirun,
        problems=(*unreadable, *keys.sections_once(_together(runs, [run.problems for run in runs]))),
        composition_problems=(
            *unreadable,
            *keys.sections_once(_together(runs, [run.composition_problems for run in runs])),
        ),
    )


def start_problems(resolution: Resolution) -> list[Problem]:
    """What stands in the way of really starting the runs: a directory in use, a package that is not installed."""
    problems = _directory_problems(resolution)
    if SGLangConfig in [run.engine for run in resolution.runs] and importlib.util.find_spec("sglang") is None:
        remedy = f"{SGLANG_REMEDY}."
        problems.append(
            Problem(key="rollout", rule="must be an engine that is installed", value="sglang", remedy=remedy)
        )
    if any(run.config is not None and run.config.tracking.tensorboard for run in resolution.runs):
        problems += [problem for problem in [missing_tensorboard()] if problem is not None]
    return problems


def missing_tensorboard() -> Problem | None:
    """The Problem of a run that asks for TensorBoard where the package is not installed."""
    if importlib.util.find_spec(TENSORBOARD_PACKAGE) is not None:
        return None
    return Problem(
        key="tracking.tensorboard",
        rule=f"must be false without the package {TENSORBOARD_PACKAGE}",
        value=True,
        remedy='pip install ".[tensorboard]" in the checkout.',
    )


def _directory_problems(resolution: Resolution) -> list[Problem]:
    """What stands in the way of the directory that the runs write to."""
    directory = resolution.runs[0].output_dir if resolution.runs else None
    resumes = {run.config.run.resume for run in resolution.runs if run.config is not None} - {Resume.never}
    if resumes and resolution.multirun:
        remedy = "Resume its runs one by one with run.dir=..."
        rule, value = "must be never in a sweep, whose runs are new", min(resume.name for resume in resumes)
        return [Problem(key="run.resume", rule=rule, value=value, remedy=remedy)]
    if directory is None or not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return []
    ours = directory.is_dir() and is_run(directory)
    if ours and any(run.config is None for run in resolution.runs):
        return []  # whether the run resumes is not known before its other problems are solved
    if resumes and ours:
        return _too_few_steps(resolution, directory)
    if resumes:
        remedy = "Name the directory of the run with run.dir=..."
        rule = "finds no run of Parity in run.dir, which is not empty"
        return [Problem(key="run.resume", rule=rule, value=str(directory), remedy=remedy)]
    key = "hydra.sweep.dir" if resolution.multirun else "run.dir"
    remedy = f"Leave {key} out for a new directory named after the time, or name another."
    if ours:
        remedy = f"resume=auto goes on with the run in it, resume=clean moves it aside and begins. {remedy}"
    return [Problem(key=key, rule="must be absent or empty", value=str(directory), remedy=remedy)]


def _too_few_steps(resolution: Resolution, directory: Path) -> list[Problem]:
    """The Problem of a run that would go on with fewer steps than it has taken."""
    taken = steps_taken(directory)
    return [
        Problem(
            key="run.num_steps",
            rule=f"must be >= the {taken} steps that the run in {directory} has taken",
            value=run.config.run.num_steps,
            remedy=f"parity resume {directory} goes on with the settings that the run had.",
        )
        for run in resolution.runs
        if run.config is not None and run.config.run.resume is Resume.auto and run.config.run.num_steps < taken
    ]


def build_config(root: DictConfig) -> tuple[TrainConfig | None, list[Problem]]:
    """Turn the composed `root` into dataclasses, components first, and collect every broken rule.

    The config is None if there is any problem. A key that holds no usable value takes its default for the length
    of the checks, so that one problem does not hide the others.
    """
    problems: list[Problem] = []
    parts: dict[str, Checked] = {}
    hints = get_type_hints(TrainConfig)
    for name in keys.field_names(TrainConfig):
        if OmegaConf.is_missing(root, name):
            parts[name] = hints[name]()
            problems.append(_unchosen(name))
        else:
            parts[name] = _component(root[name], hints[name], name=name, problems=problems)
            # Hydra lets "+key" add anything to a typed config; nothing would ever read it.
            for key in root[name]:
                if key not in keys.field_names(type(parts[name])):
                    value = OmegaConf.select(root[name], str(key))
                    problems.append(keys.unknown_key([name, str(key)], 1, value, root=root))
    for key in root:
        if key not in parts and key != HYDRA_KEY:
            path, value = _leaf(str(key), OmegaConf.select(root, str(key)))
            problems.append(keys.unknown_key(path, 0, value, root=root))
    config = object.__new__(TrainConfig)
    for name, part in parts.items():
        setattr(config, name, part)
    problems += _new([*config.problems(), *_table_problems(config)], known=problems)
    return (None, problems) if problems else (config, [])


def _leaf(key: str, value: object) -> tuple[list[str], object]:
    """Path and value of what "+key.a.b=1" added to the root."""
    path = [key]
    while isinstance(value, DictConfig) and len(value) == 1:
        [name] = value
        path.append(str(name))
        value = value[name]
    return path, value


def _table_problems(config: TrainConfig) -> list[Problem]:
    """Problems of names that must stand in a table of the code, or be a file."""
    name = config.reward.function
    rule = function_problem(name)
    if rule is None:
        return []
    close = keys.nearest(name, rule_names())
    remedy = f"Did you mean reward.function={close}?" if close else ""
    return [Problem(key="reward.function", rule=rule, value=name, remedy=remedy)]


def _compose_run(recipe: Path, words: tuple[str, ...], *, loader: ConfigLoader, multirun: bool) -> Run:
    """Compose one run and check it; `words` hold no sweep."""
    overrides = [*words, recipe_override(recipe.stem)]
    root: DictConfig | None = None
    output_dir: Path | None = None
    found: list[Problem] = []
    try:
        root = compose(recipe.stem, overrides=overrides, return_hydra_config=True)
        output_dir = Path(root.hydra.sweep.dir if multirun else root.hydra.run.dir).absolute()
    except Exception as error:  # Hydra lets errors of YAML and of the file system through, besides its own.
        parsed = OverridesParser.create(config_loader=loader).parse_overrides(overrides)
        root, found = diagnose(recipe, parsed, loader=loader, failure=error)
        if root is not None and not multirun:
            directory = OmegaConf.select(root, "run.dir", throw_on_resolution_failure=False)
            output_dir = None if directory is None else Path(directory).absolute()
    config, broken = (None, []) if root is None else build_config(root)
    problems = [*found, *_new(broken, known=found)]
    if root is not None and multirun:
        problems += _directory_of_one_run(root)
    return Run(
        overrides=words,
        config=None if problems else config,
        problems=tuple(problems),
        composition_problems=tuple(found),
        engine=None if root is None else keys.node_type(root, ["rollout"]),
        output_dir=output_dir,
        named_after_time=root is not None and _has_default_dir(root),
    )


def _hydra_settings(recipe: Path, hydra_words: Sequence[str], *, loader: ConfigLoader) -> _HydraSettings:
    """Compose with nothing but Hydra's own overrides; where that fails, `_compose_run` says why."""
    try:
        defaults = loader.compute_defaults_list(recipe.stem, list(hydra_words), RunMode.RUN).defaults
        misplaced = order_problem(recipe, defaults)
        if misplaced is not None:
            return _HydraSettings(misplaced=misplaced)
        settings = compose(recipe.stem, overrides=list(hydra_words), return_hydra_config=True).hydra
        params = settings.sweeper.params if "params" in settings.sweeper else None
        return _HydraSettings(
            multirun=settings.mode is RunMode.MULTIRUN,
            sweeper=settings.sweeper._target_,
            params=tuple(f"{key}={value}" for key, value in (params or {}).items()),
        )
    except Exception:
        return _HydraSettings()


def _directory_of_one_run(root: DictConfig) -> list[Problem]:
    """The Problem of a run.dir in a sweep, whose runs have a directory each."""
    if _has_default_dir(root):
        return []
    return [
        Problem(
            key="run.dir",
            rule="has no effect in a sweep: every run has its own directory",
            value=OmegaConf.to_container(root.run, resolve=False)["dir"],  # type: ignore[index, call-overload]
            remedy="Remove it; hydra.sweep.dir=... names the directory that holds them all.",
        )
    ]


def _has_default_dir(root: DictConfig) -> bool:
    """Whether nobody named run.dir."""
    run = OmegaConf.to_container(root.run, resolve=False)
    return isinstance(run, dict) and run["dir"] == RunConfig.__dataclass_fields__["dir"].default


def _unchosen(group: str) -> Problem:
    options = ", ".join(f"{group}={option}" for option in GROUPS[group])
    return Problem(key=group, rule="must be chosen", value=None, remedy=f"Use one of {options}.")


def _component(node: DictConfig, base: type[Checked], *, name: str, problems: list[Problem]) -> Checked:
    """Make the dataclass of `node` without checking its rules; a Problem for each value that cannot be read."""
    kind = keys.node_type(node, []) or base
    if name in GROUPS and kind is base:
        problems.append(_unchosen(name))
    made: Checked = object.__new__(kind)
    for spec in fields(kind):
        setattr(made, spec.name, _value(node, spec, key=f"{name}.{spec.name}", problems=problems))
    return made


def _value(node: DictConfig, spec: Field[Any], *, key: str, problems: list[Problem]) -> object:
    """The value of one field, interpolations resolved; its default, and a Problem, if there is none to be had."""
    kind = keys.node_type(node, [spec.name])
    if kind is not None and issubclass(kind, Checked):
        return _component(node[spec.name], kind, name=key, problems=problems)
    default = spec.default_factory() if spec.default_factory is not MISSING else spec.default
    try:
        value = node[spec.name]
        if OmegaConf.is_config(value):
            value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue:
        problems.append(Problem(key=key, rule="must be set", value="???"))
        return default
    except OmegaConfBaseException as error:
        raw = OmegaConf.to_container(node, resolve=False)
        shown = raw[spec.name] if isinstance(raw, Mapping) else None
        problems.append(Problem(key=key, rule=f"cannot be resolved ({str(error).splitlines()[0]})", value=shown))
        return default
    numbers = value if isinstance(value, list) else [value]
    if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
        problems.append(Problem(key=key, rule="must be a finite number", value=value))
        return default
    return value


def _new(found: Any, *, known: Sequence[Problem]) -> list[Problem]:
    """Those of `found` about keys that `known` does not name yet."""
    named = {problem.key for problem in known}
    return [problem for problem in found if problem.key not in named]


def _together(runs: Sequence[Run], found: Sequence[tuple[Problem, ...]]) -> list[Problem]:
    """Problems of all runs without repetition; one that only some runs have names the first of them."""
    everywhere = set.intersection(*(set(run.overrides) for run in runs))
    holders: dict[str, list[int]] = {}
    first: dict[str, Problem] = {}
    for index, problems in enumerate(found):
        for problem in problems:
            holders.setdefault(str(problem), []).append(index)
            first.setdefault(str(problem), problem)
    together = []
    for text, problem in first.items():
        broken = [runs[index].overrides for index in holders[text]]
        if len(broken) < len(runs):
            # What the broken runs share and the others do not all have is most likely the cause.
            shared = [word for word in broken[0] if word not in everywhere and all(word in words for words in broken)]
            label = " ".join(shared or [word for word in broken[0] if word not in everywhere])
            problem = replace(problem, key=f"[{label}] {problem.key}")
        together.append(problem)
    return together
