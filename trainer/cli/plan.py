"""TrainConfig -> the plan that `parity train <recipe> --dry-run` prints: work, cost and resources of a run.

The plan depends on the configuration and this machine only: no torch, no Ray, no network; nothing is loaded or written.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path

from algorithms.config.rules import as_yaml
from algorithms.objective import objective, reference_term
from rollout.config import Quantization
from rollout.user_code.custom_class import own_choices
from trainer.cli.job import resume_command
from trainer.cli.tables import labelled
from trainer.compose.compose import Resolution
from trainer.config.guard import MismatchGuardConfig, WatchConfig
from trainer.config.train import TrainConfig
from trainer.config.training import Resume
from trainer.limits.adapter_shape import adapter_parameters, linear_shapes
from trainer.limits.elsewhere import elsewhere_lines
from trainer.limits.estimate import batch_shape, critic_shape, dump_bytes, model_shape
from trainer.limits.gpus import Gpus
from trainer.limits.machine import CPUS_PER_WORKER, Machine, this_machine
from trainer.limits.memory_plan import gpu_bytes, memory_plan
from trainer.limits.model_shape import ModelShape, UnknownShapeError
from trainer.rundir.resume import begins, saved_state
from trainer.rundir.run_dir import how_to_go_on, needs_no_step, newest_saved_step, steps_taken
from trainer.text.plain import counted, size
from trainer.tracking.wandb_run import default_name, wandb_run

STATE_BYTES = 12
"""Bytes per trained parameter in a checkpoint: float32 weight and two moments."""


def render_plans(resolution: Resolution, *, data: Sequence[str], gpus: Gpus | None = None) -> str:
    """The plans of all runs of a resolution without problems, as text that ends in a line break.

    `data`: lines about the rows that were read. `gpus`: those of the runs, if they are elsewhere.
    """
    machine = gpus or this_machine()
    plans = []
    for index, run in enumerate(resolution.runs):
        assert run.config is not None
        title = f"run {index + 1} of {len(resolution.runs)}: {' '.join(run.overrides)}\n" if resolution.multirun else ""
        plans.append(f"{title}{render_plan(run.config, machine=machine, output_dir=resolution.run_dir(index))}\n")
    if data:
        plans.append(labelled(("data", line) for line in data) + "\n")
    return "\n".join(plans) if resolution.multirun else "".join(plans)


def render_plan(config: TrainConfig, *, machine: Machine | Gpus, output_dir: Path) -> str:
    """The plan as text, one labelled line per fact."""
    return labelled(_facts(config, machine, output_dir))


def _facts(config: TrainConfig, machine: Machine | Gpus, output_dir: Path) -> Iterator[tuple[str, str]]:
    yield "recipe", f"{config.run.recipe}, seed {config.run.seed}"
    if config.run.resume is not Resume.never:
        yield "resume", _resume(config, output_dir)
    if config.run.resume_from is not None and begins(config) and saved_state(config) is not None:
        yield "begins", f"after the last step of {config.run.resume_from}, with its weights and optimizer"
    yield "model", _model(config)
    for line in _batch(config):
        yield "batch", line
    yield "reward", config.reward.function
    yield "objective", objective(config.correction, config.loss) + reference_term(config.reference)
    for choice in own_choices(config):
        keys = ", ".join(f"{spec.name}={as_yaml(getattr(choice, spec.name))}" for spec in fields(choice))
        yield "yours", f"{choice.source}{f' with {keys}' if keys else ''}"
    for note in config.notes():
        yield "note", note
    if config.has_critic:
        yield "critic", _critic(config)
    yield "forwards", forwards(config)
    gpus = machine if isinstance(machine, Gpus) else None
    memory = memory_plan(config, device_bytes=gpus.memory if gpus else gpu_bytes())
    memory = replace(memory, is_here=gpus is None)
    for line in memory.lines():
        yield "memory", line
    if gpus is not None:
        yield from elsewhere_lines(memory, gpus)
    yield "schedule", _schedule(config)
    yield "engines", _engines(config)
    for line in _placement(config, machine):
        yield "placement", line
    if isinstance(config.guard, WatchConfig):
        watched = "K3, ESS and k-hat" if isinstance(config.guard, MismatchGuardConfig) else as_yaml(config.guard)
        yield "guard", f"watches {watched}; goes as far as {config.guard.highest.name}"
    yield "evaluation", _evaluation(config)
    yield "checkpoints", _checkpoints(config)
    if memory.shape is not None:
        yield "disk", _disk(config, memory.shape, None if gpus else output_dir)
    if config.dump.every:
        yield "dumps", _dumps(config)
    yield (
        "files",
        f"{output_dir}: metrics.jsonl, samples.jsonl, evaluations.jsonl, histograms.jsonl, report, logs, config.yaml",
    )
    yield "tracking", _tracking(config, output_dir)


def _disk(config: TrainConfig, shape: ModelShape, run_dir: Path | None) -> str:
    """Bytes that a run writes, and what the disk of `run_dir` has free; None of a disk that is elsewhere."""
    checkpoint, critic, lora = config.checkpoint, critic_shape(config), config.policy.lora
    trained = adapter_parameters(linear_shapes(config), lora) if lora.rank else shape.num_parameters
    each = STATE_BYTES * (trained + (critic.num_parameters if critic else 0))
    # One is written while the others stay.
    most = checkpoint.keep + (checkpoint.best_metric is not None) + 1 if checkpoint.every else 0
    needed = most * each + (config.dump.keep * dump_bytes(config) if config.dump.every else 0)
    checkpoints = f"{most} checkpoints of {size(each)}" if most else "no checkpoint (checkpoint.every=0)"
    grows = f"run.dir grows to {size(needed)}, with {checkpoints}" if needed else f"run.dir has {checkpoints}"
    if run_dir is None or not needed:
        return grows
    for place in (run_dir.absolute(), *run_dir.absolute().parents):
        with suppress(OSError):  # it is not there yet, or can never be: its rule says so
            free = shutil.disk_usage(place).free
            return f"{grows}; its disk has {size(free)} free: {'TOO LITTLE' if needed > free else 'enough'}"
    return grows


def _tracking(config: TrainConfig, run_dir: Path) -> str:
    """Mode of W&B, and the place and name of the run there."""
    run = wandb_run(config.tracking, run_dir, name=default_name(config.run.recipe, run_dir))
    board = ", and TensorBoard" if config.tracking.tensorboard else ""
    group = f", group {run.group}" if run.group else ""
    return f"W&B {config.tracking.wandb.name}, project {run.project}, name {run.name}{group}{board}"


def _schedule(config: TrainConfig) -> str:
    """When the engines sample, and how old a sample may be."""
    lag = config.max_staleness
    older = f", or of up to {counted(lag, 'step')} before" if lag else ""
    return f"{config.schedule.kind}: a step trains on samples of its own weights{older}"


def _engines(config: TrainConfig) -> str:
    """Kind and number format of the engines."""
    rollout = config.rollout
    grid = rollout.quantization
    quantised = "" if grid is Quantization.none else f", weights quantised to {grid.name} at every sync"
    exact = ", the bits of the trainer" if rollout.exact else ""
    limits = ", ".join(f"{name}={getattr(config.sampling, name):g}" for name in ("top_p", "top_k", "min_p"))
    truncated = f", truncated sampling ({limits})" if config.sampling.is_truncated else ""
    return f"{rollout.kind}, {rollout.dtype.name}{quantised}{exact}{truncated}"


def _resume(config: TrainConfig, run_dir: Path) -> str:
    """Describe the treatment of an earlier run in the directory."""
    saved = newest_saved_step(run_dir)
    if not run_dir.is_dir() or not any(run_dir.iterdir()):
        return "there is no earlier run: it begins"
    last, taken = config.run.num_steps, steps_taken(run_dir)
    if config.run.resume is Resume.auto and taken > last:
        return f"refused: {run_dir} has taken {counted(taken, 'step')}, more than run.num_steps={last}"
    if config.run.resume is Resume.auto and needs_no_step(run_dir, saved=saved, num_steps=last):
        more = how_to_go_on(resume_command(run_dir), saved=saved)
        return f"{run_dir} has taken all {counted(last, 'step')}: nothing is started; {more}"
    if config.run.resume is Resume.clean or saved is None:
        reason = "" if config.run.resume is Resume.clean else ", because it saved no checkpoint to go on from"
        return f"the earlier run in {run_dir} is moved aside{reason}: it begins"
    return f"goes on in {run_dir} after step {saved} of {last}, if its newest checkpoint is good"


def forwards(config: TrainConfig) -> str:
    """Cost of training per token, with the reason for or against a separate forward for pi_old."""
    batch = config.batch
    passes, steps = batch.passes, batch.optimizer_steps_per_rollout
    if config.needs_prepass:
        reason = "and 1 for pi_old, on which the advantages depend before the first optimizer step"
    elif config.needs_old_logprobs_pass:
        reason = f"and 1 for pi_old, because one rollout serves {steps} optimizer steps"
    elif not config.correction.needs_old_logprobs:
        reason = "none for pi_old: the correction does without it"
    else:
        reason = "none for pi_old: with one mini-batch per rollout the first training forward is pi_old"
    reference = ", and 1 for the reference" if config.has_reference else ""
    values = f"1 for the values, {3 * passes} to train it"
    critic = f", and {1 + 3 * passes} for the critic: {values}" if config.has_critic else ""
    each = "" if passes == 1 else f" in each of {passes} passes"
    total = config.forwards_per_token
    return f"{total} forward equivalents per token: 1 forward, 2 for its backward{each}, {reason}{reference}{critic}"


def _critic(config: TrainConfig) -> str:
    """Initial model and learning settings of the critic."""
    critic, advantage = config.critic, config.advantage
    clip = "no value clip" if critic.value_clip is None else f"value clip {critic.value_clip:g}"
    alone = critic.warmup_rollout_steps
    first = f"; the first {counted(alone, 'step')} without the policy" if alone else ""
    return (
        f"starts from {critic.path or 'the model of the policy'}, lr {critic.lr:g}, {clip}; GAE with gamma "
        f"{advantage.gamma:g}, lambda {advantage.gae_lambda:g}, whitened{first}"
    )


def _checkpoints(config: TrainConfig) -> str:
    every = config.checkpoint.every
    if not every:
        return "none: a run that dies is lost (checkpoint.every saves)"
    best = f" and the best by {config.checkpoint.best_metric}" if config.checkpoint.best_metric else ""
    how = "written in the background" if config.checkpoint.asynchronous else "the step waits for the disk"
    return f"every {counted(every, 'step')} and after the last, the newest {config.checkpoint.keep}{best} stay; {how}"


def _dumps(config: TrainConfig) -> str:
    """Frequency of dumps, and the largest size of a dump on disk."""
    return (
        f"every {counted(config.dump.every, 'step')} for parity replay, the newest {config.dump.keep} stay; "
        f"at most about {size(dump_bytes(config))} each"
    )


def _model(config: TrainConfig) -> str:
    try:
        count = f"{model_shape(config).num_parameters:,} parameters"
    except UnknownShapeError:
        count = "parameters unknown"
    return f"{config.model.description}, {count}{_adapter(config)}; data={config.data.kind}"


def _adapter(config: TrainConfig) -> str:
    """What is trained, of a LoRA run."""
    lora = config.policy.lora
    if not lora.rank:
        return ""
    try:
        count = f"{adapter_parameters(linear_shapes(config), lora):,}"
    except UnknownShapeError:
        count = "some"
    return f", frozen; LoRA of rank {lora.rank} on {lora.targets} trains {count}"


def _batch(config: TrainConfig) -> Iterator[str]:
    batch, shape = config.batch, batch_shape(config)
    steps = batch.optimizer_steps_per_rollout
    yield (
        f"{batch.prompts_per_step} prompts x {batch.group_size} samples = {batch.samples_per_step} samples per step "
        f"(collect={config.collect.kind})"
    )
    passes = f" ({batch.passes} passes)" if batch.passes > 1 else ""
    prompts = counted(batch.prompts_per_step // batch.mini_batches, "prompt")
    yield (
        f"{counted(steps, 'optimizer step')} per rollout{passes}, {prompts} = "
        f"{counted(shape.samples_per_optimizer_step, 'sample')} each; "
        f"{counted(config.run.num_steps, 'step')} = {counted(steps * config.run.num_steps, 'optimizer step')}"
    )
    yield (
        f"at the cap {shape.prompt_tokens} + {config.sampling.max_new_tokens} tokens per sample, "
        f"{shape.tokens_per_step:,} per step; {counted(shape.microbatches, 'micro-batch', 'micro-batches')} of at most "
        f"{batch.max_tokens_per_microbatch:,} tokens per rank and optimizer step"
    )


def _placement(config: TrainConfig, machine: Machine | Gpus) -> Iterator[str]:
    policy, rollout = config.policy, config.rollout
    cpus = CPUS_PER_WORKER * (policy.num_workers + rollout.num_engines * rollout.tp_size)
    of_engine = f"{rollout.gpus_per_engine:g} GPU each"
    if config.shares_gpus and rollout.tp_size > 1:
        of_engine = f"{rollout.gpu_share:g} of each of {rollout.tp_size} GPU"
    yield (
        f"{counted(policy.num_workers, 'FSDP rank')} ({policy.gpus_per_worker:g} GPU each), "
        f"{counted(rollout.num_engines, f'{rollout.kind} engine')} ({of_engine})"
    )
    needs = f"needs {cpus:g} CPU and {config.num_gpus:g} GPU"
    if isinstance(machine, Gpus):
        verdict = "enough" if config.num_gpus <= machine.number else "TOO FEW"
        yield f"{needs}; {machine.number} x {machine.name} of {size(machine.memory)} are elsewhere: {verdict}"
        return
    if config.cluster.address is not None:
        yield f"{needs} of the Ray cluster at {config.cluster.address}, which is not asked now"
        return
    fits = cpus <= machine.cpus and config.num_gpus <= machine.gpus
    verdict = "it fits" if fits else "IT DOES NOT FIT"
    yield f"{needs}; this machine has {machine.cpus} CPU, {machine.gpus} GPU, {size(machine.memory)}: {verdict}"


def _evaluation(config: TrainConfig) -> str:
    every = f", every {counted(config.eval.every, 'step')}" if config.eval.every else ""
    samples = f"{config.eval.samples} times sampled" if config.eval.samples > 1 else "sampled"
    sets = f"; also on {', '.join(config.eval.sets)}" if config.eval.sets else ""
    prompts = f"up to {most}" if (most := config.eval.max_prompts) else "all"
    return f"before the first step{every} and after the last: {prompts} held-out prompts, greedy and {samples}{sets}"
