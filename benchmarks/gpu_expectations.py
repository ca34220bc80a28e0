"""What the first runs on H100 GPUs should take, by calculation: the tables of docs/first_gpu_run.md.

    python benchmarks/gpu_expectations.py

Nothing here was measured on a GPU. Memory is that of the memory plan. FLOPs and the decode steps are those of
`trainer/limits/floors.py`, at the rates below; the traffic beside the products was counted on a CPU, kernel by kernel,
in the layers of Qwen2. Responses have all lengths from one token to twice their mean, evenly, as far as the cap allows.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gpu_check.models import QWEN_05B, QWEN_7B, QWEN_32B, Size, sparse_model

from trainer.compose.compose import resolve
from trainer.config.paths import recipe_dir
from trainer.config.train import TrainConfig
from trainer.limits.adapter_shape import adapter_parameters, linear_shapes
from trainer.limits.estimate import DTYPE_BYTES
from trainer.limits.floors import (
    GroupLengths,
    Lengths,
    Rates,
    optimizer_floor,
    prefill_floor,
    replay_decode,
    sequence_flops,
    training_flops,
)
from trainer.limits.memory_plan import MemoryPlan, memory_plan
from trainer.limits.model_shape import ModelShape, directory_shape

DEVICE_BYTES = int(79.6 * 2**30)
"""Memory of an H100 SXM that programs see."""
PRODUCTS = 690e12
"""FLOP/s of large bfloat16 products; the data sheet has 989e12. `perf/mfu` divides by such a measured rate."""
NARROW = 3584
"""Hidden size below which products reach less: 70 % at 896, in proportion between."""
READS = 3.35e12 * 0.8
"""Bytes/s of a decode step."""
TRAFFIC = 2.6e12
"""Bytes/s of elementwise kernels."""
LAYER_BYTES = (160, 342)
"""Bytes per token, layer and unit of the hidden size that a forward and a backward move beside the products."""
HEAD_BYTES = 12
"""Bytes per scored token and word of the vocabulary that the head's kernels move."""
STEP_S = 0.0025
"""Least time of a decode step: the scheduler of the server."""
LINK = 25e9
"""Bytes/s between a GPU and the host."""
CALLS_S = 0.3
"""Seconds of a weight sync besides its bytes: digests, calls, the gather."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstRun:
    """A run of the page: `parity train <command>`, and what its model writes."""

    name: str
    command: str
    size: Size
    prompt: int
    response: int
    """Mean tokens."""
    looked_at: float = 1.0
    """Groups that are sampled for each that is trained on."""


RUNS = (
    FirstRun(
        name="0.5B",
        command="gsm8k_grpo_qwen2.5_0.5b policy.gpus_per_worker=0.5 rollout.gpus_per_engine=0.5 "
        "policy.activation_checkpoint_every=1 batch.prompts_per_step=32 batch.mini_batch_prompts=16",
        size=QWEN_05B,
        prompt=120,
        response=250,
    ),
    FirstRun(
        name="LoRA 7B",
        command="gsm8k_lora_qwen2.5_7b batch.prompts_per_step=32 batch.mini_batch_prompts=16",
        size=QWEN_7B,
        prompt=120,
        response=250,
    ),
    FirstRun(
        name="7B on 8 GPUs",
        command="dapo_qwen2.5_7b sampling.max_new_tokens=4096 reward.overlong_buffer_tokens=0 "
        "batch.prompts_per_step=64 eval.samples=4",
        size=QWEN_7B,
        prompt=200,
        response=1000,
        looked_at=2.0,
    ),
    FirstRun(
        name="32B on 64 GPUs",
        command="dapo_qwen2.5_32b",
        size=QWEN_32B,
        prompt=200,
        response=3000,
        looked_at=2.0,
    ),
)


def planned(run: FirstRun, directory: Path) -> tuple[TrainConfig, MemoryPlan, ModelShape]:
    """Config and memory plan of a run whose model is one of zeros below `directory`."""
    recipe, *words = shlex.split(run.command)
    path = sparse_model(directory, run.size)
    data = [f"data.{name}_path=word_problems:one_step@{name}" for name in ("train", "eval")]
    [composed] = resolve(
        recipe_dir() / f"{recipe}.yaml", [*words, *data, f"model.path={path}"], own_dir=None, multirun=False
    ).runs
    assert composed.config is not None, composed.problems
    return composed.config, memory_plan(composed.config, device_bytes=DEVICE_BYTES), directory_shape(path)


def group(run: FirstRun, config: TrainConfig) -> GroupLengths:
    """Lengths of the responses to one prompt."""
    count = config.batch.group_size
    rests = [min(config.sampling.max_new_tokens, round(run.response * (2 * i + 1) / count)) for i in range(count)]
    return GroupLengths(run.prompt, tuple(rests), sum(rests))


def rollout_s(run: FirstRun, config: TrainConfig, shape: ModelShape) -> float:
    """Seconds of sampling: engines share the groups evenly; all GPUs of an engine read its weights and cache."""
    prompts = round(config.batch.prompts_per_step * run.looked_at / config.rollout.num_engines)
    gpus = config.rollout.tp_size
    rates = Rates(flops=PRODUCTS * gpus, bytes_per_s=READS * gpus)
    one = group(run, config)
    lengths = [Lengths(run.prompt, rest) for rest in one.rests] * prompts
    number_bytes = DTYPE_BYTES[config.rollout.dtype]
    ideal = replay_decode(shape, lengths, rates, number_bytes=number_bytes, slots=config.rollout.max_running)
    return prefill_floor(shape, [run.prompt] * prompts, rates) + max(ideal.seconds, max(one.rests) * STEP_S)


def train_s(run: FirstRun, config: TrainConfig, shape: ModelShape, *, adapter: int) -> tuple[float, float]:
    """Seconds of training on every rank's share of a step, and `perf/mfu`."""
    policy, batch, one = config.policy, config.batch, group(run, config)
    groups = [one] * batch.prompts_per_step
    tokens, scored = sum(each.num_tokens for each in groups), sum(each.scored for each in groups)
    again = bool(policy.activation_checkpoint_every)
    rate = PRODUCTS * min(1.0, 0.7 + 0.3 * (run.size.hidden - QWEN_05B.hidden) / (NARROW - QWEN_05B.hidden))
    forward, backward = (each * run.size.hidden * shape.num_layers * tokens for each in LAYER_BYTES)
    head = HEAD_BYTES * shape.vocab_size * scored
    learnt = training_flops(shape, groups, adapter=adapter)
    seconds = training_flops(shape, groups, adapter=adapter, full_recompute=again) / rate
    seconds += ((1 + again) * forward + backward + head) / TRAFFIC
    more = config.needs_old_logprobs_pass + config.has_reference
    seconds = batch.passes * seconds + more * (sequence_flops(shape, groups) / rate + (forward + head / 3) / TRAFFIC)
    ranks = policy.num_workers
    rates = Rates(flops=PRODUCTS * ranks, bytes_per_s=TRAFFIC * ranks)
    seconds = seconds / ranks + batch.passes * batch.mini_batches * optimizer_floor(
        adapter or shape.num_parameters, rates, cast_bytes=2
    )
    return seconds, batch.passes * learnt / (PRODUCTS * ranks) / seconds


def sync_s(config: TrainConfig, plan: MemoryPlan, shape: ModelShape, *, adapter: int) -> tuple[float, float]:
    """Seconds of a weight sync, to the host and to each GPU of an engine, and of the turns in a step."""
    assert plan.rank is not None
    whole = adapter if adapter and not plan.takes_turns else shape.num_parameters
    sent = whole * DTYPE_BYTES[config.rollout.dtype]
    turns = 2 * plan.rank.moved / LINK if plan.takes_turns else 0.0
    return CALLS_S + sent / LINK + sent / config.rollout.tp_size / LINK, turns


def rows(run: FirstRun, directory: Path) -> list[str]:
    """The lines of a run's table."""
    config, plan, shape = planned(run, directory)
    assert plan.rank is not None and plan.host_bytes is not None
    lora = config.policy.lora
    adapter = adapter_parameters(linear_shapes(config), lora) if lora.rank else 0
    taken, mfu = train_s(run, config, shape, adapter=adapter)
    sync, turns = sync_s(config, plan, shape, adapter=adapter)
    numbers = {
        "memory: the two take turns": "yes" if plan.takes_turns else "no",
        "memory: a rank, at the cap": f"{plan.rank.on_device / 2**30:.0f} GiB",
        "memory: the host": f"{plan.host_bytes / 2**30:.0f} GiB",
        "`time/rollout_s`": f"{rollout_s(run, config, shape):.1f} s",
        "`time/train_s`": f"{taken:.1f} s",
        "`time/sync_s` without turns": f"{sync:.1f} s",
        "`perf/gpu_swap_s`": f"{turns:.1f} s",
        "`perf/mfu`": f"{mfu:.0%}",
    }
    return [f"| {name} | {number} | |" for name, number in numbers.items()]


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        for run in RUNS:
            table = "\n".join(["| number | calculated | measured |", "|---|---|---|", *rows(run, Path(scratch))])
            sys.stdout.write(f"\n{run.name}: `parity train {run.command}`\n\n{table}\n")


if __name__ == "__main__":
    main()
