"""TrainConfig and GPUs that are elsewhere -> seconds of a step by phase, responses at a time, bytes on the disk.

Calculated: the work that `trainer/limits/floors.py` counts, at a share of the speeds of `trainer/limits/gpus.py`. The
shares are guesses with a range. None was measured with Parity on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from algorithms.config import Problem
from trainer.config.training import Offload
from trainer.limits.adapter_shape import adapter_parameters, linear_shapes
from trainer.limits.estimate import DTYPE_BYTES, batch_shape
from trainer.limits.floors import (
    GroupLengths,
    Lengths,
    Rates,
    prefill_floor,
    replay_decode,
    sequence_flops,
    training_flops,
)
from trainer.limits.gpus import Gpus
from trainer.limits.memory_plan import MemoryPlan, or_set
from trainer.text.plain import counted, duration, size

GPUS_PER_MACHINE = 8
GOLDEN = (math.sqrt(5) - 1) / 2
MEANS = (1 / 4, 1 / 2, 1)
"""Mean of the responses, in lengths of the longest: nobody knows it before the run."""


class Speeds(NamedTuple):
    """What software reaches of a GPU. Guesses."""

    flops: float
    """Share of the FLOPs, in training, log-probs and prefills. Published for training with FSDP: 0.15 to 0.45."""
    memory: float
    """Share of the memory's bandwidth in decode steps. Published for SGLang: 0.6 to 0.75."""
    link: float
    """Share of the links between the GPUs of a machine."""
    network: float
    """Bytes per second and GPU between machines; a card of 400 Gbit/s has 50e9."""
    host: float
    """Bytes per second between a GPU and its host."""


FAST, SLOW = Speeds(0.45, 0.75, 0.8, 40e9, 40e9), Speeds(0.2, 0.45, 0.4, 15e9, 10e9)


class StepSeconds(NamedTuple):
    """Seconds of the phases of a step, and of all of it."""

    rollout: float
    log_probs: float
    training: float
    sync: float
    """Weights to the engines; both sides to sleep and awake if they take turns."""
    step: float


def spread(count: int, *, mean: float, longest: int) -> list[int]:
    """Lengths of `count` responses, mixed: the longest x u ^ (longest / mean - 1) for u spread evenly over 0 to 1."""
    power = longest / mean - 1
    return [max(1, round(longest * ((index + 0.5) * GOLDEN % 1) ** power)) for index in range(count)]


def at_a_time(plan: MemoryPlan, mean: float) -> tuple[int, int]:
    """(Responses of `mean` tokens for which the cache of an engine has room, those of them that it gets)."""
    config = plan.config
    prompt = batch_shape(config).prompt_tokens / config.batch.group_size  # a group's prompt is there once
    room = int((plan.cache_tokens or 0) / (prompt + mean))
    samples = config.requests_per_engine
    return room, min(room, samples, config.rollout.max_running or samples)


def step_seconds(plan: MemoryPlan, gpus: Gpus, mean: float, by: Speeds) -> StepSeconds:
    """Seconds of a step with responses of `mean` tokens at the speeds `by`; prompts are at their cap.

    The sizes of the model are known.
    """
    assert plan.shape is not None and plan.rank is not None and plan.engine is not None
    config, shape = plan.config, plan.shape
    rollout, policy, batch = config.rollout, config.policy, config.batch
    prompt, longest, ranks = batch_shape(config).prompt_tokens, config.sampling.max_new_tokens, policy.num_workers
    samples = math.ceil(config.samples_per_round / rollout.num_engines)
    flops, bytes_per_s = gpus.flops * by.flops, gpus.bytes_per_s * by.memory
    rates = Rates(flops=flops * rollout.tp_size, bytes_per_s=bytes_per_s * rollout.tp_size)
    lengths = [Lengths(prompt, tokens) for tokens in spread(samples, mean=mean, longest=longest)]
    number_bytes, slots = DTYPE_BYTES[rollout.dtype], at_a_time(plan, mean)[1]
    decode = replay_decode(
        shape, lengths, rates, number_bytes=number_bytes, is_8_bit=rollout.takes_quantized, slots=slots, is_mixed=True
    )
    sampling = decode.seconds + prefill_floor(shape, [prompt] * math.ceil(samples / batch.group_size), rates)

    responses = spread(batch.samples_per_step, mean=mean, longest=longest)
    rests = [responses[start : start + batch.group_size] for start in range(0, len(responses), batch.group_size)]
    groups = [GroupLengths(prompt, tuple(each), sum(each)) for each in rests]
    tokens = sum(group.num_tokens for group in groups) / ranks / batch.mini_batches
    microbatches = batch.mini_batches * math.ceil(tokens / batch.max_tokens_per_microbatch)
    others, link = (ranks - 1) / ranks * shape.num_parameters, gpus.link * by.link
    between = link if ranks <= GPUS_PER_MACHINE else min(link, by.network)
    gather = others * DTYPE_BYTES[policy.dtype] / between
    adapter = adapter_parameters(linear_shapes(config), policy.lora) if policy.lora.rank else 0
    reduce = 0 if adapter else others * 4 / between
    forward = sequence_flops(shape, groups) / (ranks * flops)
    again = forward / policy.activation_checkpoint_every if policy.activation_checkpoint_every else 0
    both = training_flops(shape, groups, adapter=adapter) / (ranks * flops) + again
    models = config.needs_old_logprobs_pass + config.has_reference + config.has_critic
    log_probs = models * max(forward, microbatches * gather)
    states = plan.rank.optimizer if policy.offload is Offload.optimizer else 0
    training = (1 + config.has_critic) * batch.passes * max(both, microbatches * (2 * gather + reduce))
    training += 2 * batch.optimizer_steps_per_rollout * states / by.host
    published, asleep = plan.engine.weights, plan.rank.moved if plan.takes_turns else 0
    sync = max(others * number_bytes / link, published / by.host) + (published + 2 * asleep) / by.host
    whole = sampling + log_probs + training
    if config.schedule.kind != "sync":  # engines sample while the policy trains
        whole = max(sampling, log_probs + training)
    return StepSeconds(sampling, log_probs, training, sync, whole + sync)


def _range(fast: float, slow: float) -> str:
    return f"{fast:.2g} to {slow:.2g} s" if slow < 90 else f"{duration(fast)} to {duration(slow)}"


def elsewhere_problems(plan: MemoryPlan, gpus: Gpus) -> Iterator[Problem]:
    """Yield what of a run does not fit on `gpus`; nothing of a model whose size is unknown."""
    config = plan.config
    policy, rollout = config.policy, config.rollout
    if not (policy.gpus_per_worker and rollout.gpus_per_engine):
        rule = f"must be above 0 for a run on {gpus.name}: ranks and engines without a GPU compute on the host"
        key = "rollout.gpus_per_engine" if policy.gpus_per_worker else "policy.gpus_per_worker"
        yield config.broken(key, rule, "policy.gpus_per_worker=0.5 rollout.gpus_per_engine=0.5 share a GPU.")
        return
    if config.num_gpus > gpus.number:
        rule = f"must name at least the {config.num_gpus:g} GPUs of the run"
        yield Problem(key="--on", rule=rule, value=f"{gpus.number}x{gpus.name}", remedy="Or give it fewer workers.")
    if rollout.tp_size > GPUS_PER_MACHINE:
        rule = (
            f"must be spread over at most {GPUS_PER_MACHINE} GPUs, those of a machine, and tp_size is {rollout.tp_size}"
        )
        yield config.broken("rollout.gpus_per_engine", rule, "An engine is on one machine: use several of fewer GPUs.")
    if plan.rank is None or plan.engine is None:
        return
    if plan.rank.least > gpus.memory:
        rule = f"must be higher: a rank needs {size(plan.rank.least)} at any length, and a GPU has {size(gpus.memory)}"
        yield config.broken(
            "policy.num_workers", rule, f"More ranks hold less each{or_set(config, 'policy.offload=parameters')}."
        )
    whole = batch_shape(config).prompt_tokens + config.sampling.max_new_tokens
    remedy = "Spread an engine over more GPUs (tp_size of rollout.engine_args), or give it more of each "
    if not plan.cache_tokens:
        weights = size(plan.engine.weights // rollout.tp_size)
        have = size(plan.engine_room(gpus.memory))
        rule = f"must leave room for a cache: the weights take {weights} of the {have} that an engine has of each GPU"
        yield config.broken("rollout.gpus_per_engine", rule, f"{remedy}(mem_fraction_static there).")
    elif plan.cache_tokens < whole:
        rule = f"must be lower: prompt and response at their caps are {whole:,} tokens, and the cache of an engine has "
        rule += f"room for {plan.cache_tokens:,}"
        yield config.broken("sampling.max_new_tokens", rule, f"Or: {remedy}(mem_fraction_static there).")


def elsewhere_lines(plan: MemoryPlan, gpus: Gpus) -> Iterator[tuple[str, str]]:
    """(label, text) of the facts about a run on `gpus`; none of a model whose size is unknown."""
    config = plan.config
    if (
        plan.shape is None
        or plan.engine is None
        or not (config.policy.gpus_per_worker and config.rollout.gpus_per_engine)
    ):
        return
    num_steps, longest = config.run.num_steps, config.sampling.max_new_tokens
    yield "cache", f"each engine has room for {plan.cache_tokens or 0:,} tokens ({size(plan.engine.token_bytes)} each)"
    said = {part * longest: f"responses of {part * longest:,.0f} tokens in the mean" for part in MEANS}
    for mean, responses in said.items():
        room, running = at_a_time(plan, mean)
        yield "cache", f"{responses}: room for {room:,}, of which an engine gets {running:,} at a time"
    for mean, responses in said.items():
        if not at_a_time(plan, mean)[1]:
            continue
        fast, slow = (step_seconds(plan, gpus, mean, by) for by in (FAST, SLOW))
        seconds = zip(fast._fields, fast, slow, strict=True)
        phases = [f"{name} {_range(low, high)}" for name, low, high in seconds if high]
        whole = f"{counted(num_steps, 'step')} {_range(num_steps * fast.step, num_steps * slow.step)}"
        yield "time", f"{responses}: {', '.join(phases)}; {whole}"
    yield (
        "assumed",
        f"{SLOW.flops:g} to {FAST.flops:g} of {gpus.flops / 1e12:,.0f} TFLOP/s; {SLOW.memory:g} to {FAST.memory:g} of "
        f"{gpus.bytes_per_s / 1e9:,.0f} GB/s in decode steps; {SLOW.link:g} to {FAST.link:g} of "
        f"{gpus.link / 1e9:g} GB/s between GPUs; {SLOW.network / 1e9:g} to {FAST.network / 1e9:g} between machines, "
        f"{SLOW.host / 1e9:g} to {FAST.host / 1e9:g} to the host; the mean is a guess too. Nothing of it was measured",
    )
