"""`parity replay <run.dir> step=N [key=value ...]`, or `parity replay <bundle>`: a step under every correction.

In place of a bundle stands a file of another trainer too, or a directory with the files of its ranks.

All problems are reported together before torch is loaded. Called by `commands.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from trainer.replay.modes import all_names, name_problems, of_bundle
from trainer.replay.peers.places import rank_files
from trainer.rundir.dump import CONFIG, DumpError, open_dump, way_to_a_dump
from trainer.rundir.run_dir import CONFIG_FILE, runs_inside, unusable_problem
from trainer.text.plain import to_stdout

if TYPE_CHECKING:
    from trainer.replay.bundle import Bundle
    from trainer.replay.results import Replay

NAME = "parity replay"
OUTPUT = "replay"
"""Directory in run.dir for the results, unless out= names another directory."""
OF_FILE = ("modes", "out", "bundle")
KEYS = ("step", *OF_FILE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Arguments:
    """Arguments of `parity replay`."""

    source: Path
    """Directory of a run, or a bundle, or a file or directory of another trainer."""
    step: int | None
    """The step of the run, or the rollout to take from a directory with several; None of a file."""
    modes: tuple[str, ...]
    """Names of modes and presets; all names if none was given."""
    out: Path
    bundle: Path | None
    """File to which the step is written as a bundle; None if it is not asked for."""


def run_replay(words: Sequence[str]) -> int:
    """Run `parity replay <words>`; return the exit code."""
    arguments, problems = _parse(words)
    if arguments is None:
        return report(problems, command=NAME)
    return _replay_bundle(arguments) if _is_bundle(arguments.source) else _replay_run(arguments)


def _is_run(place: Path) -> bool:
    return any((place / name).exists() for name in (CONFIG_FILE, DUMPS))


def _is_bundle(place: Path) -> bool:
    """True for a file, and for a directory that another trainer filled, one file per rank."""
    return place.is_file() or (bool(rank_files(place)) and not _is_run(place))


def _parse(words: Sequence[str]) -> tuple[Arguments | None, list[Problem]]:
    """Parse the words after `parity replay` -> (arguments or None, problems); None with at least one problem."""
    parsed, problems = PARSERS["replay"].read(words)
    given = given_words(parsed.words)
    places = [Path(from_home(word, key="run.dir")) for word in parsed.words if "=" not in word]
    shown = " ".join(map(str, places))
    bundles = [place for place in places if _is_bundle(place)]
    source = next(iter([*bundles, *places]), None)
    known = OF_FILE if bundles and bundles[0].is_file() else KEYS
    problems += [
        unknown_word(key, value, known=known, command=NAME) for key, value in given.items() if key not in known
    ]
    if bundles and len(places) > 1:
        problems.append(Problem(key="bundle", rule="must be one file", value=shown))
    if not bundles and (source is None or len(places) > 1 or not _is_run(source)):
        rule, value = ("must be the directory of one run", shown) if places else ("is missing", NOT_SET)
        remedy = f"{NAME} <run.dir> step=N. {runs_inside(places[0]) if len(places) == 1 else ''}".strip()
        problems.append(Problem(key="run.dir", rule=rule, value=value, remedy=remedy))
        source = None
    step, first = given.get("step"), 0 if bundles else 1
    if step is None and not bundles:
        remedy = f"Write step=N. {way_to_a_dump(source) if source is not None else ''}".strip()
        problems.append(Problem(key="step", rule="is missing", value=NOT_SET, remedy=remedy))
    elif step is not None and (not step.isdecimal() or int(step) < first):
        problems.append(Problem(key="step", rule=f"must be a whole number >= {first}", value=step))
    names, every = [name for name in given.get("modes", "").split(",") if name], of_bundle() if bundles else all_names()
    problems += name_problems(names, known=every)
    if problems or source is None:
        return None, problems
    number = None if step is None else int(step)
    default = source.with_name(f"{source.stem}_{OUTPUT}") if bundles else source / OUTPUT / f"step_{number:06d}"
    out = Path(given["out"]) if given.get("out") else default
    bundle = Path(given["bundle"]) if given.get("bundle") else None
    for key, directory in (("out", out), ("bundle", None if bundle is None else bundle.parent)):
        if directory is not None and (unusable := unusable_problem(key, directory)) is not None:
            problems.append(unusable)
    made = Arguments(source=source, step=number, modes=tuple(names or every), out=out, bundle=bundle)
    return (None if problems else made), problems


def _replay_run(arguments: Arguments) -> int:
    command = f"{NAME} {arguments.source}"
    assert arguments.step is not None
    try:
        dump = open_dump(arguments.source, arguments.step)
    except DumpError as error:
        return report([str(error)], command=command)
    resolution = resolve((dump.path / CONFIG).resolve(), (), own_dir=None, multirun=False)
    config = resolution.runs[0].config
    if config is None:
        return report(list(resolution.problems), command=command)
    # Imported late, because these lines import torch.
    from trainer.replay.bundle_step import bundle_of
    from trainer.replay.results import replay_step

    return _written(
        arguments,
        lambda: replay_step(dump, config, arguments.modes, run_dir=arguments.source),
        lambda replay: bundle_of(replay.step, dump.description, config),
    )


def _replay_bundle(arguments: Arguments) -> int:
    # Imported late, because these lines import torch.
    from trainer.replay.bundle import BundleError
    from trainer.replay.peers.recognise import read_any
    from trainer.replay.results import replay_bundle

    try:
        bundle = read_any(arguments.source, step=arguments.step)
    except BundleError as error:
        return report([str(error)], command=f"{NAME} {arguments.source}")
    return _written(arguments, lambda: replay_bundle(bundle, arguments.modes), lambda _: bundle)


def _written(arguments: Arguments, make: Callable[[], Replay], to_bundle: Callable[[Replay], Bundle]) -> int:
    """Make the replay, print it, and write its files, and the step as a bundle if that is asked for."""
    from trainer.cli.job import failed
    from trainer.replay.bundle import write_bundle

    try:
        replay = make()
        to_stdout(render_replay(replay))
        arguments.out.mkdir(parents=True, exist_ok=True)
        result, page = replay.write(arguments.out)
        if arguments.bundle is not None:
            arguments.bundle.parent.mkdir(parents=True, exist_ok=True)
            write_bundle(to_bundle(replay), arguments.bundle)
    except Exception as error:
        return failed(error, arguments.out, command=NAME)
    to_stdout(f"{result}\n{page}\n" + ("" if arguments.bundle is None else f"{arguments.bundle}\n"))
    return DONE


def render_replay(replay: Replay) -> str:
    """Text with facts about the step, the mismatch of a bundle, one row per mode, and the refused modes."""
    facts = "\n".join(replay.facts())
    mismatch = "".join(f"{rows_text(rows)}\n" for _, rows, *_ in replay.measured()[:1])
    refused = (f"{mode.name} is refused: {mode.refusal}\n" for mode in replay.refused)
    return f"{facts}\n\n{mismatch}{rows_text(replay.mode_rows())}{''.join(refused)}"
