"""Which layers get a LoRA adapter, and how many parameters it has. Does not import torch.

`trainer/policy/lora.py` makes the adapter; the plan and the check before a start need its size.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from rollout.types import AdapterSpec
from rollout.weights.files import tensor_shapes
from trainer.config.train import TrainConfig
from trainer.config.training import ArithmeticModelConfig, HFModelConfig, LoraConfig, SmolLM2ModelConfig
from trainer.limits.model_shape import (
    ARITHMETIC_MLP_FACTOR,
    SMOLLM2_SHAPE,
    ModelShape,
    UnknownShapeError,
    arithmetic_shape,
    layer_of,
)

ALL, ATTENTION = "all", "attention"
SMOLLM2_MLP_SIZE = 1536
_ATTENTION_PART = re.compile(r"\.(self_)?attn\.|\.attention\.")


def chosen_layers(linear: Iterable[str], targets: str) -> list[str]:
    """The names among `linear`, the linear layers of a model, that policy.lora.targets chooses.

    Only layers of the decoder's blocks can be chosen: embedding and head are not linear layers of a block.
    """
    blocks = [name for name in linear if layer_of(f"{name}.") is not None]
    if targets == ALL:
        return blocks
    if targets == ATTENTION:
        return [name for name in blocks if _ATTENTION_PART.search(f".{name}.")]
    return [name for name in blocks if re.fullmatch(targets, name)]


def linear_shapes(config: TrainConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape [out, in] of the linear layers of the model's blocks.

    Raises UnknownShapeError if they cannot be known without the network.
    """
    model = config.model
    if isinstance(model, ArithmeticModelConfig):
        return _block_shapes(arithmetic_shape(model), mlp_size=ARITHMETIC_MLP_FACTOR * model.hidden_size)
    if isinstance(model, SmolLM2ModelConfig):
        return _block_shapes(SMOLLM2_SHAPE, mlp_size=SMOLLM2_MLP_SIZE)
    if not isinstance(model, HFModelConfig) or not (directory := Path(model.path)).is_dir():
        raise UnknownShapeError(f"{model.description} is not a local directory, so its layers are not known here")
    return stored_linear_shapes(directory)


def stored_linear_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Those of the model in a directory. Raises UnknownShapeError if its files do not say them."""
    try:
        stored = tensor_shapes(directory)
    except (OSError, ValueError) as error:
        raise UnknownShapeError(f"{directory}: {error}") from error
    weights = {name.removesuffix(".weight"): shape for name, shape in stored.items() if name.endswith(".weight")}
    return {name: shape for name, shape in weights.items() if len(shape) == 2 and layer_of(f"{name}.") is not None}


def sent_adapter(config: TrainConfig, model_path: Path) -> AdapterSpec | None:
    """The adapter that the engines of a run get, for the model in a directory; None if they get all weights."""
    if not config.sends_adapter:
        return None
    lora = config.policy.lora
    layers = chosen_layers(stored_linear_shapes(model_path), lora.targets)
    return AdapterSpec(rank=lora.rank, alpha=lora.alpha, layers=tuple(layers))


def adapter_parameters(shapes: Mapping[str, tuple[int, ...]], lora: LoraConfig) -> int:
    """Parameters of an adapter beside linear layers of these shapes: rank x (in + out) of every chosen layer."""
    return sum(lora.rank * sum(shapes[name]) for name in chosen_layers(shapes, lora.targets))


def _block_shapes(shape: ModelShape, *, mlp_size: int) -> dict[str, tuple[int, ...]]:
    """Those of a Llama or Qwen2."""
    hidden, attention, kv = shape.hidden_size, shape.attention_size, shape.kv_size // 2
    of_block = {
        "self_attn.q_proj": (attention, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, attention), "mlp.gate_proj": (mlp_size, hidden), "mlp.up_proj": (mlp_size, hidden),
        "mlp.down_proj": (hidden, mlp_size),
    }  # fmt: skip
    return {f"model.layers.{n}.{name}": size for n in range(shape.num_layers) for name, size in of_block.items()}
