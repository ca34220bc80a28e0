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
from rollout.model.text_part import text_part
from rollout.weights.experts import EXPERT_NAME, is_all_sparse, mixture_of
from rollout.weights.files import tensor_shapes
from trainer.config.training import ArithmeticModelConfig, HFModelConfig, ModelConfig, SmolLM2ModelConfig

ARITHMETIC_HEAD_SIZE = 32
ARITHMETIC_MLP_FACTOR = 4
LAYER_NAME = re.compile(r"\.layers\.(\d+)\.|\.h\.(\d+)\.")
CONFIG_FILE = "config.json"
WIDTHS = ("num_attention_heads", "hidden_size", "num_hidden_layers", "vocab_size")
"""Fields of config.json without which no size is known."""
HEAD_NAME = "lm_head.weight"


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
    head_size: int
    kv_size: int
    """Numbers that one token adds to the KV cache of one layer: keys and values of all KV heads."""
    is_tied: bool
    """True if the embedding is also the head."""
    idle_parameters: int
    """Number of parameters that a token does not meet: those of the experts that are not chosen for it."""
    num_experts: int
    """Number of experts of a layer; 0 for a dense model."""
    experts_per_token: int
    """Number of them that are chosen for a token; 0 for a dense model."""

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
        """Number of parameters that multiply a token: all but the head, the embedding, which is looked up, and the
        experts that are not chosen for it."""
        return self.num_parameters - self.head_parameters * (1 if self.is_tied else 2) - self.idle_parameters

    @property
    def matrix_parameters(self) -> int:
        """Number of parameters that one decode step reads, or the least of it for a mixture: body and head."""
        return self.body_parameters + self.head_parameters


LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""model_type of the models whose tensors follow from config.json."""
SMOLLM2 = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49_152, "tie_word_embeddings": True,
}  # fmt: skip
"""Sizes of the model that trainer/models/smollm2.py makes, for the plan of a run before the model is fetched."""


def model_tensors(model: ModelConfig) -> tuple[Mapping[str, Any], Mapping[str, tuple[int, ...]]]:
    """The fields of config.json that describe the language model, and tensor name -> shape; without the network.

    Raises UnknownShapeError if they are not known here.
    """
    if isinstance(model, HFModelConfig):
        return _stored(model_directory(model.path, model.revision))
    if isinstance(model, SmolLM2ModelConfig):
        return SMOLLM2, described_shapes(SMOLLM2)
    if not isinstance(model, ArithmeticModelConfig):
        raise UnknownShapeError(f"no size is known for model={model.kind}")
    # The Qwen2, or Qwen3-MoE, that trainer/models/base_model.py makes.
    hidden, experts = model.hidden_size, model.num_experts
    text = {
        "model_type": "qwen3_moe" if experts else "qwen2", "hidden_size": hidden,
        "intermediate_size": ARITHMETIC_MLP_FACTOR * hidden, "moe_intermediate_size": hidden, "num_experts": experts,
        "num_experts_per_tok": ARITHMETIC_MLP_FACTOR, "num_hidden_layers": model.num_layers,
        "num_attention_heads": hidden // ARITHMETIC_HEAD_SIZE, "vocab_size": len(TOKENS),
        "tie_word_embeddings": not experts,
    }  # fmt: skip
    return text, described_shapes(text)


def model_directory(path: str, revision: str | None) -> Path:
    """The directory of a model: `path` itself, or that of this name in the hub's cache.

    It may hold config.json alone. Raises UnknownShapeError if there is none.
    """
    if (directory := Path(path)).is_dir():
        return directory
    # Imported here because the import takes a quarter of a second, and most runs have their model on the disk.
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(path, CONFIG_FILE, revision=revision)
    except HFValidationError:  # no name of the hub
        found = None
    if not isinstance(found, str):
        raise UnknownShapeError(
            f"{path} is not a local directory, and the hub's cache has no {CONFIG_FILE} of it: its number of "
            f"parameters is missing (hf download {path} {CONFIG_FILE})"
        )
    return Path(found).parent


def directory_shape(directory: Path) -> ModelShape:
    """Sizes of a Hugging Face directory: config.json for the widths, the safetensors headers for the counts.

    Raises UnknownShapeError if the files do not contain the sizes.
    """
    return shape_of(*_stored(directory))


def _stored(directory: Path) -> tuple[Mapping[str, Any], Mapping[str, tuple[int, ...]]]:
    """`model_tensors` of a Hugging Face directory, whose weights may not be there yet."""
    try:
        described = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
        text = text_part(described)
        missing = [name for name in WIDTHS if text.get(name) is None]
        if missing:
            raise UnknownShapeError(f"{CONFIG_FILE} has no {', '.join(missing)}")
        mixture_of(text)  # raises for experts that no layer can have
        try:
            return text, tensor_shapes(directory)
        except FileNotFoundError:
            return text, described_shapes(text)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = str(error) if isinstance(error, UnknownShapeError) else f"{type(error).__name__}: {error}"
        raise UnknownShapeError(
            f"{directory} does not tell the sizes of the model ({CONFIG_FILE}, safetensors files): {reason}"
        ) from error


def described_shapes(text: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape of a model without its weights, from the fields of config.json.

    Raises UnknownShapeError if they do not follow from these.
    """
    kind, hidden, mlp = text.get("model_type"), text["hidden_size"], text.get("intermediate_size")
    experts = mixture_of(text)
    mlp = mlp if experts is None else text.get("moe_intermediate_size")
    if kind not in LLAMA_LIKE or mlp is None or not is_all_sparse(text):
        raise UnknownShapeError(f"the weights are not here, and a {kind} has its number of parameters in them alone")
    attention, kv, head = _attention_sizes(text)
    linear = {
        "self_attn.q_proj": (attention, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, attention),
    }  # fmt: skip
    if experts is not None:
        linear["mlp.gate"] = (experts.number, hidden)
    for owner in ["mlp."] if experts is None else [f"mlp.experts.{expert}." for expert in range(experts.number)]:
        parts = {"gate_proj": (mlp, hidden), "up_proj": (mlp, hidden), "down_proj": (hidden, mlp)}
        linear |= {f"{owner}{name}": shape for name, shape in parts.items()}
    biased = ["mlp."] * bool(text.get("mlp_bias")) + ["self_attn."] * bool(text.get("attention_bias"))
    biased += ["self_attn.q_", "self_attn.k_", "self_attn.v_"] * (kind == "qwen2")
    block: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in linear.items()}
    block |= {f"{name}.bias": shape[:1] for name, shape in linear.items() if name.startswith(tuple(biased))}
    block |= {f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    if kind in ("qwen3", "qwen3_moe"):
        block |= {f"self_attn.{name}_norm.weight": (head,) for name in "qk"}
    layers = range(text["num_hidden_layers"])
    return {
        "model.embed_tokens.weight": (text["vocab_size"], hidden),
        **{f"model.layers.{layer}.{name}": shape for layer in layers for name, shape in block.items()},
        "model.norm.weight": (hidden,),
        HEAD_NAME: (text["vocab_size"], hidden),
    }


def _attention_sizes(text: Mapping[str, Any]) -> tuple[int, int, int]:
    """Query heads x head size, KV heads x head size, head size. Of latent attention, which computes a key and a value
    for each head, those of keys: values have no more."""
    heads = text["num_attention_heads"]
    if "qk_nope_head_dim" in text:
        size = text["qk_nope_head_dim"] + text["qk_rope_head_dim"]
        return heads * size, heads * size, size
    head_size = text.get("head_dim") or text["hidden_size"] // heads
    return heads * head_size, (text.get("num_key_value_heads") or heads) * head_size, head_size


def shape_of(text: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> ModelShape:
    """Sizes from what `model_tensors` returns."""
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    # Some files contain the head although it is tied to the embedding: it counts once.
    is_tied = bool(text.get("tie_word_embeddings", False)) or HEAD_NAME not in sizes
    layers: dict[int, int] = {}
    for name, size in sizes.items():
        layer = layer_of(name)
        if layer is not None:
            layers[layer] = layers.get(layer, 0) + size
    attention, kv, head = _attention_sizes(text)
    of_experts = sum(size for name, size in sizes.items() if EXPERT_NAME in name)
    experts = mixture_of(text) if of_experts else None
    return ModelShape(
        num_parameters=sum(size for name, size in sizes.items() if not (is_tied and name == HEAD_NAME)),
        layer_parameters=max(layers.values(), default=0),
        num_layers=text["num_hidden_layers"],
        vocab_size=text["vocab_size"],
        hidden_size=text["hidden_size"],
        attention_size=attention,
        head_size=head,
        kv_size=2 * kv,
        is_tied=is_tied,
        idle_parameters=0 if experts is None else of_experts * (experts.number - experts.per_token) // experts.number,
        num_experts=0 if experts is None else experts.number,
        experts_per_token=0 if experts is None else experts.per_token,
    )


def layer_of(name: str) -> int | None:
    """Number of the decoder layer to which the tensor belongs; None outside of the layers."""
    match = LAYER_NAME.search(f".{name}")
    return None if match is None else int(match.group(1) or match.group(2))
