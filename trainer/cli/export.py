"""`parity export <run.dir> <directory>`: a checkpoint of a run -> a Hugging Face model. Called by `commands.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from algorithms.config import NOT_SET, Problem
from algorithms.config.home import from_home
from trainer.cli.parsers import ADAPTER, BEST, PARSERS
from trainer.compose.compose import resolve
from trainer.config.outputs import CHECKPOINTS
from trainer.config.train import TrainConfig
from trainer.ending.exit_codes import DONE, FAILED, refuse, report
from trainer.rundir.checkpoint import CheckpointError, checkpoint_at, chosen_checkpoint
from trainer.rundir.resume import lora_of
from trainer.rundir.run_dir import CONFIG_FILE, StartError, runs_inside, unusable_problem
from trainer.text.plain import to_stderr, to_stdout

NAME = "parity export"
EXPORTED = ("run", "model", "sampling", "policy", "checkpoint", "eval")
NOT_EXPORTED = (*(spec.name for spec in fields(TrainConfig) if spec.name not in EXPORTED), "eval.sets")
"""Sections that an export does not read: their files may be gone, or lie beside another directory."""


def run_export(words: Sequence[str]) -> int:
    """Run `parity export <words>`; return the exit code."""
    parsed, problems = PARSERS["export"].read(words)
    moved = [word for word in parsed.words if word.startswith("model.")]
    places = [word for word in parsed.words if word not in moved]
    if len(places) != 2:
        rule, shown = "takes a run directory and a new directory", " ".join(places)
        problems.append(Problem(key=NAME, rule=rule, value=shown or NOT_SET))
    if problems:
        return report(problems, command=NAME)
    given = Path(from_home(places[0], key="run.dir"))
    directory = Path(from_home(places[1], key="directory"))
    is_step = given.absolute().parent.name == CHECKPOINTS
    run_dir = given.absolute().parents[1] if is_step else given
    recipe = run_dir / CONFIG_FILE
    if not recipe.is_file() or not given.is_dir():
        saved = ", ".join(sorted(path.name for path in (run_dir / CHECKPOINTS).glob("step_*")))
        remedy = f"Checkpoints of the run: {saved}." if saved else runs_inside(given)
        rule = "must be the directory of a run, with its config.yaml, or a checkpoint of one"
        return refuse(NAME, "run.dir", rule, str(given), remedy)
    if is_step and parsed.best:
        return refuse(NAME, BEST, "needs a run directory", str(given), "Leave it out.")
    resolution = resolve(recipe.resolve(), moved, own_dir=None, multirun=False, unneeded=NOT_EXPORTED)
    config = resolution.runs[0].config
    if config is None:
        return report(resolution.problems, command=NAME)
    if directory.exists():
        return refuse(NAME, "directory", "must not exist", str(directory), "Name another one, or remove it.")
    if (unusable := unusable_problem("directory", directory)) is not None:
        return report([unusable], command=NAME)
    try:
        checkpoint = checkpoint_at(given) if is_step else chosen_checkpoint(config, run_dir, best=parsed.best)
    except CheckpointError as error:
        return report([str(error)], command=NAME)
    if parsed.adapter and not lora_of(checkpoint.state.config).rank:
        remedy = "Leave it out: the whole model is written."
        return refuse(NAME, ADAPTER, "needs a run with policy.lora.rank above 0", str(given), remedy)
    # Imported late, because this line imports torch and transformers.
    from rollout.data.tokenizer import auto_tokenizer_note
    from trainer.models.config_files import release_4_note
    from trainer.models.export import write_adapter, write_model

    try:
        (write_adapter if parsed.adapter else write_model)(config, checkpoint, directory)
    except StartError as error:
        return report(list(error.problems), command=NAME)
    except CheckpointError as error:  # of files that agree with their manifest and still are no weights
        to_stderr(f"{NAME}: {error}\n")
        return FAILED
    what = "the adapter of the policy" if parsed.adapter else "the policy"
    to_stdout(f"{directory}: {what} after step {checkpoint.state.step}\n")
    notes = [auto_tokenizer_note(directory), "" if parsed.adapter else release_4_note(directory)]
    to_stderr("".join(f"note: {note}\n" for note in notes if note))
    return DONE
