"""The step that `parity replay` and `parity diagnose` look at: of a run, or in a bundle or files of another trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from algorithms.config import NOT_SET, Problem
from algorithms.config.home import from_home
from trainer.cli.arguments import given_words, unknown_word
from trainer.cli.parsers import PARSERS
from trainer.compose.compose import resolve
from trainer.config.outputs import DUMPS
from trainer.config.train import TrainConfig
from trainer.ending.exit_codes import DONE
from trainer.replay.peers.places import rank_files
from trainer.rundir.dump import CONFIG, Dump
from trainer.rundir.run_dir import CONFIG_FILE, StartError, runs_inside, unusable_problem
from trainer.text.plain import to_stdout


class StepWords(NamedTuple):
    """The words of a command that looks at a step; `source` is None if they name none."""

    source: Path | None
    is_run: bool
    """True for the directory of a run, False for a bundle, or a file or directory of another trainer."""
    given: Mapping[str, str]
    """Key -> value."""
    problems: list[Problem]

    @property
    def step(self) -> int | None:
        return int(self.given["step"]) if "step" in self.given else None

    def out(self, source: Path, *default: str) -> Path | None:
        """The directory of the results, `default` in that of a run; None, and a problem, if it cannot be written to."""
        beside = source.joinpath(*default) if self.is_run else source.with_name(f"{source.stem}_{default[0]}")
        out = Path(self.given.get("out") or beside)
        self.problems.extend(problem for problem in [unusable_problem("out", out)] if problem is not None)
        return None if self.problems else out


def read_words(words: Sequence[str], *, command: str, of_run: Sequence[str], of_file: Sequence[str]) -> StepWords:
    """Read the words of `command`, which takes the keys `of_run` with a run, and `of_file` with anything else."""
    parsed, problems = PARSERS[command].read(words)
    given = given_words(parsed.words)
    places = [Path(from_home(word, key="source")) for word in parsed.words if "=" not in word]
    source = places[0] if len(places) == 1 else None
    is_run = source is not None and any((source / name).exists() for name in (CONFIG_FILE, DUMPS))
    if source is None or not (is_run or source.is_file() or rank_files(source)):
        rule = "must be a bundle or the directory of a run" if places else "is missing"
        usage = " or ".join(line.strip() for line in (PARSERS[command].usage or "").splitlines())
        remedy = f"{usage}. {'' if source is None else runs_inside(source)}".strip()
        shown = " ".join(map(str, places)) or NOT_SET
        problems.append(Problem(key="source", rule=rule, value=shown, remedy=remedy))
        source = None
    # A directory of another trainer may hold several steps.
    known = of_run if is_run else (*of_file, *([] if source is not None and source.is_file() else ["step"]))
    wrong = {key: value for key, value in given.items() if key not in known}
    problems += [
        unknown_word(key, value, known=known, command=f"parity {command} here") for key, value in wrong.items()
    ]
    for key, least in (("step", int(is_run)), ("tokens", 1)):
        if key in given and (not given[key].isdecimal() or int(given[key]) < least):
            problems.append(Problem(key=key, rule=f"must be a whole number >= {least}", value=given[key]))
    return StepWords(source, is_run, given, problems)


def with_config(dump: Dump) -> tuple[Dump, TrainConfig]:
    """A step that a run wrote down, and its config. Raises StartError if it cannot be used."""
    resolution = resolve((dump.path / CONFIG).resolve(), (), own_dir=None, multirun=False)
    config = resolution.runs[0].config
    if config is None:
        raise StartError(*resolution.problems)
    return dump, config


def show(make: Callable[[], tuple[str, list[Path]]], out: Path, *, command: str) -> int:
    """Print the text that `make` returns, and the paths of the files that it wrote -> the exit code."""
    from trainer.cli.job import failed

    try:
        text, files = make()
    except Exception as error:
        return failed(error, out, command=command)
    to_stdout(text + "".join(f"{file}\n" for file in files))
    return DONE
