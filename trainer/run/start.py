"""Problems of starting correctly configured runs on this machine: a directory in use, a missing package."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from algorithms.config import Problem
from rollout.config import SGLANG_REMEDY, SGLangConfig
from trainer.compose.compose import Resolution
from trainer.config.outputs import WANDB_RUN_ID
from trainer.config.training import Resume
from trainer.rundir.run_dir import is_run, steps_taken, unusable_problem
from trainer.rundir.sealed import SealError
from trainer.rundir.time_limit import job_problems

TENSORBOARD_PACKAGE = "tensorboardX"


def start_problems(resolution: Resolution) -> list[Problem]:
    """Problems that prevent the start of the runs: a directory in use, a deadline, a package that is not installed."""
    problems = [*_directory_problems(resolution), *job_problems(), *shared_id_problems(len(resolution.runs))]
    if SGLangConfig in [run.engine for run in resolution.runs] and importlib.util.find_spec("sglang") is None:
        remedy = f"{SGLANG_REMEDY}."
        problems.append(
            Problem(key="rollout", rule="must be an engine that is installed", value="sglang", remedy=remedy)
        )
    if any(run.config is not None and run.config.tracking.tensorboard for run in resolution.runs):
        problems += [problem for problem in [missing_tensorboard()] if problem is not None]
    return problems


def shared_id_problems(num_runs: int) -> list[Problem]:
    """The Problem of several runs that would all be one W&B run; none if the environment names no id."""
    value = os.environ.get(WANDB_RUN_ID)
    if num_runs < 2 or not value:
        return []
    rule = f"must not be set for {num_runs} runs: each would overwrite the one before in W&B"
    return [Problem(key=f"${WANDB_RUN_ID}", rule=rule, value=value, remedy="Unset it.")]


def missing_tensorboard() -> Problem | None:
    """The Problem of TensorBoard without its package; None if the package is installed."""
    if importlib.util.find_spec(TENSORBOARD_PACKAGE) is not None:
        return None
    return Problem(
        key="tracking.tensorboard",
        rule=f"must be false without the package {TENSORBOARD_PACKAGE}",
        value=True,
        remedy='pip install ".[tensorboard]" in the checkout.',
    )


def _directory_problems(resolution: Resolution) -> list[Problem]:
    """Problems of the directory to which the runs write."""
    directory = resolution.runs[0].output_dir if resolution.runs else None
    key = "hydra.sweep.dir" if resolution.multirun else "run.dir"
    if directory is not None and (unusable := unusable_problem(key, directory)) is not None:
        return [unusable]
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
    remedy = f"Leave {key} out for a new directory named after the time, or name another."
    if ours:
        remedy = f"resume=auto goes on with the run in it, resume=clean moves it aside and begins. {remedy}"
    return [Problem(key=key, rule="must be absent or empty", value=str(directory), remedy=remedy)]


def _too_few_steps(resolution: Resolution, directory: Path) -> list[Problem]:
    """The Problem of every run that would continue with fewer steps than it has taken."""
    try:
        taken = steps_taken(directory)
    except (OSError, SealError) as error:
        return [Problem(key="run.dir", rule=f"must hold a run that can be read ({error})", value=str(directory))]
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
