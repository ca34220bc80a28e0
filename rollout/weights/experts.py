"""Names of a mixture of experts: one matrix per expert in the files, one tensor of all experts in the model.

The trainer, transformers and the messages to engines hold `mlp.experts.gate_up_proj` [E, 2I, H], the rows of the gate
first, and `mlp.experts.down_proj` [E, H, I]. Files hold `mlp.experts.7.gate_proj.weight` [I, H] and so on. Does not
import torch.

E: experts of a layer, I: width of an expert, H: width of the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

FAMILIES = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
"""model_type of the mixtures whose weights are named like this, and whose layers transformers and SGLang compute
alike."""
EXPERT_NAME = ".experts."
"""Part of the names of expert weights, in files and in a model."""
EXPERTS = ".mlp.experts."
"""Part of the names of expert weights in a model."""
ROUTERS = (".mlp.gate", ".block_sparse_moe.gate")
"""Ends of the names of the layers that choose the experts, without ".weight"."""
GATE_UP, DOWN = "gate_up_proj", "down_proj"
FILE_PARTS = {
    "mlp": {GATE_UP: ("gate_proj", "up_proj"), DOWN: ("down_proj",)},
    "block_sparse_moe": {GATE_UP: ("w1", "w3"), DOWN: ("w2",)},
}
"""Module in the files, `mlp` in every model -> weight of the model -> matrices of an expert, in their order there."""
MIXTRAL = ".block_sparse_moe."
_MATRIX = re.compile(
    r"(?P<before>.*\.)(?P<block>mlp|block_sparse_moe)\.experts\.(?P<expert>\d+)\.(?P<part>\w+)\.weight"
)


class Mixture(NamedTuple):
    """The experts of each layer."""

    number: int
    per_token: int
    """Number of them that are chosen for a token."""


def mixture_of(text: Mapping[str, Any]) -> Mixture | None:
    """The experts of a model with this config.json; None for a dense model. Raises ValueError if it does not say."""
    if text.get("model_type") not in FAMILIES:
        return None
    number, per_token = text.get("num_experts") or text.get("num_local_experts"), text.get("num_experts_per_tok")
    if not isinstance(number, int) or not isinstance(per_token, int):
        raise ValueError("config.json does not say num_experts, or num_local_experts, and num_experts_per_tok")
    return Mixture(number, per_token)


class Stacked(NamedTuple):
    """A matrix of a file that is a part of a tensor of the model."""

    name: str
    """Name of the tensor in the model."""
    expert: int
    part: int
    """Number of the matrix among those of the expert in this tensor: 1 for the rows that follow the gate's."""


def in_model(name: str) -> str:
    """The name in the model of a tensor that files or an engine call `name`, unless it is an expert's."""
    return name.replace(MIXTRAL, ".mlp.")


def is_all_sparse(text: Mapping[str, Any]) -> bool:
    """True if every layer of a mixture with this config.json has experts."""
    return not text.get("mlp_only_layers") and text.get("decoder_sparse_step", 1) == 1


def is_experts(name: str) -> bool:
    """True if a tensor of this name in a model, [E, O, I], holds a matrix [O, I] of every expert."""
    return EXPERTS in name and name.endswith((GATE_UP, DOWN))


def sources(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Tensor of the model -> the tensors among `names`, of files, that make it up: expert after expert, or itself.

    A tensor of which a matrix is absent is left out.
    """
    found: dict[str, tuple[str, ...]] = {}
    stacked: dict[str, dict[tuple[int, int], str]] = {}
    for name in names:
        if (place := _place(name)) is None:
            found[in_model(name)] = (name,)
        else:
            stacked.setdefault(place.name, {})[place.expert, place.part] = name
    for name, parts in stacked.items():
        if len(parts) == (max(expert for expert, _ in parts) + 1) * parts_per_expert(name):
            found[name] = tuple(parts[key] for key in sorted(parts))
    return found


def matrices_of(name: str, tensor: Tensor) -> Tensor:
    """[M, O, I], every matrix in a tensor of experts [E, ., I] of this name: a view."""
    return tensor.view(len(tensor) * parts_per_expert(name), -1, tensor.shape[-1])


def parts_per_expert(name: str) -> int:
    """Number of matrices in a file that make up an expert's part of this tensor of the model."""
    return 2 if name.endswith(GATE_UP) else 1


def names_in_files(name: str, num_experts: int, *, block: str) -> list[tuple[str, ...]]:
    """The matrices of each expert that make up this tensor of the model, in files where `block` (see `FILE_PARTS`) is
    the module of the experts."""
    before, _, held = name.partition(EXPERTS)
    return [
        tuple(f"{before}.{block}.experts.{expert}.{part}.weight" for part in FILE_PARTS[block][held])
        for expert in range(num_experts)
    ]


def _place(name: str) -> Stacked | None:
    """Where the model holds the matrix `name` of a file; None if it is no matrix of an expert."""
    if (match := _MATRIX.fullmatch(name)) is None:
        return None
    for held, parts in FILE_PARTS[match["block"]].items():
        if match["part"] in parts:
            return Stacked(f"{match['before']}mlp.experts.{held}", int(match["expert"]), parts.index(match["part"]))
    return None
