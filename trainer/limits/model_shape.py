"""Sizes of a causal language model, from its files or its config, without loading the model. Does not import torch.

The plan (`trainer/limits/estimate.py`), the floors (`trainer/limits/floors.py`) and the planner's cost of a bin use
these sizes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.data.arithmetic import TOKENS
from rollout.weights.files import tensor_shapes
from trainer.config.training import ArithmeticModelConfig

ARITHMETIC_HEAD_SIZE = 32
ARITHMETIC_MLP_FACTOR = 4
LAYER_NAME = re.compile(r"\.layers\.(\d+)\.|\.h\.(\d+)\.")
HEAD_NAME = "lm_head.weight"
EXPERT_NAME = ".experts."
"""Part of the parameter names in a mixture of experts, of which a token uses only some."""


class UnknownShapeError(ValueError):
    """The model's size cannot be known yet; the message gives the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Sizes of a causal language model."""

    num_parameters: int
    """Number of parameters; tied parameters count once."""
    layer_parameters: int
    """Number of parameters of the largest decoder layer."""
    num_layers: int
    vocab_size: int
    hidden_size: int
    attention_size: int
    """Query heads x head size."""
    kv_size: int
    """Numbers that one token adds to the KV cache of one layer: keys and values of all KV heads."""
    is_tied: bool
    """True if the embedding is also the head."""
    is_dense: bool
    """True if a token uses every parameter of the layers; False for a mixture of experts."""

    @property
    def root_parameters(self) -> int:
        """Number of parameters outside the layers: embedding, head, final norm."""
        return max(0, self.num_parameters - self.num_layers * self.layer_parameters)

    @property
    def head_parameters(self) -> int:
        """Number of parameters of the head, which multiplies every token whose next token is scored or sampled."""
        return self.vocab_size * self.hidden_size

    @property
    def body_parameters(self) -> int:
        """Number of parameters that multiply every token: all but the head and the embedding, which is looked up."""
        return self.num_parameters - self.head_parameters * (1 if self.is_tied else 2)

    @property
    def matrix_parameters(self) -> int:
        """Number of parameters that one decode step reads: body and head."""
        return self.body_parameters + self.head_parameters


SMOLLM2_SHAPE = ModelShape(
    num_parameters=134_515_008,
    layer_parameters=3_540_096,
    num_layers=30,
    vocab_size=49_152,
    hidden_size=576,
    attention_size=576,
    kv_size=384,
    is_tied=True,
    is_dense=True,
)
"""Sizes of the Llama that trainer/run/smollm2.py makes, for the plan of a run before the model is fetched."""


def arithmetic_shape(model: ArithmeticModelConfig) -> ModelShape:
    """Sizes of the Qwen2 that trainer/run/base_model.py makes: biases on q, k and v, embedding and head tied."""
    hidden, mlp = model.hidden_size, ARITHMETIC_MLP_FACTOR * model.hidden_size
    attention = 4 * hidden * hidden + 3 * hidden
    layer = attention + 3 * hidden * mlp + 2 * hidden
    width = hidden // ARITHMETIC_HEAD_SIZE * ARITHMETIC_HEAD_SIZE
    return ModelShape(
        num_parameters=len(TOKENS) * hidden + model.num_layers * layer + hidden,
        layer_parameters=layer,
        num_layers=model.num_layers,
        vocab_size=len(TOKENS),
        hidden_size=hidden,
        attention_size=width,
        kv_size=2 * width,
        is_tied=True,
        is_dense=True,
    )


def directory_shape(directory: Path) -> ModelShape:
    """Sizes of a Hugging Face directory: config.json for the widths, the safetensors headers for the counts.

    Raises UnknownShapeError if the files do not contain the sizes.
    """
    described_at = directory / "config.json"
    try:
        described = json.loads(described_at.read_text(encoding="utf-8"))
        return _shape(text_part(described), directory)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = f"config.json has no {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
        raise UnknownShapeError(
            f"{directory} does not tell the sizes of the model (config.json, safetensors files): {reason}"
        ) from error


def _shape(text: Mapping[str, Any], directory: Path) -> ModelShape:
    """Sizes from the fields of config.json that describe the language model, and from the tensors of `directory`."""
    heads, hidden = text["num_attention_heads"], text["hidden_size"]
    head_size = text.get("head_dim") or hidden // heads
    sizes = {name: math.prod(shape) for name, shape in tensor_shapes(directory).items()}
    # Some files contain the head although it is tied to the embedding: it counts once.
    is_tied = bool(text.get("tie_word_embeddings", False)) or HEAD_NAME not in sizes
    layers: dict[int, int] = {}
    for name, size in sizes.items():
        layer = layer_of(name)
        if layer is not None:
            layers[layer] = layers.get(layer, 0) + size
    return ModelShape(
        num_parameters=sum(size for name, size in sizes.items() if not (is_tied and name == HEAD_NAME)),
        layer_parameters=max(layers.values(), default=0),
        num_layers=text["num_hidden_layers"],
        vocab_size=text["vocab_size"],
        hidden_size=hidden,
        attention_size=heads * head_size,
        kv_size=2 * text.get("num_key_value_heads", heads) * head_size,
        is_tied=is_tied,
        is_dense=not any(EXPERT_NAME in name for name in sizes),
    )


def text_part(described: Mapping[str, Any]) -> Mapping[str, Any]:
    """What config.json says of the language model: models with vision or audio keep it in a nested config."""
    return described.get("text_config") or described


def layer_of(name: str) -> int | None:
    """Number of the decoder layer to which the tensor belongs; None outside of the layers."""
    match = LAYER_NAME.search(f".{name}")
    return None if match is None else int(match.group(1) or match.group(2))
