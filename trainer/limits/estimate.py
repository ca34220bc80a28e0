"""TrainConfig -> tokens, micro-batches and memory at the length cap, before any model is loaded. Does not import torch.

`trainer/cli/plan.py` prints the estimate. All numbers are at the cap: every prompt and every response has its maximum
length.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace

from rollout.config import DType, Routing
from rollout.data.arithmetic import MAX_OPERAND
from rollout.task_config import ArithmeticDataConfig, FileDataConfig
from trainer.config.outputs import DUMP_BYTES_PER_TOKEN, SCORE_BYTES_PER_TOKEN
from trainer.config.train import TrainConfig
from trainer.config.training import Offload
from trainer.limits.floors import GroupLengths, kv_bytes_per_token
from trainer.limits.model_shape import (
    ModelShape,
    UnknownShapeError,
    directory_shape,
    model_directory,
    model_tensors,
    shape_of,
)

DTYPE_BYTES = {DType.float32: 4, DType.bfloat16: 2, DType.float16: 2}
MASTER_BYTES = 4
"""Bytes per number of master weights and gradients, which are float32."""
ADAMW_BYTES = 8
"""Bytes per parameter that AdamW keeps: two float32 moments."""
LOGPROB_CHUNK_TOKENS = 512
"""Least number of tokens whose full-vocabulary logits are in memory at the same time: 155 MB in bfloat16 with 150,000
words, and enough rows for an efficient product."""
CHUNK_BYTES, GPU_CHUNK_BYTES = 2**27, 2**30
"""Logits in memory at the same time on a CPU and on a GPU, bytes. A larger chunk sums the head's gradient from fewer
products, each of which is rounded, and adds each to the sum of 4 bytes per number. Not yet run on a GPU."""
SOFTMAX_SCRATCH_BYTES = 2 * 4 * 2**24
"""Maximum size of the two float32 blocks of logits in which the softmax runs, bytes
(trainer/scoring/logprob_head.py)."""
GATHERED_LAYERS = 2
"""Decoder layers that FSDP holds whole: the layer that computes and the layer that is prefetched."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchShape:
    """Tokens and forwards of one rollout step, at the cap."""

    prompt_tokens: int
    """Tokens of the longest prompt."""
    tokens_per_sample: int
    tokens_per_step: int
    samples_per_optimizer_step: int
    microbatches: int
    """Forwards per rank and optimizer step, if every sample had the same length and no prompt were shared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Bytes of one FSDP rank, without the allocator's overhead."""

    weights: int
    """Shards of the weights of policy, reference and critic."""
    gradients: int
    optimizer: int
    gathered: int
    """Parameters that are whole on every rank during computation."""
    activations: int
    """Activations that the forward pass keeps for the backward pass, at the token cap."""
    backward: int
    """Largest addition of the backward pass: see `backward_bytes`."""
    offload: Offload

    @property
    def working(self) -> int:
        """Bytes held only while a micro-batch is trained on."""
        return self.gathered + self.activations + self.backward

    @property
    def on_device(self) -> int:
        """Maximum of bytes on the training device at one time."""
        match self.offload:
            case Offload.none:
                return self.weights + self.gradients + self.optimizer + self.working
            case Offload.optimizer:
                # The optimizer states are loaded for the update, when activations and logits are freed.
                return self.weights + self.gradients + max(self.optimizer, self.working)
            case Offload.parameters:
                return self.working

    @property
    def least(self) -> int:
        """Those of weights, gradients and AdamW alone: no length of a sequence lowers them."""
        return replace(self, gathered=0, activations=0, backward=0).on_device

    @property
    def weights_on_device(self) -> int:
        """Bytes of the shards that are on the training device between steps."""
        return 0 if self.offload is Offload.parameters else self.weights

    @property
    def moved(self) -> int:
        """Bytes that a rank moves from the training device to the host when it sleeps; gradients are dropped."""
        return self.weights_on_device + (self.optimizer if self.offload is Offload.none else 0)

    @property
    def on_host(self) -> int:
        """Bytes on the host that belong to the training device."""
        match self.offload:
            case Offload.none:
                return 0
            case Offload.optimizer:
                return self.optimizer
            case Offload.parameters:
                return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineMemory:
    """Bytes of one rollout engine, without its overhead."""

    weights: int
    kv_cache: int
    """KV cache of all responses that the engine has at a time together, at the cap."""
    tokens: int
    """Tokens of these samples."""
    token_bytes: int
    """KV cache of one token on each GPU of the engine; a GPU has one head of keys and values at the least."""
    route_bytes: int
    """Bytes of the host's memory for the route of one token in the cache, in all processes of the engine; 0 without
    routes."""


def batch_shape(config: TrainConfig) -> BatchShape:
    """Tokens and micro-batches of one rollout step at the cap."""
    batch, response = config.batch, config.sampling.max_new_tokens
    prompt = _prompt_cap(config)
    tokens = prompt + response
    per_optimizer_step = batch.samples_per_step // batch.mini_batches
    per_rank = math.ceil(per_optimizer_step / config.policy.num_workers)
    per_microbatch = max(1, batch.max_tokens_per_microbatch // tokens)
    return BatchShape(
        prompt_tokens=prompt,
        tokens_per_sample=tokens,
        tokens_per_step=tokens * batch.samples_per_step,
        samples_per_optimizer_step=per_optimizer_step,
        microbatches=math.ceil(per_rank / per_microbatch),
    )


def dump_bytes(config: TrainConfig) -> int:
    """Bytes of the dump of a step on the disk, at the cap; without routes if the model's size is unknown."""
    per_token, routing = DUMP_BYTES_PER_TOKEN + (config.batch.passes - 1) * SCORE_BYTES_PER_TOKEN, config.policy.routing
    if routing is not Routing.live:
        with suppress(UnknownShapeError):
            shape = model_shape(config)
            per_token += shape.num_layers * shape.experts_per_token * (3 if routing is Routing.weights else 1)
    return batch_shape(config).tokens_per_step * per_token


def rank_memory(
    config: TrainConfig, shape: ModelShape, critic: ModelShape | None = None, *, adapter: int = 0
) -> RankMemory:
    """Memory of one FSDP rank; `critic` has the sizes of the critic's initial model, None without a critic.

    The critic keeps no head over the vocabulary: a head that is not tied to the embedding is not counted. With LoRA the
    `adapter`, of so many parameters, is trained alone, and the model without it is the reference.
    """
    ranks, compute_bytes = config.policy.num_workers, DTYPE_BYTES[config.policy.dtype]
    shard = math.ceil(shape.num_parameters / ranks)
    trained = math.ceil(adapter / ranks) if adapter else shard
    if adapter:  # frozen weights lie there in the type of the forward
        weights = shard * compute_bytes + trained * MASTER_BYTES
    else:
        weights = shard * (1 + config.has_reference) * MASTER_BYTES
    # Embedding and head stay gathered from the forward to the end of the backward pass: both are in the root unit.
    whole = _whole_parameters(shape)
    critic_shard = 0
    if critic is not None:
        head = 0 if critic.is_tied else critic.head_parameters
        critic_shard = math.ceil((critic.num_parameters - head) / ranks)
        # The critic trains while the root of the policy is still gathered from the forward for pi_old.
        whole = max(whole, shape.root_parameters + _whole_parameters(critic) - head)
    kept, computed_again = activation_bytes(config, shape)
    return RankMemory(
        weights=weights + critic_shard * MASTER_BYTES,
        gradients=(trained + critic_shard) * MASTER_BYTES,
        optimizer=(trained + critic_shard) * ADAMW_BYTES,
        gathered=whole * compute_bytes,
        activations=kept,
        backward=backward_bytes(config, shape, kept=kept, computed_again=computed_again, is_frozen=bool(adapter)),
        offload=config.policy.offload,
    )


def largest_micro_batch(config: TrainConfig, *, longest_prompt: int | None = None) -> list[GroupLengths]:
    """The groups of the largest micro-batch that a rank can get: up to the cap, or all of its optimizer step.

    Every response has its maximum length, every prompt `longest_prompt` tokens; None stands for the cap of prompts.
    """
    batch, shape = config.batch, batch_shape(config)
    prompt = shape.prompt_tokens if longest_prompt is None else longest_prompt
    response = shape.tokens_per_sample - shape.prompt_tokens
    left = math.ceil(shape.samples_per_optimizer_step / config.policy.num_workers)
    room = max(batch.max_tokens_per_microbatch, prompt + response)
    groups: list[GroupLengths] = []
    while left and prompt + response <= room:
        count = min(left, batch.group_size, (room - prompt) // response)
        groups.append(GroupLengths(prompt, (response,) * count, response * count))
        left -= count
        room -= prompt + response * count
    if left and room > prompt:
        groups.append(GroupLengths(prompt, (room - prompt,), room - prompt))
    return groups


def activation_bytes(config: TrainConfig, shape: ModelShape) -> tuple[int, int]:
    """Bytes that the decoder keeps for the backward pass of the largest micro-batch, and those of a layer that is
    computed again there, both from its widths.

    Per token and layer: the inputs of two norms, on a GPU in float32, and of every product in the compute dtype (two of
    the residual's width for the norms, two for the products after them; queries, keys, values and twice the attention's
    output; four of the MLP's width, which are those of its experts in a mixture, with two of the residual's width for
    each of these). On a CPU attention and its inputs are float32; in float32 on a GPU every head has keys and values of
    its own. A checkpointed layer keeps its input; one layer at a time is computed again and held in
    full.
    """
    number, hidden = DTYPE_BYTES[config.policy.dtype], shape.hidden_size
    attention_parameters = hidden * (2 * shape.attention_size + shape.kv_size)
    of_layer = shape.layer_parameters - shape.idle_parameters // shape.num_layers  # what a token meets
    mlp_size = max(0, of_layer - attention_parameters) // (3 * hidden)
    norm_number = MASTER_BYTES if config.policy.gpus_per_worker else number  # trainer/scoring/rms_norm.py
    norms = 2 * hidden * (norm_number + number)
    attention_number = number if config.policy.gpus_per_worker else DTYPE_BYTES[DType.float32]
    products = (2 * hidden * (1 + shape.experts_per_token) + shape.attention_size + 4 * mlp_size) * number
    is_repeated = config.policy.gpus_per_worker > 0 and config.policy.dtype is DType.float32
    kv_size = 2 * shape.attention_size if is_repeated else shape.kv_size
    products += (2 * shape.attention_size + kv_size) * attention_number
    groups = largest_micro_batch(config)
    # Every sample of a group has a copy of the keys and values of its prompt and of its own.
    copied = sum(group.prompt + rest for group in groups if len(group.rests) > 1 for rest in group.rests)
    computed = sum(group.num_tokens for group in groups)
    layer = computed * (norms + products) + copied * kv_size * attention_number
    # After the last layer: a norm, its output and the scored rows of the output.
    after = computed * hidden * (norm_number + 3 * number)
    every = config.policy.activation_checkpoint_every
    checkpointed = math.ceil(shape.num_layers / every) if every else 0
    kept = (shape.num_layers - checkpointed) * layer + checkpointed * computed * hidden * number + after
    return kept, layer if checkpointed else 0


def logprob_chunk_tokens(config: TrainConfig, *, vocab_size: int) -> int:
    """Tokens whose full-vocabulary logits a rank holds at the same time."""
    number = MASTER_BYTES if config.policy.fp32_head else DTYPE_BYTES[config.policy.dtype]
    room = GPU_CHUNK_BYTES if config.policy.gpus_per_worker else CHUNK_BYTES
    return max(LOGPROB_CHUNK_TOKENS, room // (vocab_size * number))


def backward_bytes(
    config: TrainConfig, shape: ModelShape, *, kept: int, computed_again: int, is_frozen: bool = False
) -> int:
    """Largest number of bytes that the backward pass adds to what the forward pass keeps.

    Three moments compete. The head: the logits of a chunk, and its gradient, summed in float32 and then rounded. A
    layer: its activations if it is `computed_again`, its gradient with the float32 copy that is reduced over ranks,
    and the gradient of the head, which waits for that of the embedding. The root, at the end, when nothing of `kept`
    is left: the gradients of embedding and head, with their float32 copy. Weights that are frozen have no gradients.
    """
    number = DTYPE_BYTES[config.policy.dtype]
    head_number = MASTER_BYTES if config.policy.fp32_head else number
    logits = logprob_chunk_tokens(config, vocab_size=shape.vocab_size) * shape.vocab_size * head_number
    if is_frozen:
        return max(logits + min(SOFTMAX_SCRATCH_BYTES, 2 * logits), computed_again)
    head_gradient = shape.head_parameters * number
    unrounded = shape.head_parameters * MASTER_BYTES if number != MASTER_BYTES else 0
    at_head = logits + min(SOFTMAX_SCRATCH_BYTES, 2 * logits) + head_gradient + unrounded
    at_layer = computed_again + head_gradient + shape.layer_parameters * (number + MASTER_BYTES)
    at_root = shape.root_parameters * (number + MASTER_BYTES) - kept
    return max(at_head, at_layer, at_root)


def _whole_parameters(shape: ModelShape) -> int:
    """Number of a model's parameters that are gathered at one time."""
    return shape.root_parameters + min(GATHERED_LAYERS, shape.num_layers) * shape.layer_parameters


def engine_memory(config: TrainConfig, shape: ModelShape) -> EngineMemory:
    """Bytes of one rollout engine."""
    rollout, number_bytes = config.rollout, DTYPE_BYTES[config.rollout.dtype]
    samples = config.requests_per_engine
    tokens = rollout.held_tokens
    if tokens is None:
        tokens = min(samples, rollout.max_running or samples) * batch_shape(config).tokens_per_sample
    # A choice is the number of an expert, and with Routing.weights that of its factor.
    numbers = {Routing.live: 0, Routing.replay: 1, Routing.weights: 2}[config.policy.routing]
    saved = shape.body_parameters * (number_bytes - 1) if rollout.takes_quantized else 0  # 8 bits; the head keeps its
    return EngineMemory(
        weights=shape.num_parameters * number_bytes - saved,
        kv_cache=tokens * kv_bytes_per_token(shape, number_bytes),
        tokens=tokens,
        token_bytes=shape.num_layers * max(shape.kv_size // rollout.tp_size, 2 * shape.head_size) * number_bytes,
        route_bytes=rollout.tp_size * shape.num_layers * shape.experts_per_token * numbers * rollout.route_number_bytes,
    )


def model_shape(config: TrainConfig) -> ModelShape:
    """Sizes of the model of `config`; raises UnknownShapeError if they cannot be known without the network."""
    return shape_of(*model_tensors(config.model))


def critic_shape(config: TrainConfig) -> ModelShape | None:
    """Sizes of the critic's initial model, None without a critic; raises as `model_shape`."""
    if not config.has_critic:
        return None
    path = config.critic.path
    return model_shape(config) if path is None else directory_shape(model_directory(path, None))


def _prompt_cap(config: TrainConfig) -> int:
    """Tokens of the longest prompt."""
    if isinstance(config.data, ArithmeticDataConfig):
        # One token per digit of two operands, "+" and "=".
        return 2 * len(str(MAX_OPERAND)) + 2
    if isinstance(config.data, FileDataConfig):
        return config.data.max_prompt_tokens
    raise ValueError(f"no longest prompt is known for data={config.data.kind}")
