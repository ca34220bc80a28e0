"""TrainConfig -> memory per device, and the decision if policy and engines share a GPU. Does not import torch.

`--dry-run` and every start print the plan; `trainer/cluster/placement.py` acts on the verdict.
`trainer/limits/estimate.py` makes the estimate; the dry run before the first step measures the estimate of a
micro-batch.
"""

from __future__ import annotations

import copy
import logging
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from algorithms.config.rules import as_yaml
from trainer.config.train import TrainConfig
from trainer.config.training import HFModelConfig, Residency
from trainer.limits.adapter_shape import adapter_parameters, linear_shapes
from trainer.limits.estimate import (
    EngineMemory,
    RankMemory,
    critic_shape,
    engine_memory,
    model_shape,
    rank_memory,
)
from trainer.limits.machine import usable_memory
from trainer.limits.model_shape import ModelShape, UnknownShapeError
from trainer.rundir.provenance import tool_output
from trainer.text.plain import counted, size

logger = logging.getLogger(__name__)

USABLE = 0.92
"""Share of a GPU's memory that a plan may use: fragments take the rest."""
CONTEXT_BYTES = 2 * 2**30
"""Memory of a rank on a GPU besides tensors, and what a rank or an engine keeps there while it sleeps: the context,
libraries, NCCL's buffers. Calculated, not yet measured."""
PROCESS_BYTES = 2**29
"""Memory of a rank or an engine besides what the plan counts: Python, torch, transformers and the C library's rest."""
GPU_PROCESS_BYTES = 3 * 2**30
"""The same of a process that uses CUDA, whose libraries are larger. Calculated, not yet measured."""
SAVING_KEYS = (
    "batch.max_tokens_per_microbatch, sampling.max_new_tokens, rollout.num_engines or policy.num_workers, or set "
    "policy.activation_checkpoint_every=1 or policy.dtype=bfloat16"
)
"""Keys that lower the memory of the host that a run without GPUs needs."""
RANK_SAVINGS = ("policy.activation_checkpoint_every=1", "policy.offload=parameters")
"""Settings that lower the memory of its GPU that a rank needs."""
GPU_HOST_KEYS = (
    "policy.num_workers or rollout.num_engines, or set policy.offload=none, checkpoint.asynchronous=false or "
    "cluster.residency=never"
)
"""Keys that lower the host memory of a run whose ranks have GPUs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Memory of rank and engine at the token cap."""

    config: TrainConfig
    shape: ModelShape | None
    """Sizes of the policy's model; None if they are unknown."""
    rank: RankMemory | None
    """Memory of one rank; None if the model's size is unknown."""
    engine: EngineMemory | None
    unknown: str
    """Reason why the sizes are unknown; "" if they are known."""
    device_bytes: int | None
    """Memory of one GPU in bytes; None without a GPU, or if its size is unknown."""
    is_here: bool = True
    """False of GPUs that are elsewhere."""

    @property
    def engine_bytes(self) -> int | None:
        """Bytes that one engine takes of each of its GPUs while the ranks are awake."""
        taken = None if self.device_bytes is None else self.config.rollout.taken_bytes(self.device_bytes)
        if taken is None and self.engine is not None:
            taken = self.engine.weights + self.engine.kv_cache + self.config.rollout.work_bytes
        return taken

    @property
    def cache_tokens(self) -> int | None:
        """Tokens that the KV cache of an engine has room for; on a CPU, if it grows, those of its samples at the cap;
        None if the size of the model or of the GPU is unknown."""
        engine, rollout = self.engine, self.config.rollout
        if engine is None or not rollout.gpus_per_engine:
            return None if engine is None else engine.tokens
        if self.device_bytes is None:
            return None
        room = self.engine_room(self.device_bytes)
        fitting = max(0, room - engine.weights // rollout.tp_size) // engine.token_bytes
        return fitting if rollout.held_tokens is None else min(fitting, rollout.held_tokens)

    def engine_room(self, gpu_bytes: int) -> int:
        """Bytes of each of its GPUs, of `gpu_bytes`, that an engine has for weights and cache."""
        held = 0
        if self.rank is not None and self.config.shares_gpus and not self.takes_turns:  # the rank is there before it
            held = self.rank.weights_on_device + CONTEXT_BYTES
        taken = self.config.rollout.static_bytes(gpu_bytes, held=held, sleeps=self.takes_turns)
        return max(0, min(int(USABLE * gpu_bytes), taken))

    @property
    def routes_bytes(self) -> int:
        """Bytes of the host's memory in which an engine keeps routes: it takes them at its start, for the whole cache.
        Those of the samples at the cap if the cache is unknown."""
        if self.engine is None:
            return 0
        tokens = self.engine.tokens if self.cache_tokens is None else self.cache_tokens
        return tokens * self.engine.route_bytes

    @property
    def fits_together(self) -> bool | None:
        """True if rank and engine fit on one GPU at the same time; None if that is unknown."""
        if self.rank is None or self.engine_bytes is None or self.device_bytes is None:
            return None
        return self.rank.on_device + CONTEXT_BYTES + self.engine_bytes <= USABLE * self.device_bytes

    @property
    def host_bytes(self) -> int | None:
        """Bytes that ranks and engines take of the host's memory, at the cap, and the weights that are published once
        on a machine; None if the model's size is unknown."""
        if self.ranks_host_bytes is None or self.engine is None:
            return None
        rollout = self.config.rollout
        of_engine = self.engine.weights + self.engine.kv_cache
        if rollout.gpus_per_engine:
            graphs = rollout.graph_bytes if self.takes_turns else 0
            of_engine = rollout.tp_size * (GPU_PROCESS_BYTES + graphs)
        of_engine += PROCESS_BYTES + self.routes_bytes
        return self.ranks_host_bytes + rollout.num_engines * of_engine + self.engine.weights

    @property
    def ranks_host_bytes(self) -> int | None:
        """Bytes that the ranks take of the host's memory, at the cap; None if the model's size is unknown."""
        if self.rank is None:
            return None
        policy, checkpoint = self.config.policy, self.config.checkpoint
        of_rank = self.rank.on_host + PROCESS_BYTES + self.rank.on_device
        if policy.gpus_per_worker:
            of_rank = self.rank.on_host + GPU_PROCESS_BYTES + (self.rank.moved if self.takes_turns else 0)
        if checkpoint.every and checkpoint.asynchronous:  # a copy of what is trained: as large as gradients and moments
            of_rank += self.rank.gradients + self.rank.optimizer
        return policy.num_workers * of_rank

    @property
    def least_host_bytes(self) -> int | None:
        """Bytes of the host's memory that ranks and engines need at any length; None if the model's size is unknown."""
        if self.rank is None or self.engine is None:
            return None
        policy, rollout = self.config.policy, self.config.rollout
        of_rank = self.rank.on_host + (0 if policy.gpus_per_worker else self.rank.least)
        return policy.num_workers * of_rank + (0 if rollout.gpus_per_engine else self.engine.weights)

    @property
    def least_device_bytes(self) -> int | None:
        """Bytes of its GPU that a rank needs at any length; None without a GPU, or if the model's size is unknown."""
        return self.rank.least if self.rank is not None and self.config.policy.gpus_per_worker else None

    @property
    def host_verdict(self) -> str:
        """Comparison of the sum with the memory of this machine."""
        if self.host_bytes is None:
            return f"the memory that the run needs is unknown: {self.unknown}"
        needs = f"ranks and engines need up to {size(self.host_bytes)} of the host's memory"
        if self.config.cluster.address is not None or not self.is_here:
            published = size(self.engine.weights if self.engine else 0)
            return f"{needs}, on its machines together, and {published} more on each but the first"
        memory = usable_memory()
        fits = f"MAY NOT FIT; lower {self._host_keys}" if self.host_bytes > memory else "it fits"
        return f"{needs}; this machine has {size(memory)}: {fits}"

    @property
    def memory_note(self) -> str:
        """Sentence for a run whose memory was used up."""
        return f"The memory plan said: {self.host_verdict.partition('; lower')[0]}. Lower {self._host_keys}."

    @property
    def _host_keys(self) -> str:
        return GPU_HOST_KEYS if self.config.policy.gpus_per_worker else SAVING_KEYS

    @property
    def takes_turns(self) -> bool:
        """True if one side sleeps while the other works."""
        match self.config.cluster.residency:
            case Residency.always:
                return True
            case Residency.never:
                return False
            case Residency.auto:
                return self.config.shares_gpus and self.fits_together is not True

    @property
    def verdict(self) -> str:
        """The treatment of the GPUs, with its reason."""
        setting = f"cluster.residency={self.config.cluster.residency.value}"
        if not may_take_turns(self.config):
            why = setting if self.config.shares_gpus else "no GPU is shared"
            return "; ".join([f"nothing sleeps: {why}", *self._short_of_memory])
        if self.rank is None or self.fits_together is None:
            reason = self.unknown or "the memory of the GPU is not known here"
        else:
            needed = self.rank.on_device + CONTEXT_BYTES + (self.engine_bytes or 0)
            reason = f"rank and engine need {size(needed)} of {USABLE:.0%} of {size(self.device_bytes or 0)}"
        if self.takes_turns:
            reason = ", ".join([reason, *self._short_of_memory])
            return f"one side sleeps while the other works: {reason}; {setting}"
        return f"both fit, nothing sleeps: {reason}; {setting}"

    @property
    def _short_of_memory(self) -> list[str]:
        """What needs more than its GPU has while the policy trains, with the ways out; empty if nothing does."""
        if self.rank is None or not self.device_bytes or not self.config.policy.gpus_per_worker:
            return []
        who, needed = "the rank alone", self.rank.on_device + CONTEXT_BYTES
        if self.takes_turns:
            needed += CONTEXT_BYTES  # what the engine keeps asleep
        elif self.config.shares_gpus:
            who, needed = "rank and engine together", needed + (self.engine_bytes or 0)
        if needed <= USABLE * self.device_bytes:
            return []
        ways = "lower batch.max_tokens_per_microbatch or sampling.max_new_tokens, raise policy.num_workers"
        ways += or_set(self.config, *RANK_SAVINGS)
        return [f"{who} {size(needed)} of {size(self.device_bytes)}, WHICH MAY NOT FIT: {ways}"]

    @property
    def verdicts(self) -> list[str]:
        """The result of the plan without its sums; the treatment of the GPUs where some are shared or too small."""
        is_told = self.config.shares_gpus or self._short_of_memory
        return [self.host_verdict, self.verdict] if is_told else [self.host_verdict]

    def lines(self) -> Iterator[str]:
        """The whole plan as lines of text."""
        if self.rank is None or self.engine is None:
            yield f"unknown: {self.unknown}"
            return
        rank, engine, policy, held = self.rank, self.engine, self.config.policy, self.config.rollout.held_tokens
        is_lora = bool(policy.lora.rank)  # without its adapter the policy is the reference
        others = (
            ["reference"] * (self.config.has_reference and not is_lora)
            + ["adapter"] * is_lora
            + ["critic"] * self.config.has_critic
        )
        models = f" ({' and '.join(['policy', *others])})" if others else ""
        host = f", on the host {size(rank.on_host)}" if rank.on_host else ""
        yield (
            f"each of {counted(policy.num_workers, 'rank')}: {size(rank.on_device)}{host} = weights "
            f"{size(rank.weights)}{models} + gradients {size(rank.gradients)} + AdamW {size(rank.optimizer)} "
            f"+ gathered {size(rank.gathered)} + activations {size(rank.activations)} + backward {size(rank.backward)}"
        )
        yield (
            f"each of {counted(self.config.rollout.num_engines, 'engine')}: weights {size(engine.weights)} "
            f"+ KV cache {size(engine.kv_cache)} "
            + ("if all that it samples at once were at the cap" if held is None else f"of {held:,} tokens")
        )
        if engine.route_bytes:
            yield (
                f"each engine keeps routes in the host's memory: {size(self.routes_bytes)}, {engine.route_bytes:,} "
                "bytes for each token that its cache has room for"
            )
        yield self.host_verdict
        yield self.verdict


def or_set(config: TrainConfig, *settings: str) -> str:
    """The end of a sentence, ", or set a.b=c or d.e=f", with those of `settings` that the config does not have."""
    pairs = [setting.split("=") for setting in settings]
    found = [f"{key}={value}" for key, value in pairs if as_yaml(attrgetter(key)(config)) != value]
    return f", or set {' or '.join(found)}" if found else ""


def may_take_turns(config: TrainConfig) -> bool:
    """True if one side may sleep, by the memory plan or by request."""
    residency = config.cluster.residency
    return residency is Residency.always or (config.shares_gpus and residency is Residency.auto)


def memory_plan(config: TrainConfig, *, device_bytes: int | None, model_path: Path | None = None) -> MemoryPlan:
    """The plan for GPUs of `device_bytes` each; None without a GPU or if its size is unknown.

    `model_path`: where the model lies on this disk, once it was fetched or made.
    """
    if model_path is not None:
        config = copy.copy(config)
        config.model = HFModelConfig(path=str(model_path))
    try:
        shape, critic, lora = model_shape(config), critic_shape(config), config.policy.lora
        adapter = adapter_parameters(linear_shapes(config), lora) if lora.rank else 0
    except UnknownShapeError as error:
        return MemoryPlan(
            config=config, shape=None, rank=None, engine=None, unknown=str(error), device_bytes=device_bytes
        )
    return MemoryPlan(
        config=config,
        shape=shape,
        rank=rank_memory(config, shape, critic, adapter=adapter),
        engine=engine_memory(config, shape),
        unknown="",
        device_bytes=device_bytes,
    )


def gpu_bytes() -> int | None:
    """Memory of the smallest NVIDIA device of this machine in bytes, from its driver; None if that is not known."""
    listed = tool_output(["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"])
    if listed is None:
        if shutil.which("nvidia-smi"):
            logger.warning("the memory of the GPUs is unknown: nvidia-smi failed")
        return None
    lines = listed.splitlines()
    if not lines or not all(line.strip().isdecimal() for line in lines):
        logger.warning("the memory of the GPUs is unknown: nvidia-smi said %r", listed)
        return None
    return min(int(line) for line in lines) * 2**20
