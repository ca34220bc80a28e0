"""Which layers get a LoRA adapter, and how many parameters it has. Does not import torch.

`trainer/policy/lora.py` makes the adapter; the plan and the check before a start need its size.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from rollout.types import AdapterSpec
from rollout.weights.experts import EXPERT_NAME, ROUTERS
from rollout.weights.files import tensor_shapes
from trainer.config.train import TrainConfig
from trainer.config.training import LoraConfig
from trainer.limits.model_shape import UnknownShapeError, layer_of, model_tensors

ALL, ATTENTION = "all", "attention"
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
    return _linear(model_tensors(config.model)[1])


def stored_linear_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Those of the model in a directory. Raises UnknownShapeError if its files do not say them."""
    try:
        return _linear(tensor_shapes(directory))
    except (OSError, ValueError) as error:
        raise UnknownShapeError(f"{directory}: {error}") from error


def _linear(stored: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The matrices of the blocks among the tensors of a model, without the router and the experts of a mixture."""
    weights = {name.removesuffix(".weight"): shape for name, shape in stored.items() if name.endswith(".weight")}
    others = ROUTERS if any(EXPERT_NAME in name for name in weights) else ()
    return {
        name: shape
        for name, shape in weights.items()
        if len(shape) == 2
        and layer_of(f"{name}.") is not None
        and EXPERT_NAME not in name
        and not name.endswith(others)
    }


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
