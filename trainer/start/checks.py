"""Problems of starting correctly configured runs on this machine, the same for `--dry-run` and for the run.

A directory in use, a missing package, a model, data or a reward function that cannot be used, too small a machine.
Imports no torch, no Ray and no transformers.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from algorithms.config import ConfigError, Problem
from algorithms.config.home import from_home
from rollout.processes.child_process import ENVIRONMENT_NAMES, named_secrets
from rollout.processes.gpu_host import rank_lacks, torch_lacks
from rollout.user_code.custom_code import is_custom
from trainer.compose.compose import Resolution
from trainer.config.outputs import WANDB_RUN_ID, WandbMode
from trainer.config.train import TrainConfig
from trainer.config.training import Resume
from trainer.ending.time_limit import job_problems
from trainer.limits.machine import this_machine
from trainer.limits.memory_plan import gpu_bytes, memory_plan
from trainer.rundir.checkpoint import newest_state
from trainer.rundir.resume import begins, other_run, source_problems
from trainer.rundir.run_dir import ENVIRONMENT_FILE, is_run, lock_holder, steps_taken, unusable_problem
from trainer.rundir.sealed_directory import SealError
from trainer.start.task_check import missing_model_problems, task_problems
from trainer.text.plain import command_line

WANDB_MODE = "WANDB_MODE"
WANDB_MODES = ("online", "offline", "disabled", "dryrun", "run", "shared")
"""Values that the library wandb takes for it."""
TENSORBOARD_PACKAGE = "tensorboardX"


def start_problems(resolution: Resolution, *, trains: bool = True) -> list[Problem]:
    """Everything that would end the runs and shows without an engine, each problem once.

    An evaluation, which does not train, has no ranks and may take another model than that of the config.
    """
    configs = [run.config for run in resolution.runs if run.config is not None]
    of_tasks = task_problems(configs, trains=trains)  # first: it fetches config.json of a model of the hub
    problems = _directory_problems(resolution, trains=trains)
    problems += [*job_problems(), *shared_id_problems(len(resolution.runs))]
    engines = {run.engine for run in resolution.runs if run.engine is not None}
    problems += [problem for engine in engines if (problem := engine.missing_package()) is not None]
    problems += [*variable_problems(configs), *tensorboard_problems(configs)]
    found = [problem for config in configs for problem in gpu_host_problems(config, trains=trains)]
    found += [problem for config in configs if trains and begins(config) for problem in source_problems(config)]
    problems += {str(problem): problem for problem in found}.values()
    if trains:
        broken = [run.model for run in resolution.runs if run.config is None and run.model is not None]
        problems += {str(problem): problem for problem in missing_model_problems(broken)}.values()
    return [*problems, *of_tasks]


def gpu_host_problems(config: TrainConfig, *, trains: bool) -> Iterator[Problem]:
    """Yield what ranks and engines on GPUs of this machine lack: packages, compilers, CUDA; what both lack, once.

    Without a GPU here another rule refuses the run; what a cluster's machines have is not known here, and every rank
    and every engine looks by itself.
    """
    policy, rollout = config.policy, config.rollout
    if config.cluster.address is not None or not this_machine().gpus:
        return
    lacks = {lack: "policy.gpus_per_worker" for lack in (rank_lacks() if trains and policy.gpus_per_worker else ())}
    if rollout.gpus_per_engine:
        sleeps = trains and memory_plan(config, device_bytes=gpu_bytes()).takes_turns
        of_engine = [*torch_lacks(), *rollout.gpu_lacks(sleeps=sleeps)]
        lacks = dict.fromkeys(of_engine, "rollout.gpus_per_engine") | lacks
    for lack, key in lacks.items():
        yield config.broken(key, f"must be 0 on this host: {lack.what}", lack.remedy)


def shared_id_problems(num_runs: int) -> list[Problem]:
    """The Problem of several runs that would all be one W&B run; none if the environment names no id."""
    value = os.environ.get(WANDB_RUN_ID)
    if num_runs < 2 or not value:
        return []
    rule = f"must not be set for {num_runs} runs: each would overwrite the one before in W&B"
    return [Problem(key=f"${WANDB_RUN_ID}", rule=rule, value=value, remedy="Unset it.")]


def variable_problems(configs: Sequence[TrainConfig]) -> Iterator[Problem]:
    """Yield the problems of what the environment names, modes, files, directories, variables, each if a run uses it."""
    unset = ", ".join(name for name in named_secrets() if name not in os.environ)
    functions = [function for config in configs for function in (config.reward.function, config.episode.function)]
    if unset and any(function and is_custom(function) for function in functions):
        remedy = f"Set {unset}, with export, or leave it out."
        rule, given = f"must name variables that are set, and not {unset}", os.environ[ENVIRONMENT_NAMES]
        yield Problem(key=f"${ENVIRONMENT_NAMES}", rule=rule, value=given, remedy=remedy)
    wandb = any(config.tracking.wandb is not WandbMode.disabled for config in configs)
    if wandb and (mode := os.environ.get(WANDB_MODE)) and mode not in WANDB_MODES:
        rule, remedy = (
            f"must be one of {', '.join(WANDB_MODES)}",
            f"Unset it, or {WANDB_MODE}={WandbMode.offline.name}.",
        )
        yield Problem(key=f"${WANDB_MODE}", rule=rule, value=mode, remedy=remedy)
    own_ray = any(config.cluster.address is None for config in configs)
    for name, is_used in (("RAY_TMPDIR", own_ray), ("WANDB_DIR", wandb), ("NETRC", wandb)):
        if not (value := os.environ.get(name)) or not is_used:
            continue
        try:
            path = Path(from_home(value, key=f"${name}"))
        except ConfigError as error:
            yield from error.problems
            continue
        if name == "RAY_TMPDIR" and (unusable := unusable_problem(f"${name}", path)) is not None:
            yield unusable


def tensorboard_problems(configs: Sequence[TrainConfig]) -> Iterator[Problem]:
    """Yield the Problem of TensorBoard without its package."""
    if any(config.tracking.tensorboard for config in configs) and not importlib.util.find_spec(TENSORBOARD_PACKAGE):
        rule, remedy = f"must be false without the package {TENSORBOARD_PACKAGE}", 'pip install -e ".[tensorboard]"'
        yield Problem(key="tracking.tensorboard", rule=rule, value=True, remedy=f"{remedy} in the checkout.")


def _directory_problems(resolution: Resolution, *, trains: bool) -> list[Problem]:
    """Problems of the directory to which the runs write; only a run that trains goes on with one that is there."""
    directory = resolution.runs[0].output_dir if resolution.runs else None
    key = "hydra.sweep.dir" if resolution.multirun else "run.dir"
    if directory is not None and (unusable := unusable_problem(key, directory)) is not None:
        return [unusable]
    if directory is not None and (holder := lock_holder(directory)) is not None:
        remedy = f"Wait for that process, end it with kill {holder}, or use another {key}."
        return [Problem(key=key, rule=f"is in use by process {holder}", value=str(directory), remedy=remedy)]
    parents = directory.parents if trains and directory is not None else ()
    above = [each for each in parents if (each / ENVIRONMENT_FILE).is_file() and is_run(each)]
    if above:
        remedy = f"Name a directory beside it, or leave {key} out."
        return [Problem(key=key, rule=f"must not lie in {above[0]}, a run", value=str(directory), remedy=remedy)]
    configs = [run.config for run in resolution.runs if run.config is not None and trains]
    resumes = {config.run.resume for config in configs} - {Resume.never}
    if resumes and resolution.multirun:
        remedy = "Resume its runs one by one with run.dir=..."
        rule, value = "must be never in a sweep, whose runs are new", min(resume.name for resume in resumes)
        return [Problem(key="run.resume", rule=rule, value=value, remedy=remedy)]
    if directory is None or not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return []
    ours = trains and directory.is_dir() and is_run(directory)
    if ours and any(run.config is None for run in resolution.runs):
        return []  # whether the run resumes is not known before its other problems are solved
    if resumes and ours:
        return _not_to_be_continued(resolution, directory)
    if resumes:
        remedy = "Name the directory of the run with run.dir=..."
        rule = "finds no run of Parity in run.dir, which is not empty"
        return [Problem(key="run.resume", rule=rule, value=str(directory), remedy=remedy)]
    remedy = f"Leave {key} out for a new directory named after the time, or name another."
    if ours:
        remedy = f"resume=auto goes on with the run in it, resume=clean moves it aside and begins. {remedy}"
    return [Problem(key=key, rule="must be absent or empty", value=str(directory), remedy=remedy)]


def _not_to_be_continued(resolution: Resolution, directory: Path) -> list[Problem]:
    """Problems of a run that would continue as another run, or with fewer steps than it has taken."""
    try:
        taken, newest = steps_taken(directory), newest_state(directory)
    except (OSError, SealError) as error:
        remedy = "Restore what is damaged, or begin again with parity train <recipe> run.resume=clean."
        rule = f"must hold a run that can be read ({error})"
        return [Problem(key="run.dir", rule=rule, value=str(directory), remedy=remedy)]
    problems = []
    for run in resolution.runs:
        if run.config is None or run.config.run.resume is not Resume.auto:
            continue
        if run.config.run.num_steps < taken:
            rule = f"must be >= the {taken} steps that the run in {directory} has taken"
            remedy = f"{command_line('parity', 'resume', directory)} goes on with the settings that the run had."
            problems.append(run.config.broken("run.num_steps", rule, remedy))
        if newest is not None:
            problems += other_run(newest[0], newest[1], run.config)
    return problems
