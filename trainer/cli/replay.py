"""`parity replay <run.dir> step=N [key=value ...]`, or `parity replay <bundle>`: a step under every correction.

In place of a bundle stands a file of another trainer too, or a directory with the files of its ranks.

All problems are reported together before torch is loaded. Called by `commands.py`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from algorithms.config import NOT_SET, Problem
from algorithms.config.home import from_home
from trainer.cli.arguments import given_words, unknown_word
from trainer.cli.parsers import PARSERS
from trainer.cli.tables import rows_text
from trainer.compose.compose import resolve
from trainer.compose.outcome import DONE, report
from trainer.config.outputs import DUMPS
from trainer.config.train import TrainConfig
from trainer.replay.modes import all_names, name_problems, of_bundle
from trainer.replay.peers.places import rank_files
from trainer.rundir.dump import CONFIG, Dump, DumpError, dumped_steps, open_dump, way_to_a_dump
from trainer.rundir.run_dir import CONFIG_FILE, runs_inside, unusable_problem
from trainer.text.plain import to_stdout

if TYPE_CHECKING:
    from trainer.replay.results import Replay

NAME = "parity replay"
OUTPUT = "replay"
"""Directory in run.dir for the results, unless out= names another directory."""
KEYS = ("step", "modes", "out", "bundle")
OF_FILE = ("modes", "out", "bundle")
"""Words that go with a bundle, or with a file of another trainer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayArguments:
    """Arguments of `parity replay`."""

    run_dir: Path
    step: int
    modes: tuple[str, ...]
    """Names of modes and presets; all names if none was given."""
    out: Path
    bundle: Path | None = None
    """File to which the step is written as a bundle; None if it is not asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BundleArguments:
    """Arguments of `parity replay` for a bundle, or for a file or directory of another trainer."""

    file: Path
    modes: tuple[str, ...]
    out: Path
    step: int | None = None
    """The rollout to take from a directory with several."""
    bundle: Path | None = None
    """File to which the step is written as a bundle; None if it is not asked for."""


def run_replay(words: Sequence[str]) -> int:
    """Run `parity replay <words>`; return the exit code."""
    parsed, problems = PARSERS["replay"].read(words)
    if problems:
        return report(problems, command=NAME)
    words = parsed.words
    places = [Path(from_home(word, key="run.dir")) for word in words if "=" not in word]
    file = next((place for place in places if place.is_file() or _is_of_ranks(place)), None)
    if file is not None:
        of_file, problems = parse_bundle(file, words)
        return report(problems, command=NAME) if of_file is None else _replay_bundle(of_file)
    arguments, problems = parse_replay(words)
    if arguments is None:
        return report(problems, command=NAME)
    command = f"{NAME} {arguments.run_dir}"
    try:
        dump = open_dump(arguments.run_dir, arguments.step)
    except DumpError as error:
        return report([str(error)], command=command)
    resolution = resolve((dump.path / CONFIG).resolve(), (), own_dir=None, multirun=False)
    config = resolution.runs[0].config
    if config is None:
        return report(list(resolution.problems), command=command)
    return _replay(arguments, dump, config)


def _is_of_ranks(place: Path) -> bool:
    """Whether `place` is a directory that another trainer filled, one file per rank."""
    return bool(rank_files(place)) and not any((place / name).exists() for name in (CONFIG_FILE, DUMPS))


def parse_replay(words: Sequence[str]) -> tuple[ReplayArguments | None, list[Problem]]:
    """Parse the words after `parity replay` -> (arguments or None, problems); None with at least one problem."""
    given, names = _given(words)
    places = [word for word in words if "=" not in word]
    problems = [unknown_word(key, value, known=KEYS, command=NAME) for key, value in given.items() if key not in KEYS]
    run_dir = Path(from_home(places[0], key="run.dir")) if len(places) == 1 and not places[0].startswith("-") else None
    if run_dir is None or not any((run_dir / name).exists() for name in (CONFIG_FILE, DUMPS)):
        rule, value = ("must be the directory of one run", " ".join(places)) if places else ("is missing", NOT_SET)
        remedy = f"{NAME} <run.dir> step=N. {runs_inside(run_dir) if run_dir is not None else ''}".strip()
        problems.append(Problem(key="run.dir", rule=rule, value=value, remedy=remedy))
        run_dir = None
    step = given.get("step")
    if step is None:
        remedy = f"Write step=N. {way_to_a_dump(run_dir) if run_dir is not None else ''}".strip()
        problems.append(Problem(key="step", rule="is missing", value=NOT_SET, remedy=remedy))
    elif not step.isdecimal() or int(step) < 1:
        problems.append(Problem(key="step", rule="must be a whole number >= 1", value=step))
    problems += name_problems(names)
    if problems or run_dir is None or step is None:
        return None, problems
    out = Path(given["out"]) if given.get("out") else run_dir / OUTPUT / f"step_{int(step):06d}"
    if (unusable := unusable_problem("out", out)) is not None:
        return None, [unusable]
    bundle = Path(given["bundle"]) if given.get("bundle") else None
    if bundle is not None and (unusable := unusable_problem("bundle", bundle.parent)) is not None:
        return None, [unusable]
    modes = tuple(names or all_names())
    return ReplayArguments(run_dir=run_dir, step=int(step), modes=modes, out=out, bundle=bundle), []


def parse_bundle(file: Path, words: Sequence[str]) -> tuple[BundleArguments | None, list[Problem]]:
    """Parse the words after `parity replay` with a file among them -> (arguments or None, problems)."""
    given, names = _given(words)
    known = (*OF_FILE, "step") if file.is_dir() else OF_FILE
    problems = [unknown_word(key, value, known=known, command=NAME) for key, value in given.items() if key not in known]
    others = [word for word in words if "=" not in word and Path(from_home(word, key="bundle")) != file]
    if others:
        problems.append(Problem(key="bundle", rule="must be one file", value=" ".join([str(file), *others])))
    problems += name_problems(names, known=of_bundle())
    step = given.get("step") if "step" in known else None
    if step is not None and not step.isdecimal():
        problems.append(Problem(key="step", rule="must be a whole number >= 0", value=step))
    out = Path(given["out"]) if given.get("out") else file.with_name(f"{file.stem}_{OUTPUT}")
    bundle = Path(given["bundle"]) if given.get("bundle") else None
    for key, directory in (("out", out), ("bundle", None if bundle is None else bundle.parent)):
        if directory is not None and (unusable := unusable_problem(key, directory)) is not None:
            problems.append(unusable)
    if problems:
        return None, problems
    number = None if step is None else int(step)
    modes = tuple(names or of_bundle())
    return BundleArguments(file=file, modes=modes, out=out, step=number, bundle=bundle), []


def replay_completions(typed: Sequence[str]) -> list[str]:
    """Possible completions of the last word of `parity replay <run.dir> ...`; `typed` holds all words after parity."""
    last = typed[-1]
    if last.startswith("step="):
        return [f"step={step}" for step in dumped_steps(Path(os.path.expanduser(typed[1])))]
    if last.startswith("modes="):
        before, comma, _ = last.rpartition(",")
        return [f"{before}{comma}{name}" if comma else f"modes={name}" for name in all_names()]
    return [f"{key}=" for key in KEYS]


def _given(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """(key -> value of the words of the form key=value, the names of modes=)."""
    given = given_words(words)
    return given, [name for name in given.get("modes", "").split(",") if name]


def _replay(arguments: ReplayArguments, dump: Dump, config: TrainConfig) -> int:
    # Imported late, because these lines import torch.
    from trainer.cli.job import failed
    from trainer.replay.bundle import write_bundle
    from trainer.replay.bundle_step import bundle_of
    from trainer.replay.results import replay_step, write_replay

    try:
        replay = replay_step(dump, config, arguments.modes, run_dir=arguments.run_dir)
        to_stdout(render_replay(replay))
        arguments.out.mkdir(parents=True, exist_ok=True)
        result, page = write_replay(replay, arguments.out)
        if arguments.bundle is not None:
            arguments.bundle.parent.mkdir(parents=True, exist_ok=True)
            write_bundle(bundle_of(replay.step, dump.description, config), arguments.bundle)
    except Exception as error:
        return failed(error, arguments.out, command=NAME)
    to_stdout(f"{result}\n{page}\n" + ("" if arguments.bundle is None else f"{arguments.bundle}\n"))
    return DONE


def _replay_bundle(arguments: BundleArguments) -> int:
    # Imported late, because these lines import torch.
    from trainer.cli.job import failed
    from trainer.replay.bundle import BundleError, write_bundle
    from trainer.replay.bundle_results import mismatch_rows, mode_rows, replay_bundle, write_bundle_replay
    from trainer.replay.peers.recognise import read_any

    try:
        bundle = read_any(arguments.file, step=arguments.step)
    except BundleError as error:
        return report([str(error)], command=f"{NAME} {arguments.file}")
    try:
        replay = replay_bundle(bundle, arguments.modes)
        facts = "\n".join(replay.facts())
        to_stdout(f"{facts}\n\n{rows_text(mismatch_rows(replay))}\n{rows_text(mode_rows(replay))}")
        arguments.out.mkdir(parents=True, exist_ok=True)
        result, page = write_bundle_replay(replay, arguments.out)
        if arguments.bundle is not None:
            arguments.bundle.parent.mkdir(parents=True, exist_ok=True)
            write_bundle(bundle, arguments.bundle)
    except Exception as error:
        return failed(error, arguments.out, command=NAME)
    to_stdout(f"{result}\n{page}\n" + ("" if arguments.bundle is None else f"{arguments.bundle}\n"))
    return DONE


def render_replay(replay: Replay) -> str:
    """Text with facts about the step, one row per mode, and the refused modes with their reasons."""
    from trainer.replay.results import mode_table

    facts = "\n".join(replay.facts())
    refused = (f"{mode.name} is refused: {mode.refusal}\n" for mode in replay.refused)
    return f"{facts}\n\n{rows_text(mode_table(replay.scores))}{''.join(refused)}"
