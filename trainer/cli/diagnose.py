"""`parity diagnose <bundle> [model=DIR]`, or `parity diagnose <run.dir> [step=N]`: why engine and trainer disagree.

Without step= a run takes one more step from its newest checkpoint, in a directory of its own, and that step is judged.
All problems of the words are reported together before torch is loaded. Called by `commands.py`.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from algorithms.config import NOT_SET, Problem
from algorithms.config.home import from_home
from rollout.config import DType, Quantization
from trainer.cli.arguments import given_words, unknown_word
from trainer.cli.parsers import PARSERS
from trainer.cli.tables import rows_text
from trainer.compose.compose import resolve
from trainer.compose.outcome import DONE, report
from trainer.config.outputs import CHECKPOINTS, DUMPS
from trainer.replay.peers.places import rank_files
from trainer.rundir.dump import CONFIG, DumpError, open_dump, way_to_a_dump
from trainer.rundir.run_dir import CONFIG_FILE, runs_inside, unusable_problem
from trainer.rundir.sealed_directory import sealed_steps
from trainer.text.plain import to_stderr, to_stdout

if TYPE_CHECKING:
    from trainer.diagnose.diagnosis import Diagnosis
    from trainer.replay.bundle import Bundle

NAME = "parity diagnose"
OUTPUT = "diagnosis"
"""Directory in run.dir for the results, unless out= names another one."""
MODEL_FILE = "config.json"
MAX_TOKENS = 1024
"""Response tokens that are judged; each is scored a few hundred times."""
OF_RUN = ("step", "tokens", "device", "out")
OF_BUNDLE = (
    "model",
    "older",
    "temperature",
    "trainer_dtype",
    "rollout_dtype",
    "quantization",
    "tokens",
    "device",
    "out",
)
CHOICES = {
    "trainer_dtype": tuple(each.value for each in DType),
    "rollout_dtype": tuple(each.value for each in DType),
    "quantization": tuple(each.value for each in Quantization),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Arguments:
    """Words of `parity diagnose`."""

    source: Path
    """A bundle, a file or directory of another trainer, or the directory of a run."""
    given: Mapping[str, str]
    """Key -> value of the words."""
    out: Path
    models: tuple[Path, ...] = ()
    """Of a bundle: the weights that sampled, then older ones."""

    @property
    def tokens(self) -> int:
        return int(self.given.get("tokens", MAX_TOKENS))

    @property
    def device(self) -> str:
        return self.given.get("device", "cpu")


def run_diagnose(words: Sequence[str]) -> int:
    """Run `parity diagnose <words>`; return the exit code."""
    arguments, problems = _parse(words)
    if arguments is None:
        return report(problems, command=NAME)
    is_run = (arguments.source / CONFIG_FILE).is_file()
    return _of_run(arguments) if is_run else _of_bundle(arguments)


def _parse(words: Sequence[str]) -> tuple[Arguments | None, list[Problem]]:
    """Parse the words -> (arguments or None, problems); None with at least one problem."""
    parsed, problems = PARSERS["diagnose"].read(words)
    given = given_words(parsed.words)
    places = [word for word in parsed.words if "=" not in word]
    source = Path(from_home(places[0], key="source")) if len(places) == 1 else None
    is_run = source is not None and (source / CONFIG_FILE).is_file()
    is_bundle = source is not None and (source.is_file() or (not is_run and bool(rank_files(source))))
    if source is None or not (is_bundle or is_run):
        rule, value = ("must be a bundle or the directory of a run", " ".join(places)) if places else (
            "is missing", NOT_SET)  # fmt: skip
        remedy = f"{NAME} <bundle> model=<directory>, or {NAME} <run.dir>. "
        hint = runs_inside(source) if source is not None and source.is_dir() else ""
        problems.append(Problem(key="source", rule=rule, value=value, remedy=f"{remedy}{hint}".strip()))
    if is_run or is_bundle:
        known = OF_RUN if is_run else (*OF_BUNDLE, *(["step"] if source is not None and source.is_dir() else []))
        wrong = {key: value for key, value in given.items() if key not in known}
        problems += [unknown_word(key, value, known=known, command=f"{NAME} here") for key, value in wrong.items()]
    for key in ("step", "tokens"):
        if key in given and (not given[key].isdecimal() or int(given[key]) < 1):
            problems.append(Problem(key=key, rule="must be a whole number >= 1", value=given[key]))
    for key, choices in CHOICES.items():
        if key in given and given[key] not in choices:
            problems.append(Problem(key=key, rule=f"must be one of {', '.join(choices)}", value=given[key]))
    if "temperature" in given and not _is_positive(given["temperature"]):
        problems.append(Problem(key="temperature", rule="must be a number > 0", value=given["temperature"]))
    if "device" in given and not re.fullmatch(r"cpu|cuda(:\d+)?", given["device"]):
        problems.append(Problem(key="device", rule="must be cpu, cuda or cuda:<number>", value=given["device"]))
    models = _models(given, problems)
    if source is not None and not problems:
        default = source / OUTPUT if is_run else source.with_name(f"{source.stem}_{OUTPUT}")
        out = Path(given["out"]) if given.get("out") else default
        if (unusable := unusable_problem("out", out)) is None:
            return Arguments(source=source, given=given, out=out, models=models), []
        problems.append(unusable)
    return None, problems


def _models(given: Mapping[str, str], problems: list[Problem]) -> tuple[Path, ...]:
    """The directories of model= and older=; adds their problems."""
    found: list[Path] = []
    if given.get("model") == "":
        problems.append(Problem(key="model", rule="must be a directory", value=NOT_SET, remedy="Or leave it out."))
    for key in ("model", "older"):
        for word in filter(None, given.get(key, "").split(",")):
            path = Path(from_home(word, key=key))
            if not (path / MODEL_FILE).is_file():
                rule = f"must be a directory that transformers can load, with its {MODEL_FILE}"
                remedy = "Of a run: parity export <run.dir> <directory>."
                problems.append(Problem(key=key, rule=rule, value=word, remedy=remedy))
            found.append(path)
    if given.get("older") and not given.get("model"):
        problems.append(Problem(key="model", rule="is missing", value=NOT_SET, remedy="older= needs model= beside it."))
    if len(given.get("model", "").split(",")) > 1:
        problems.append(Problem(key="model", rule="must be one directory", value=given["model"], remedy="See older=."))
    return tuple(found)


def _is_positive(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


def _of_bundle(arguments: Arguments) -> int:
    # Imported late, because these lines import torch.
    from trainer.replay.bundle import BundleError
    from trainer.replay.peers.recognise import read_any

    step = arguments.given.get("step")
    try:
        bundle = read_any(arguments.source, step=None if step is None else int(step))
    except BundleError as error:
        return report([str(error)], command=f"{NAME} {arguments.source}")
    return _written(arguments, lambda: _diagnosed(arguments, bundle, list(arguments.models)))


def _of_run(arguments: Arguments) -> int:
    command = f"{NAME} {arguments.source}"
    run_dir = arguments.source
    step = arguments.given.get("step")
    if step is None:
        run_dir = one_more(arguments.source)
        step, code = _one_more_step(arguments.source, run_dir)
        if code != DONE:
            to_stderr(f"{command}: step {step} could not be taken in {run_dir}\n")
            return code
    elif not (run_dir / DUMPS).is_dir():
        remedy = f"Leave step= out, and one more step is taken. {way_to_a_dump(run_dir)}"
        return report([Problem(key="step", rule="must have a dump", value=step, remedy=remedy)], command=command)
    try:
        dump = open_dump(run_dir, int(step))
    except DumpError as error:
        return report([str(error)], command=command)
    config = resolve((dump.path / CONFIG).resolve(), (), own_dir=None, multirun=False).runs[0].config
    if config is None:
        return report([f"{dump.path / CONFIG} is no config of this version"], command=command)
    from trainer.diagnose.sources import WeightsGoneError, step_of_run
    from trainer.rundir.checkpoint import CheckpointError
    from trainer.rundir.run_dir import StartError

    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.out, prefix=".weights-") as scratch:
        try:
            found = step_of_run(dump, config, arguments.source, Path(scratch))
        except StartError as error:
            return report(list(error.problems), command=command)
        except (WeightsGoneError, CheckpointError) as error:
            return report([str(error)], command=command)
        return _written(arguments, lambda: _diagnosed(arguments, found.bundle, found.models))


def one_more(run_dir: Path) -> Path:
    """A new directory for the step that is taken, beside the run: no run may lie in another."""
    place = run_dir.resolve()
    names = (f"{place.name}-diagnosis{f'-{number}' if number > 1 else ''}" for number in itertools.count(1))
    return next(free for name in names if not (free := place.with_name(name)).exists())


def _one_more_step(run_dir: Path, directory: Path) -> tuple[str, int]:
    """Take a step in `directory` from the newest checkpoint of the run, or its first -> (its number, exit code)."""
    from trainer.cli.train import run_train

    checkpoints = sealed_steps(run_dir / CHECKPOINTS)
    last = max(checkpoints, default=0)
    start = checkpoints[last].resolve() if checkpoints else "null"
    to_stderr(f"{NAME}: taking step {last + 1} in {directory} ...\n")
    code = run_train(
        [
            str((run_dir / CONFIG_FILE).resolve()), f"run.resume_from={start}", f"run.dir={directory}",
            f"run.num_steps={last + 1}", "run.resume=never", "dump.every=1", "eval.every=0", "checkpoint.every=0",
            "tracking.wandb=disabled",
        ]
    )  # fmt: skip
    return str(last + 1), code


def _diagnosed(arguments: Arguments, bundle: Bundle, models: Sequence[Path]) -> Diagnosis:
    from trainer.diagnose.diagnosis import diagnose
    from trainer.diagnose.evidence import evidence_of
    from trainer.diagnose.logprob_scorer import LogprobScorer
    from trainer.diagnose.sources import settings_of
    from trainer.diagnose.without_model import diagnose_numbers

    evidence = evidence_of(bundle, max_tokens=arguments.tokens)
    if not models or not evidence.can_be_read:
        return diagnose_numbers(evidence)
    scorer = LogprobScorer(models, evidence, device=arguments.device)
    settings = settings_of(bundle.metadata, arguments.given)
    return diagnose(scorer, settings, progress=lambda text: to_stderr(f"{NAME}: {text}\n"))


def _written(arguments: Arguments, make: Callable[[], Diagnosis]) -> int:
    """Make the diagnosis, print it and write its files."""
    from trainer.cli.job import failed
    from trainer.diagnose.logprob_scorer import OtherWeightsError
    from trainer.diagnose.results import facts, part_rows, write_diagnosis
    from trainer.replay.bundle import BundleError
    from trainer.report.page import write_report

    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        diagnosis = make()
        arguments.out.mkdir(parents=True, exist_ok=True)
        result, page = write_diagnosis(
            diagnosis, arguments.out, title=f"diagnosis of {arguments.source.resolve().name}"
        )
    except (OtherWeightsError, BundleError) as error:
        return report([str(error)], command=f"{NAME} {arguments.source}")
    except Exception as error:
        return failed(error, arguments.out, command=NAME)
    if (arguments.source / CONFIG_FILE).is_file() and arguments.out == arguments.source / OUTPUT:
        write_report(arguments.source)  # which shows the answer too
    lines = "\n".join(facts(diagnosis))
    to_stdout(f"{lines}\n\n{rows_text(part_rows(diagnosis), num_words=4)}\n{result}\n{page}\n")
    return DONE
