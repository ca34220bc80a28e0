"""TrainConfig -> tokens, micro-batches and memory at the length cap, before anything is loaded. No torch.

`plan.py` prints it. Everything here is at the cap: every prompt and every response as long as it may be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from rollout.config import ArithmeticDataConfig, DType, FileDataConfig
from trainer.components import ArithmeticModelConfig, HFModelConfig
from trainer.config import TrainConfig
from trainer.model_shape import ModelShape, UnknownShapeError, arithmetic_shape, directory_shape

DTYPE_BYTES = {DType.float32: 4, DType.bfloat16: 2, DType.float16: 2}
MASTER_BYTES = 4
"""Master weights and gradients are float32."""
ADAMW_BYTES = 8
"""Two float32 moments per parameter."""
SOFTMAX_SCRATCH_BYTES = 2 * 4 * 2**24
"""Two float32 blocks of logits in which the softmax runs, at most (trainer/logprob_head.py)."""
GATHERED_LAYERS = 2
"""Decoder layers that FSDP holds whole: the one that computes and the one that is fetched ahead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchShape:
    """The arithmetic of one rollout step, at the cap."""

    prompt_tokens: int
    """Longest prompt."""
    tokens_per_sample: int
    tokens_per_step: int
    samples_per_optimizer_step: int
    microbatches: int
    """Forwards per rank and optimizer step, if every sample had the same length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Bytes on one FSDP rank; activations and the allocator's overhead come on top."""

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    """Parameters that are whole on every rank while they compute."""
    logits: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.gathered + self.logits


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineMemory:
    """Bytes in one rollout engine; its own overhead comes on top."""

    weights: int
    kv_cache: int
    """If all samples of a step that the engine gets were in it together, at the cap."""


def batch_shape(config: TrainConfig) -> BatchShape:
    """Tokens and micro-batches of one rollout step at the cap."""
    batch, response = config.batch, config.sampling.max_new_tokens
    prompt = _prompt_cap(config)
    tokens = prompt + response
    per_optimizer_step = batch.samples_per_step // batch.optimizer_steps_per_rollout
    per_rank = math.ceil(per_optimizer_step / config.policy.num_workers)
    per_microbatch = max(1, batch.max_tokens_per_microbatch // tokens)
    return BatchShape(
        prompt_tokens=prompt,
        tokens_per_sample=tokens,
        tokens_per_step=tokens * batch.samples_per_step,
        samples_per_optimizer_step=per_optimizer_step,
        microbatches=math.ceil(per_rank / per_microbatch),
    )


def rank_memory(config: TrainConfig, shape: ModelShape) -> RankMemory:
    """Memory of one FSDP rank."""
    ranks, compute_bytes = config.policy.num_workers, DTYPE_BYTES[config.policy.dtype]
    shard = math.ceil(shape.num_parameters / ranks)
    # Embedding and head stay gathered from the forward to the end of the backward pass: they are in the root unit.
    whole = shape.root_parameters + min(GATHERED_LAYERS, shape.num_layers) * shape.layer_parameters
    head_bytes = MASTER_BYTES if config.policy.fp32_head else compute_bytes
    logits_bytes = config.policy.logprob_chunk_tokens * shape.vocab_size * head_bytes
    return RankMemory(
        weights=shard * MASTER_BYTES * (1 + config.has_reference),
        gradients=shard * MASTER_BYTES,
        optimizer=shard * ADAMW_BYTES,
        gathered=whole * compute_bytes,
        logits=logits_bytes + min(SOFTMAX_SCRATCH_BYTES, 2 * logits_bytes),
    )


def engine_memory(config: TrainConfig, shape: ModelShape) -> EngineMemory:
    """Memory of one rollout engine."""
    number_bytes = DTYPE_BYTES[config.rollout.dtype]
    samples = math.ceil(config.batch.samples_per_step / config.rollout.num_engines)
    tokens = samples * batch_shape(config).tokens_per_sample
    return EngineMemory(
        weights=shape.num_parameters * number_bytes,
        kv_cache=tokens * shape.num_layers * shape.kv_size * number_bytes,
    )


def model_shape(config: TrainConfig) -> ModelShape:
    """Sizes of the model of `config`; raises UnknownShapeError where they cannot be known without the network."""
    if isinstance(config.model, ArithmeticModelConfig):
        return arithmetic_shape(config.model)
    if isinstance(config.model, HFModelConfig):
        directory = Path(config.model.path).expanduser()
        if not directory.is_dir():
            raise UnknownShapeError(f"{config.model.path} is not a local directory, so its size is not known here")
        return directory_shape(directory)
    raise UnknownShapeError(f"no size is known for model={config.model.kind}")


def _prompt_cap(config: TrainConfig) -> int:
    """Longest prompt in tokens."""
    if isinstance(config.data, ArithmeticDataConfig):
        # One token per digit of two operands, "+" and "=".
        return 2 * len(str(config.data.max_operand)) + 2
    if isinstance(config.data, FileDataConfig):
        return config.data.max_prompt_tokens
    raise ValueError(f"no longest prompt is known for data={config.data.kind}")
