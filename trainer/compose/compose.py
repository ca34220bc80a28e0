"""Recipe + words of the command line -> every requested run, each with its TrainConfig or its problems.

Hydra composes each run to a plain tree, `read.py` checks the tree against the dataclasses; all problems of all runs are
reported together. Callers receive dataclasses, not the DictConfig. This module imports no torch, Ray or SGLang.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hydra import compose
from hydra.core.config_loader import ConfigLoader
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from algorithms.config import Problem
from trainer.compose import keys
from trainer.compose.overrides import HYDRA_WORDS, expand, lenient, parse, recipe_override
from trainer.compose.read import build_config
from trainer.compose.session import SCHEMA, hydra_session
from trainer.config.components import RunConfig
from trainer.config.paths import MAIN_CONFIG
from trainer.config.train import GROUPS, PRESETS, TrainConfig

BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
"""Class of Hydra's basic sweeper, whose runs are all known, and checked, before the first run starts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run that a command would start."""

    overrides: tuple[str, ...]
    """Overrides of the run, without the override of the recipe's name."""
    config: TrainConfig | None
    """Checked config of the run; None if the run has problems."""
    problems: tuple[Problem, ...]
    engine: type | None
    """Class of the chosen engine's config, also if the config has problems; None without a choice."""
    output_dir: Path | None
    """Absolute directory of the run, in a sweep the directory of all runs; None if unresolvable."""
    named_after_time: bool
    """True if run.dir has its default, a directory that is named after the time and belongs to no other run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolution:
    """All runs that a command would start, with all problems."""

    runs: tuple[Run, ...]
    """One run, or one run per combination of a sweep."""
    multirun: bool
    """True for a sweep, requested by -m or by hydra.mode=MULTIRUN."""
    problems: tuple[Problem, ...]
    """Problems of the command line and of all runs; a problem of only some runs names the combination. Empty if all
    runs may start."""


def resolve(recipe: Path, words: Sequence[str], *, own_dir: Path | None, multirun: bool) -> Resolution:
    """Compose and check every run of `parity train <recipe> <words>`; `own_dir` is the user's --config-dir."""
    with hydra_session(recipe, own_dir) as loader:
        asks_for_sweep, params, wrong = _hydra_settings(
            recipe, [word for word in words if word.startswith(HYDRA_WORDS)]
        )
        multirun = multirun or asks_for_sweep
        overrides, unreadable = parse([*(params if multirun else ()), *words], loader=loader, multirun=multirun)
        unreadable += wrong
        runs = tuple(
            _compose_run(recipe, combination, loader=loader, multirun=multirun) for combination in expand(overrides)
        )
    problems = (*unreadable, *keys.sections_once(_together(runs)))
    return Resolution(runs=runs, multirun=multirun, problems=problems)


def _hydra_settings(recipe: Path, hydra_words: Sequence[str]) -> tuple[bool, list[str], list[Problem]]:
    """Read the sweep settings of recipe and hydra.* overrides -> (True for a sweep, its words, its problems)."""
    try:
        settings = compose(recipe.stem, overrides=list(hydra_words), return_hydra_config=True).hydra
        params = settings.sweeper.get("params") or {}
        sweeper, is_sweep = settings.sweeper._target_, settings.mode is RunMode.MULTIRUN
    except Exception:  # `parse` and `_compose_run` meet the same error again and report it.
        return False, [], []
    wrong = []
    if sweeper != BASIC_SWEEPER:
        rule = "must be basic: every run of a sweep is checked before the first one starts"
        wrong.append(Problem(key="hydra/sweeper", rule=rule, value=sweeper, remedy="Name the values: -m key=a,b,c."))
    return is_sweep, [f"{key}={value}" for key, value in params.items()], wrong


def _compose_run(recipe: Path, words: tuple[str, ...], *, loader: ConfigLoader, multirun: bool) -> Run:
    """Compose and check one run; `words` hold no sweep."""
    overrides = OverridesParser.create(config_loader=loader).parse_overrides(list(words))
    problems: list[Problem] = []
    root, defaults = _compose(recipe, overrides, loader=loader, found=problems)
    config, output_dir, chosen = None, None, _chosen(defaults)
    if root is not None:
        config, unreadable, broken = build_config(root, chosen)
        named = {problem.key for problem in problems}
        problems += _located([found for found in unreadable if found.key not in named], overrides, defaults, loader)
        problems += broken
        output_dir = _output_dir(root, multirun=multirun)
        if multirun and not _has_default_dir(root):
            problems.append(
                Problem(
                    key="run.dir",
                    rule="has no effect in a sweep: every run has its own directory",
                    value=root.run.dir,
                    remedy="Remove it; hydra.sweep.dir=... names the directory that holds them all.",
                )
            )
    return Run(
        overrides=words,
        config=None if problems else config,
        problems=tuple(problems),
        engine=chosen.get("rollout"),
        output_dir=output_dir,
        named_after_time=root is not None and _has_default_dir(root),
    )


def _compose(
    recipe: Path, overrides: Sequence[Override], *, loader: ConfigLoader, found: list[Problem]
) -> tuple[DictConfig | None, list[ResultDefault]]:
    """Compose the recipe as far as possible -> (tree or None, entries of the defaults list).

    A misspelt option is reported and replaced with the nearest option, so that the keys below it can be checked.
    """
    choices: dict[str, str] = {}
    for override in overrides:
        group, value = override.key_or_group, override.value()
        if group in GROUPS:
            options = loader.get_group_options(group)
            choices[group] = lenient(override)
            if not override.is_delete() and value not in options:
                choices[group] = _misspelt(group, value, options, "", found)
    while True:
        try:
            defaults = loader.compute_defaults_list(recipe.stem, list(choices.values()), RunMode.RUN).defaults
            break
        except MissingConfigException as error:
            group, _, value = (error.missing_cfg_file or "").rpartition("/")
            if group not in GROUPS or group in choices:
                found.append(_not_composed(error, recipe))
                return None, []
            choices[group] = _misspelt(group, value, error.options or [], f"{recipe}: ", found)
        except Exception as error:  # Invalid YAML, a cycle: Hydra lets errors of other packages through.
            found.append(_not_composed(error, recipe))
            return None, []
    order = [default.config_path for default in defaults]
    if SCHEMA not in order or MAIN_CONFIG not in order or order.index(recipe.stem) < order.index(MAIN_CONFIG):
        shown = [path for path in order if path is not None and not path.startswith("hydra/")]
        rule = f"must begin with /{MAIN_CONFIG} and end with _self_"
        remedy = f"For example defaults: [/{MAIN_CONFIG}, override /model: hf, override /data: file, _self_]."
        found.append(Problem(key=f"{recipe}: defaults", rule=rule, value=shown, remedy=remedy))
        return None, []
    values = [lenient(override) for override in overrides if override.key_or_group not in GROUPS]
    try:
        root = compose(
            recipe.stem,
            overrides=[*choices.values(), *values, recipe_override(recipe.stem)],
            return_hydra_config=True,
        )
    except Exception as error:  # as above
        found.append(_not_composed(error, recipe))
        return None, list(defaults)
    return root, list(defaults)


def _misspelt(group: str, value: object, options: Sequence[str], where: str, found: list[Problem]) -> str:
    """Report an option that does not exist; return the override that replaces the choice."""
    close = keys.nearest(str(value), options, cutoff=0.5)
    hint = f"Did you mean {group}={close}?" if close else ""
    rule = f"must be one of {', '.join(options)}"
    found.append(Problem(key=f"{where}{group}", rule=rule, value=value, remedy=hint))
    return f"{group}={close}" if close else f"~{group}"


def _chosen(defaults: Sequence[ResultDefault]) -> dict[str, type]:
    """Group -> class of its choice; an option in a YAML file has the class of the option from which it starts."""
    found: dict[str, type] = {}
    for default in defaults:
        group, _, name = (default.config_path or "").rpartition("/")
        if name in GROUPS.get(group, {}):
            found[group] = GROUPS[group][name]
        elif name in PRESETS.get(group, {}):
            found[group] = type(PRESETS[group][name])
    return found


def _located(
    problems: Sequence[Problem], overrides: Sequence[Override], defaults: Sequence[ResultDefault], loader: ConfigLoader
) -> list[Problem]:
    """The `problems` in the order of the command line; problems of YAML files come first and name the file."""
    ordered: list[tuple[int, Problem]] = []
    for problem in problems:
        key = problem.key.lstrip("~")
        names = [f"{override.key_or_group}." for override in overrides]
        by_word = [
            index for index, name in enumerate(names) if f"{key}.".startswith(name) or name.startswith(f"{key}.")
        ]
        file = "" if by_word else _file_of(key, defaults, loader)
        ordered.append((by_word[-1] if by_word else -1, replace(problem, key=f"{file}{problem.key}")))
    return [problem for _, problem in sorted(ordered, key=lambda pair: pair[0])]


def _file_of(key: str, defaults: Sequence[ResultDefault], loader: ConfigLoader) -> str:
    """The YAML file that sets `key` last, with a colon; empty if no file sets the key."""
    for default in reversed(defaults):
        path, package = default.config_path, (default.package or "").replace("_global_", "")
        source = next((source for source in loader.get_sources() if path and source.is_config(path)), None)
        inner = key.removeprefix(f"{package}.") if package else key
        if path is None or source is None or source.scheme() == "structured" or (package and inner == key):
            continue
        if OmegaConf.select(source.load_config(path).config, inner, default=source) is not source:
            return f"{source.path}/{path}.yaml: "
    return ""


def _output_dir(root: DictConfig, *, multirun: bool) -> Path | None:
    """Absolute directory of the run, or of all runs of a sweep; None if unresolvable."""
    key = "hydra.sweep.dir" if multirun else "hydra.run.dir"
    directory = OmegaConf.select(root, key, throw_on_resolution_failure=False)
    return None if directory is None else Path(directory).absolute()


def _has_default_dir(root: DictConfig) -> bool:
    """True if neither recipe nor overrides set run.dir."""
    run = OmegaConf.to_container(root, resolve=False)["run"]  # type: ignore[index, call-overload]
    return isinstance(run, dict) and run.get("dir") == RunConfig.__dataclass_fields__["dir"].default


def _not_composed(error: Exception, recipe: Path) -> Problem:
    """Describe an error of Hydra, OmegaConf, YAML or the file system in one sentence about the recipe."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error.__cause__, OmegaConfBaseException):
        lines.append(str(error.__cause__).splitlines()[0])
    # Hydra's search path does not help a user who named a recipe.
    noise = ("provider=", "Config search path", "full_key", "object_type", "reference_type")
    shown = "; ".join(line for line in lines if not line.startswith(noise))
    return Problem(key="recipe", rule=f"cannot be composed ({shown})", value=str(recipe))


def _together(runs: Sequence[Run]) -> list[Problem]:
    """Problems of all runs without repetition; a problem of only some runs is labelled with their overrides."""
    everywhere = set.intersection(*(set(run.overrides) for run in runs))
    holders: dict[str, list[int]] = {}
    first: dict[str, Problem] = {}
    for index, run in enumerate(runs):
        for problem in run.problems:
            holders.setdefault(str(problem), []).append(index)
            first.setdefault(str(problem), problem)
    together = []
    for text, problem in first.items():
        broken = [runs[index].overrides for index in holders[text]]
        if len(broken) < len(runs):
            # The overrides that all broken runs share, and not all other runs have, are most likely the cause.
            shared = [word for word in broken[0] if word not in everywhere and all(word in words for words in broken)]
            label = " ".join(shared or [word for word in broken[0] if word not in everywhere])
            problem = replace(problem, key=f"[{label}] {problem.key}")
        together.append(problem)
    return together
