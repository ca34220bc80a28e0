"""`parity diagnose <bundle> [model=DIR]`, or `parity diagnose <run.dir> [step=N]`: why engine and trainer disagree.

Without step= the dumped steps of a run are judged together. A run with none whose weights are known takes one more step
from its newest checkpoint, in a directory of its own.
All problems of the words are reported together before torch is loaded. Called by `commands.py`.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from algorithms.config import NOT_SET, Problem
from algorithms.config.home import from_home
from rollout.config import DType, Quantization
from trainer.cli.step_source import StepWords, read_words, show, with_config
from trainer.cli.tables import rows_text
from trainer.compose.overrides import override_words
from trainer.config.outputs import CHECKPOINTS, DUMPS
from trainer.ending.exit_codes import DONE, report
from trainer.rundir.checkpoint import known_versions
from trainer.rundir.dump import Dump, DumpError, dumped_steps, open_dump, way_to_a_dump
from trainer.rundir.run_dir import CONFIG_FILE
from trainer.rundir.sealed_directory import sealed_steps
from trainer.text.plain import to_stderr

NAME = "parity diagnose"
MOST_STEPS = 4
"""Dumped steps that are judged together: the weights of each are in memory."""
OUTPUT = "diagnosis"
"""Directory in run.dir for the results, unless out= names another one."""
MODEL_FILE = "config.json"
MAX_TOKENS = 1024
"""Response tokens that are judged; each is scored a few hundred times."""
OF_RUN = ("step", "tokens", "device", "out")
CHOICES = {
    "trainer_dtype": tuple(each.value for each in DType),
    "rollout_dtype": tuple(each.value for each in DType),
    "quantization": tuple(each.value for each in Quantization),
}
OF_BUNDLE = ("model", "older", "temperature", *CHOICES, "tokens", "device", "out")


def run_diagnose(words: Sequence[str]) -> int:
    """Run `parity diagnose <words>`; return the exit code."""
    found = read_words(words, command="diagnose", of_run=OF_RUN, of_file=OF_BUNDLE)
    source, given, problems = found.source, found.given, found.problems
    if source is not None and found.is_run and "step" in given and not (source / DUMPS).is_dir():
        remedy = f"Leave step= out, and one more step is taken. {way_to_a_dump(source)}"
        problems.append(Problem(key="step", rule="must have a dump", value=given["step"], remedy=remedy))
    for key, choices in CHOICES.items():
        if key in given and given[key] not in choices:
            problems.append(Problem(key=key, rule=f"must be one of {', '.join(choices)}", value=given[key]))
    if "temperature" in given and not _is_positive(given["temperature"]):
        problems.append(Problem(key="temperature", rule="must be a number > 0", value=given["temperature"]))
    if "device" in given and not re.fullmatch(r"cpu|cuda(:\d+)?", given["device"]):
        problems.append(Problem(key="device", rule="must be cpu, cuda or cuda:<number>", value=given["device"]))
    models = _models(given, problems)
    if source is None or problems or not (out := found.out(source, OUTPUT)):
        return report(problems, command=NAME)
    run_dir, step = source, found.step
    dumps = _judged(source) if found.is_run and step is None else []
    if found.is_run and step is None and not dumps:
        run_dir = one_more(source)
        step, code = _one_more_step(source, run_dir)
        if code != DONE:
            to_stderr(f"{NAME} {source}: step {step} could not be taken in {run_dir}\n")
            return code

    def opened() -> list[Dump]:
        return dumps if step is None else [open_dump(run_dir, step)]

    return show(lambda: _diagnosed(found, opened, models, out), out, command=f"{NAME} {source}")


def _judged(run_dir: Path) -> list[Dump]:
    """The dumps of the newest steps whose weights are known; a dump that is damaged is named and left out."""
    versions, found = known_versions(run_dir), list[Dump]()
    for step in reversed(dumped_steps(run_dir)):
        try:
            dump = open_dump(run_dir, step)
        except DumpError as error:
            to_stderr(f"{NAME}: {error}\n")
            continue
        if dump.description.policy_version in versions:
            found.append(dump)
        if len(found) == MOST_STEPS:
            break
    return found[::-1]


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


def one_more(run_dir: Path) -> Path:
    """A new directory for the step that is taken, beside the run: no run may lie in another."""
    place = run_dir.resolve()
    names = (f"{place.name}-diagnosis{f'-{number}' if number > 1 else ''}" for number in itertools.count(1))
    return next(free for name in names if not (free := place.with_name(name)).exists())


def _one_more_step(run_dir: Path, directory: Path) -> tuple[int, int]:
    """Take a step in `directory` from the newest checkpoint of the run, or its first -> (its number, exit code)."""
    from trainer.cli.train import run_train

    checkpoints = sealed_steps(run_dir / CHECKPOINTS)
    last = max(checkpoints, default=0)
    places = {"run.resume_from": checkpoints[last].resolve() if checkpoints else None, "run.dir": directory}
    to_stderr(f"{NAME}: taking step {last + 1} in {directory} ...\n")
    code = run_train(
        [
            str((run_dir / CONFIG_FILE).resolve()), *override_words(places),
            f"run.num_steps={last + 1}", "run.resume=never", "dump.every=1", "eval.every=0", "checkpoint.every=0",
            "tracking.wandb=disabled",
        ]
    )  # fmt: skip
    return last + 1, code


def _diagnosed(
    found: StepWords, opened: Callable[[], list[Dump]], models: Sequence[Path], out: Path
) -> tuple[str, list[Path]]:
    """Judge the steps that `opened` gives of a run, or a bundle, and write the answer -> (its text, the files)."""
    # Imported late, because these lines import torch.
    from trainer.diagnose.diagnosis import diagnose
    from trainer.diagnose.evidence import evidence_of, pooled
    from trainer.diagnose.logprob_scorer import LogprobScorer
    from trainer.diagnose.results import facts, part_rows, write_diagnosis
    from trainer.diagnose.sources import settings_of, steps_of_run
    from trainer.diagnose.without_model import diagnose_numbers
    from trainer.models.resolve import hide_bars
    from trainer.replay.bundle import routes_note
    from trainer.replay.peers.recognise import read_any
    from trainer.report.page import write_report

    assert found.source is not None
    logging.getLogger("transformers").setLevel(logging.ERROR)
    hide_bars()
    if found.is_run:
        out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out if found.is_run else None, prefix=".weights-") as scratch:
        if found.is_run:
            of_run = steps_of_run([with_config(dump) for dump in opened()], known_versions(found.source), Path(scratch))
            bundles, weights = [each.bundle for each in of_run], [each.models for each in of_run]
        else:
            bundles, weights = [read_any(found.source, step=found.step)], [list(models)]
        if (note := routes_note(bundles[-1])) is not None:  # also where the rest is refused, perhaps because of it
            to_stderr(f"{NAME}: {note}\n")
        tokens = int(found.given.get("tokens", MAX_TOKENS))
        evidence = pooled([evidence_of(each, max_tokens=-(-tokens // len(bundles))) for each in bundles])
        if not weights[0] or not evidence.can_be_read:
            diagnosis = diagnose_numbers(evidence)
        else:
            scorer = LogprobScorer(weights, evidence, device=found.given.get("device", "cpu"))
            settings = settings_of(bundles[-1].metadata, found.given)
            diagnosis = diagnose(scorer, settings, progress=lambda text: to_stderr(f"{NAME}: {text}\n"))
        if found.is_run:
            judged = ", ".join(str(each.number) for each in of_run)
            diagnosis = replace(diagnosis, notes=(*diagnosis.notes, f"judged, as one: step {judged}"))
        if note is not None:
            diagnosis = replace(diagnosis, notes=(*diagnosis.notes, note))
    files = write_diagnosis(diagnosis, out, title=f"diagnosis of {found.source.resolve().name}")
    if found.is_run and out == found.source / OUTPUT:
        write_report(found.source)  # which shows the answer too
    lines = "\n".join(facts(diagnosis))
    return f"{lines}\n\n{rows_text(part_rows(diagnosis), num_words=4)}\n", files
