"""TrainConfig -> tokens, micro-batches and memory at the length cap, before anything is loaded. No torch.

`plan.py` prints it. Everything here is at the cap: every prompt and every response as long as it may be.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from rollout.arithmetic import TOKENS
from rollout.config import ArithmeticDataConfig, DType, FileDataConfig
from trainer.components import ArithmeticModelConfig, HFModelConfig
from trainer.config import TrainConfig

DTYPE_BYTES = {DType.float32: 4, DType.bfloat16: 2, DType.float16: 2}
MASTER_BYTES = 4
"""Master weights and gradients are float32."""
ADAMW_BYTES = 8
"""Two float32 moments per parameter."""
SOFTMAX_SCRATCH_BYTES = 2 * 4 * 2**24
"""Two float32 blocks of logits in which the softmax runs, at most (trainer/logprob_head.py)."""
GATHERED_LAYERS = 2
"""Decoder layers that FSDP holds whole: the one that computes and the one that is fetched ahead."""
ARITHMETIC_HEAD_SIZE = 32
ARITHMETIC_MLP_FACTOR = 4
MAX_HEADER_BYTES = 100 * 2**20
"""The safetensors format allows no longer header; a larger number means that the file is something else."""
LAYER_NAME = re.compile(r"\.layers\.(\d+)\.|\.h\.(\d+)\.")


class UnknownShapeError(ValueError):
    """The model's size cannot be known yet: says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Sizes of a causal language model."""

    num_parameters: int
    """Tied parameters count once."""
    layer_parameters: int
    """Of the largest decoder layer."""
    num_layers: int
    vocab_size: int
    kv_size: int
    """Numbers that one token adds to the KV cache of one layer: keys and values of all KV heads."""

    @property
    def root_parameters(self) -> int:
        """Outside the layers: embedding, head, final norm."""
        return max(0, self.num_parameters - self.num_layers * self.layer_parameters)


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
        return _arithmetic_shape(config.model)
    if isinstance(config.model, HFModelConfig):
        directory = Path(config.model.path).expanduser()
        if not directory.is_dir():
            raise UnknownShapeError(f"{config.model.path} is not a local directory, so its size is not known here")
        return _directory_shape(directory)
    raise UnknownShapeError(f"no size is known for model={config.model.kind}")


def _prompt_cap(config: TrainConfig) -> int:
    """Longest prompt in tokens."""
    if isinstance(config.data, ArithmeticDataConfig):
        # One token per digit of two operands, "+" and "=".
        return 2 * len(str(config.data.max_operand)) + 2
    if isinstance(config.data, FileDataConfig):
        return config.data.max_prompt_tokens
    raise ValueError(f"no longest prompt is known for data={config.data.kind}")


def _arithmetic_shape(model: ArithmeticModelConfig) -> ModelShape:
    """Sizes of the Qwen2 that trainer/base_model.py makes: biases on q, k and v, embedding and head tied."""
    hidden, mlp = model.hidden_size, ARITHMETIC_MLP_FACTOR * model.hidden_size
    attention = 4 * hidden * hidden + 3 * hidden
    layer = attention + 3 * hidden * mlp + 2 * hidden
    return ModelShape(
        num_parameters=len(TOKENS) * hidden + model.num_layers * layer + hidden,
        layer_parameters=layer,
        num_layers=model.num_layers,
        vocab_size=len(TOKENS),
        kv_size=2 * (hidden // ARITHMETIC_HEAD_SIZE) * ARITHMETIC_HEAD_SIZE,
    )


def _directory_shape(directory: Path) -> ModelShape:
    """Sizes of a Hugging Face directory: config.json for the widths, the safetensors headers for the counts."""
    config_path = directory / "config.json"
    try:
        described = json.loads(config_path.read_text(encoding="utf-8"))
        # Models that also see or hear keep the language model's sizes one level down.
        text = described.get("text_config", described)
        heads, hidden = text["num_attention_heads"], text["hidden_size"]
        kv_heads = text.get("num_key_value_heads", heads)
        head_size = text.get("head_dim") or hidden // heads
        num_layers, vocab_size = text["num_hidden_layers"], text["vocab_size"]
        counts = _parameter_counts(directory)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UnknownShapeError(f"{config_path} and the safetensors files do not tell it ({error!r})") from error
    return ModelShape(
        num_parameters=sum(counts.values()),
        layer_parameters=max((count for layer, count in counts.items() if layer is not None), default=0),
        num_layers=num_layers,
        vocab_size=vocab_size,
        kv_size=2 * kv_heads * head_size,
    )


def _parameter_counts(directory: Path) -> Counter[int | None]:
    """Parameters of each decoder layer, and of everything else under None."""
    counts: Counter[int | None] = Counter()
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no *.safetensors file in {directory}")
    for path in files:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"{path} is not a safetensors file")
            header = json.loads(file.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                found = LAYER_NAME.search(f".{name}")
                layer = None if found is None else int(found.group(1) or found.group(2))
                counts[layer] += math.prod(entry["shape"])
    return counts
