"""Recipe + words of the command line -> every requested run, each with its TrainConfig or its problems.

Hydra composes each run to a plain tree, `read.py` checks the tree against the dataclasses; all problems of all runs are
reported together. Callers receive dataclasses, not the DictConfig. This module imports no torch, Ray or SGLang.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from hydra.core.config_loader import ConfigLoader
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from algorithms.config import NOT_SET, Problem
from rollout.config import EngineConfig
from rollout.user_code.custom_code import is_custom, similar_custom
from trainer.compose.catalog import recipe_files, recipe_name
from trainer.compose.choices import own_class, plain_values, without_choices
from trainer.compose.home import expand_homes
from trainer.compose.hydra_session import SCHEMA, ParityOptions, add_option, hydra_session, options_of
from trainer.compose.overrides import SWEEP_DIR, change, expand, parse
from trainer.compose.peers import CHOICES
from trainer.compose.read import HYDRA_KEY, build_config
from trainer.compose.unknown_keys import field_names, lists_once, nearest
from trainer.config.paths import MAIN_CONFIG, config_dir, recipe_dir
from trainer.config.train import CUSTOM, GROUPS, PRESETS, TrainConfig
from trainer.config.training import ModelConfig, RunConfig
from trainer.rundir.provenance import escaped
from trainer.rundir.run_dir import CONFIG_FILE, with_changed_files
from trainer.text.yaml_text import load_yaml


class Part(NamedTuple):
    """What an entry of the defaults list adds to the tree."""

    name: str
    """Of the config, as Hydra calls it: group/option, or a recipe's name."""
    file: str
    """Path of its file; empty for what is made from dataclasses."""
    prefix: str
    """Of its keys, with a dot at the end; empty for the root."""
    content: Mapping[Any, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class ComposedRun:
    """One run that a command would start."""

    overrides: tuple[str, ...]
    """Overrides of the run, without the override of the recipe's name."""
    tree: DictConfig | None
    """What was composed, with interpolations and unchecked by rules; None if a key or a value is unreadable."""
    config: TrainConfig | None
    """Checked config of the run; None if the run has problems."""
    problems: tuple[Problem, ...]
    model: ModelConfig | None
    """The section of the model if it has no problem, whatever the others have; None without a choice."""
    engine: type[EngineConfig] | None
    """Class of the chosen engine's config, also if the config has problems; None without a choice."""
    output_dir: Path | None
    """Absolute directory of the run, in a sweep the directory of all runs; None if unresolvable."""
    named_after_time: bool
    """True if run.dir has its default, a directory that is named after the time and belongs to no other run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolution:
    """All runs that a command would start, with all problems."""

    runs: tuple[ComposedRun, ...]
    """One run, or one run per combination of a sweep."""
    multirun: bool
    """True for a sweep, requested by -m."""
    problems: tuple[Problem, ...]
    """Problems of the command line and of all runs; a problem of only some runs names the combination. Empty if all
    runs may start."""

    def run_dir(self, index: int) -> Path:
        """Directory of run number `index`; needs a resolution without problems."""
        # Runs are composed one after the other: the time in the name is that of the first one.
        directory = self.runs[0].output_dir
        assert directory is not None
        return directory / str(index) if self.multirun else directory


def resolve(
    recipe: Path, words: Sequence[str], *, own_dir: Path | None, multirun: bool, unneeded: tuple[str, ...] = ()
) -> Resolution:
    """Compose and check every run of `parity train <recipe> <words>`; `own_dir` is the user's --config-dir.

    Of keys that begin with one of `unneeded` neither values are checked nor files of the user's own read: others stand
    for their classes.
    """
    with hydra_session(recipe, own_dir) as loader:
        overrides, unreadable = parse(words, loader=loader, multirun=multirun)
        runs = tuple(
            _compose_run(recipe, combination, loader=loader, multirun=multirun, unneeded=unneeded)
            for combination in expand(overrides)
        )
    problems = lists_once([*unreadable, *_together(runs)])
    if recipe.name == CONFIG_FILE:
        problems = with_changed_files(problems, recipe.parent)
    return Resolution(runs=runs, multirun=multirun, problems=tuple(problems))


def _compose_run(
    recipe: Path, words: tuple[str, ...], *, loader: ConfigLoader, multirun: bool, unneeded: tuple[str, ...]
) -> ComposedRun:
    """Compose and check one run; `words` hold no sweep."""
    overrides = OverridesParser.create(config_loader=loader).parse_overrides(list(words))
    problems: list[Problem] = []
    root: DictConfig | None = None
    defaults: list[ResultDefault] = []
    parts: list[Part] = []
    try:
        root, defaults, parts = _compose(recipe, overrides, loader=loader, found=problems, unneeded=unneeded)
    except Exception as error:  # Invalid YAML, a cycle: Hydra lets errors of other packages through.
        problems.append(_not_composed(error, recipe))
    config, tree, model, output_dir, has_default_dir, chosen = None, None, None, None, False, _chosen(defaults)
    if root is not None:
        files = [part for part in parts if part.file]
        _drop_replaced(root, chosen, overrides, files)
        for name, kind in (get_type_hints(TrainConfig) | chosen).items() if unneeded else ():
            without_choices(root.get(name, None), kind, f"{name}.", unneeded)
        without_home = expand_homes(root, get_type_hints(TrainConfig) | chosen)
        config, unreadable, broken = build_config(root, chosen)
        unreadable += without_home
        named = {problem.key.rpartition(": ")[2] for problem in problems}
        problems += _located([found for found in unreadable if found.key not in named], overrides, files)
        tree = None if problems else root
        named |= {problem.key for problem in without_home}
        problems += [found for found in broken if found.key not in named and not found.key.startswith(unneeded)]
        keys = [problem.key for problem in (*problems, *unreadable)]
        if "model" in chosen and not any(key.startswith("model") for key in keys):
            model = config.model
        output_dir, has_default_dir = _directory(root, SWEEP_DIR if multirun else "run.dir")
        if multirun and output_dir is None:
            remedy = f"Leave it out, or write {SWEEP_DIR}=outputs/sweep."
            problems.append(Problem(key=SWEEP_DIR, rule="names no directory", value=NOT_SET, remedy=remedy))
        if multirun and not has_default_dir:
            rule = "has no effect in a sweep: every run has its own directory"
            remedy = f"Remove it; {SWEEP_DIR}=... names the directory that holds them all."
            problems.append(Problem(key="run.dir", rule=rule, value=root.run.dir, remedy=remedy))
    return ComposedRun(
        overrides=tuple(word for word in words if not word.startswith(SWEEP_DIR)),
        tree=tree,
        config=None if problems else config,
        problems=tuple(problems),
        model=model,
        engine=chosen.get("rollout"),
        output_dir=output_dir,
        named_after_time=has_default_dir,
    )


def _compose(
    recipe: Path,
    overrides: Sequence[Override],
    *,
    loader: ConfigLoader,
    found: list[Problem],
    unneeded: tuple[str, ...],
) -> tuple[DictConfig | None, list[ResultDefault], list[Part]]:
    """Compose the recipe -> (tree, entries of the defaults list, their parts); the tree is None where `found` says why.

    Raises errors of Hydra, OmegaConf, YAML and the file system, for example of an unreadable file. A misspelt option
    is reported and replaced with the nearest option, so that the keys below it can be checked.
    """
    document = load_yaml(recipe.read_text(encoding="utf-8"))  # Hydra would write out every alias
    if not isinstance(document, dict | None):
        rule, remedy = "must be a mapping of keys to values", "Its first key is defaults: what the recipe starts from."
        found.append(Problem(key=str(recipe), rule=rule, value=document, remedy=remedy))
        return None, [], []
    shown = document.get("defaults") if document else None
    if isinstance(shown, list) and "_self_" not in shown:  # Hydra would warn, and put it at the end
        found.append(_of_defaults(recipe, shown))
        return None, [], []
    choices: dict[str, str] = {}
    for override in overrides:
        group, value = override.key_or_group, override.value()
        if group in GROUPS:
            options = loader.get_group_options(group)
            choices[group] = (override.input_line or "").lstrip("+")
            if not override.is_delete() and value not in options:
                choices[group] = _other_option(group, value, options, "", found, unneeded) or choices[group]
    while True:
        try:
            defaults = loader.compute_defaults_list(recipe.stem, list(choices.values()), RunMode.RUN).defaults
            break
        except MissingConfigException as error:
            group, _, value = (error.missing_cfg_file or "").partition("/")
            if group not in GROUPS or group in choices:
                raise
            if other := _other_option(group, value, error.options or [], f"{recipe}: ", found, unneeded):
                choices[group] = other
    order = [default.config_path for default in defaults]
    if SCHEMA not in order or MAIN_CONFIG not in order or order.index(recipe.stem) < order.index(MAIN_CONFIG):
        found.append(_of_defaults(recipe, shown))
        return None, [], []
    parts = list(_parts(defaults, loader))
    found += _about_hydra(parts)
    if unfit := [*_hiding(parts), *_not_sections(parts)]:  # could not be merged with the other parts
        found += unfit
        return None, list(defaults), parts
    root = _merged(parts)
    for override in overrides:
        if override.key_or_group not in GROUPS:
            change(root, override)
    OmegaConf.update(root, "run.recipe", escaped(recipe_name(recipe)))
    for group in (name for name in GROUPS if name in unneeded and choices.get(name) == _stand_in(name)):
        root[group] = plain_values([*GROUPS[group].values()][-1])
    return root, list(defaults), parts


def _merged(parts: Sequence[Part]) -> DictConfig:
    """The values of all `parts` in one tree; later ones override earlier ones, lists as a whole."""
    root = OmegaConf.create()
    for part in parts:
        values: dict[str, Any] = {key: value for key, value in part.content.items() if key != "defaults"}
        for name in reversed(part.prefix.split(".")[:-1]):
            values = {name: values}
        root.merge_with(values)
    return root


def _of_defaults(recipe: Path, shown: object) -> Problem:
    """The Problem of a recipe's defaults list, `shown`; None stands for no list."""
    rule = f"must begin with /{MAIN_CONFIG} or another recipe, and end with _self_"
    rule, given = (f"is missing; it {rule}", NOT_SET) if shown is None else (rule, shown)
    remedy = f"For example defaults: [/{MAIN_CONFIG}, override /model: hf, override /data: file, _self_]."
    return Problem(key=f"{recipe}: defaults", rule=rule, value=given, remedy=remedy)


def _about_hydra(parts: Sequence[Part]) -> list[Problem]:
    """Problems of `parts` that set, or choose, a part of Hydra's own section, wherever they put it."""
    rule, found = "has no effect: Parity starts the runs itself", []
    for part in parts:
        is_inside = f"{part.prefix}.".startswith(f"{HYDRA_KEY}.")
        given = part.content if is_inside else None if part.prefix else part.content.get(HYDRA_KEY)
        if part.file and given is not None and Path(part.file) != config_dir() / f"{MAIN_CONFIG}.yaml":
            found.append(Problem(key=f"{part.file}: {HYDRA_KEY}", rule=rule, value=given, remedy="Remove it."))
        group, _, name = part.name.rpartition("/")
        if group.startswith(f"{HYDRA_KEY}/"):
            found.append(Problem(key=group, rule=rule, value=name, remedy="Remove it from the defaults."))
    return found


def _hiding(parts: Sequence[Part]) -> Iterator[Problem]:
    """Yield the problems of files that stand in the place of an option."""
    for part in parts:
        group, _, name = part.name.partition("/")
        if part.file and name in options_of(group):
            remedy = f"Give it another name, and begin it with defaults: [{name}, _self_]."
            yield Problem(
                key=part.file, rule=f"must not have the name of an option of {group}", value=name, remedy=remedy
            )


def _not_sections(parts: Sequence[Part]) -> Iterator[Problem]:
    """Yield the problems of `parts` that give a single value, or a list, for a section."""
    kinds = get_type_hints(TrainConfig)
    for _, file, prefix, content in parts:
        for section, value in content.items() if not prefix else ():
            # `build_config` names the options of a group that is given as a single value.
            wrong = isinstance(value, list) if section in GROUPS else not isinstance(value, dict)
            if section in kinds and wrong:
                keys = ", ".join(field_names(kinds[section]))
                remedy = f"Its keys: {keys}." if keys else f"Choose with defaults: override /{section}: <option>."
                rule = "must be a mapping of its keys to values"
                yield Problem(key=f"{file}: {section}", rule=rule, value=value, remedy=remedy)


def _stand_in(group: str) -> str:
    """The override that replaces a class of the user's own that is not needed; the last option needs nothing else."""
    return f"{group}={[*GROUPS[group]][-1]}"


def _other_option(
    group: str, value: object, options: Sequence[str], where: str, found: list[Problem], unneeded: tuple[str, ...]
) -> str:
    """Add the option of a `path.py:Name` to Hydra; report any other, and return the override that replaces it."""
    if group not in CUSTOM or not is_custom(str(value)):
        return _misspelt(group, value, options, where, found)
    if group in unneeded:
        return _stand_in(group)
    try:
        add_option(group, str(value), own_class(str(value), CUSTOM[group], key=group))
    except ValueError as error:
        found.append(Problem(key=f"{where}{group}", rule=str(error), value=value, remedy=similar_custom(str(value))))
        return f"~{group}"
    return ""


def _misspelt(group: str, value: object, options: Sequence[str], where: str, found: list[Problem]) -> str:
    """Report an option that does not exist; return the override that replaces the choice."""
    known = CHOICES.get(f"{group}={value}".lower(), "")
    close = None if known else nearest(str(value), options)
    hint = known or (f"Did you mean {group}={close}?" if close else "")
    if group == "model" and Path(os.path.expanduser(str(value))).is_dir():
        hint = f"Write model=hf model.path={value} for the model in that directory."
    rule = f"must be one of {', '.join(options)}"
    found.append(Problem(key=f"{where}{group}", rule=rule, value=value, remedy=hint))
    return f"{group}={close}" if close else f"~{group}"


def _chosen(defaults: Sequence[ResultDefault]) -> dict[str, type[Any]]:
    """Group -> class of its choice; an option in a YAML file has the class of the option from which it starts."""
    found: dict[str, type[Any]] = {}
    for default in defaults:
        group, _, name = (default.config_path or "").partition("/")
        if name in GROUPS.get(group, {}):
            found[group] = GROUPS[group][name]
        elif group in CUSTOM and is_custom(name):
            found[group] = own_class(name, CUSTOM[group], key=group)
        elif name in PRESETS.get(group, {}):
            found[group] = type(PRESETS[group][name])
    return found


def _drop_replaced(
    root: DictConfig,
    chosen: Mapping[str, type],
    overrides: Sequence[Override],
    files: Sequence[Part],
) -> None:
    """Where a recipe, or a word of the command line, chooses another option of a group than the recipe below it, drop
    the keys that the recipe below sets and that only other options of the group have.

    A recipe with model.path would otherwise refuse model=smollm2. A key that is set together with the choice, or later,
    stays, and is refused. `files` are the parts that stand in files.
    """
    named = [override.key_or_group for override in overrides]
    for group, kind in chosen.items():
        choosing = [index for index, file in enumerate(files) if group in _overridden(file.content)]
        choice = len(files) if group in named else choosing[-1] if choosing else 0
        with_choice = [file for index, file in enumerate(files) if index >= choice or file.prefix == f"{group}."]
        before = [name for file in files if is_custom(name := _overridden(file.content).get(group, ""))]
        options = [*GROUPS[group].values(), *(option for name in before for option in _readable(group, name))]
        others = {key for option in options for key in field_names(option)}
        for key in others - set(field_names(kind)):
            path = f"{group}.{key}."
            is_set = any(f"{name}.".startswith(path) for name in named)
            is_set |= any(_sets(file, path) for file in with_choice)
            if isinstance(root.get(group), DictConfig) and not is_set:
                root[group].pop(key, None)


def _readable(group: str, name: str) -> list[type]:
    """The class of a `path.py:Name` that is replaced; none if the file cannot be read, which then does not matter."""
    try:
        return [own_class(name, CUSTOM[group], key=group)]
    except ValueError:
        return []


def _overridden(content: Mapping[str, Any]) -> dict[str, str]:
    """Group -> the option that the defaults list of a file chooses, in entries `override /<group>: <option>`."""
    entries = [entry for entry in content.get("defaults") or [] if isinstance(entry, Mapping)]
    pairs = [(str(key), str(value)) for entry in entries for key, value in entry.items()]
    return {k.removeprefix("override ").strip().lstrip("/"): v for k, v in pairs if k.startswith("override ")}


def _located(problems: Sequence[Problem], overrides: Sequence[Override], files: Sequence[Part]) -> list[Problem]:
    """The `problems` in the order of the command line; problems of YAML files come first and name the file."""
    names = [f"{override.key_or_group}." for override in overrides]
    ordered: list[tuple[int, Problem]] = []
    for problem in problems:
        key = f"{problem.key.lstrip('~')}."
        by_word = [index for index, name in enumerate(names) if key.startswith(name) or name.startswith(key)]
        if not by_word:
            setting = [part.file for part in files if _sets(part, key)]
            problem = replace(problem, key=f"{setting[-1]}: {problem.key}" if setting else problem.key)
        ordered.append((by_word[-1] if by_word else -1, problem))
    return [problem for _, problem in sorted(ordered, key=lambda pair: pair[0])]


def _parts(defaults: Sequence[ResultDefault], loader: ConfigLoader) -> Iterator[Part]:
    """Yield the part of every entry of `defaults`; later ones override earlier ones."""
    for default in defaults:
        name, package = default.config_path, (default.package or "").replace("_global_", "")
        source = next((source for source in loader.get_sources() if name and source.is_config(name)), None)
        if name is not None and source is not None:
            content: object = None
            if isinstance(source, ParityOptions):
                content = source.content(name)
            else:
                content = OmegaConf.to_container(source.load_config(name).config)
            assert isinstance(content, dict)
            file = f"{source.path}/{name}.yaml" if source.scheme() == "file" else ""
            yield Part(name=name, file=file, prefix=f"{package}." if package else "", content=content)


def _sets(part: Part, key: str) -> bool:
    """True if `part` sets `key`, which ends in a dot."""
    return key.startswith(part.prefix) and _holds(part.content, key[len(part.prefix) : -1])


def _holds(node: object, key: str) -> bool:
    """True if the mapping `node` has `key`; a name in a file can hold dots, like the names before and after a dot."""
    if not isinstance(node, Mapping):
        return False
    below = ((value, key.removeprefix(f"{name}.")) for name, value in node.items() if key.startswith(f"{name}."))
    return key in node or any(_holds(value, rest) for value, rest in below)


def _directory(root: DictConfig, key: str) -> tuple[Path | None, bool]:
    """(Absolute directory named by `key`, None if unresolvable; True if neither recipe nor overrides set run.dir)."""
    directory = OmegaConf.select(root, key, throw_on_resolution_failure=False)
    run = OmegaConf.to_container(root, resolve=False)["run"]  # type: ignore[index, call-overload]
    is_default = isinstance(run, dict) and run.get("dir") == RunConfig.__dataclass_fields__["dir"].default
    return Path(directory).absolute() if isinstance(directory, str) else None, is_default


def _not_composed(error: Exception, recipe: Path) -> Problem:
    """Describe an error of Hydra, OmegaConf, YAML or the file system in one sentence about the recipe."""
    if isinstance(error, RecursionError):
        rule, remedy = "lead back to the recipe itself", f"Start from /{MAIN_CONFIG} or from another recipe."
        return Problem(key=f"{recipe}: defaults", rule=rule, value=NOT_SET, remedy=remedy)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error.__cause__, OmegaConfBaseException):
        lines.append(str(error.__cause__).splitlines()[0])
    if (wrong := _wrong_choice(" ".join(lines), recipe)) is not None:
        return wrong
    # Hydra's search path does not help a user who named a recipe.
    noise = ("provider=", "Config search path", "full_key", "object_type", "reference_type")
    shown = "; ".join(line for line in lines if not line.startswith(noise))
    words = re.findall(r"Could not (?:load|override) '([^']+)'", shown)
    meant = [close for word in words if (close := _near(word, recipe.parent))]
    remedy = f"Did you mean {meant[0]}?" if meant else ""
    if not meant and "Could not override" in shown:
        remedy = (
            f"What defaults can choose: {', '.join(GROUPS)}. Other sections have keys, which follow below defaults."
        )
    elif not meant and "Could not load" in shown:
        remedy = (
            f"{words[0]}.yaml is looked for in {recipe.parent}, among the recipes of Parity (parity recipes), and in "
            "the directory that --config-dir names."
        )
    return Problem(key="recipe", rule=f"cannot be composed ({shown})", value=str(recipe), remedy=remedy)


def _wrong_choice(said: str, recipe: Path) -> Problem | None:
    """The Problem of an option that a recipe chooses in a way that Hydra refuses, as it `said`; None of another one."""
    key = f"{recipe}: defaults"
    again = r"Multiple values for (\S+)\. To override a value use 'override \S+: (\S+)'"
    if (twice := re.search(again, said)) is not None:
        group, option = twice.groups()
        rule, remedy = f"name two options of {group}", f"Write - override /{group}: {option}."
        return Problem(key=key, rule=rule, value=f"{group}: {option}", remedy=remedy)
    if (twice := re.search(r"(\S+) appears more than once in the final defaults list", said)) is not None:
        group = twice.group(1)
        remedy = f"Start from one recipe only, and choose with - override /{group}: <option>."
        return Problem(key=key, rule=f"choose {group} twice", value=group, remedy=remedy)
    early = re.search(r"Override '(\S+) : (\S+)' is defined before '(\S*): ([^']+)'", said)
    if early is not None and early.group(3) in GROUPS:
        group, option = early.group(3), early.group(4)
        remedy = f"Write - override /{group}: {option}."
        return Problem(key=key, rule=f"choose {group} twice", value=f"{group}: {option}", remedy=remedy)
    if early is not None:
        group, option, _, entry = early.groups()
        rule = f"must name what the recipe starts from, {entry}, before what it overrides"
        remedy = f"Move - override /{group}: {option} behind - {entry}."
        return Problem(key=key, rule=rule, value=f"override {group}: {option}", remedy=remedy)
    return None


def tree_text(tree: DictConfig, key: str | None, *, resolve: bool) -> str | Problem:
    """A composed config, or its part under `key`, as YAML; the Problem of a part that is not there."""
    own = OmegaConf.masked_copy(tree, [name for name in map(str, tree) if name != HYDRA_KEY])
    part = own if key is None else OmegaConf.select(own, key)
    if not OmegaConf.is_config(part):
        remedy = f"Sections: {', '.join(map(str, own))}."
        return Problem(key="--package", rule="must be a section", value=key, remedy=remedy)
    return OmegaConf.to_yaml(part, resolve=resolve)


def _near(word: str, beside: Path) -> str | None:
    """What an entry of a recipe's defaults probably means: a recipe, here or in the directory `beside`, a group, or an
    option of a group."""
    group, _, option = word.rpartition("/")
    if group:
        return nearest(option, [*GROUPS.get(group, {}), *PRESETS.get(group, {})])
    return nearest(option, [*GROUPS, *recipe_files(beside), *recipe_files(recipe_dir())])


def _together(runs: Sequence[ComposedRun]) -> list[Problem]:
    """Problems of all runs without repetition; a problem of only some runs is labelled with their overrides."""
    everywhere = set.intersection(*(set(run.overrides) for run in runs))
    found: dict[str, tuple[Problem, list[ComposedRun]]] = {}
    for run in runs:
        for problem in run.problems:
            found.setdefault(str(problem), (problem, []))[1].append(run)
    together = []
    for problem, broken in found.values():
        if len(broken) < len(runs):
            # The overrides that all broken runs share, and not all other runs have, are most likely the cause.
            own = [word for word in broken[0].overrides if word not in everywhere]
            shared = [word for word in own if all(word in run.overrides for run in broken)]
            problem = replace(problem, key=f"[{' '.join(shared or own)}] {problem.key}")
        together.append(problem)
    return together
