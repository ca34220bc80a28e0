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

FAMILIES = ("deepseek_v3", "glm4_moe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
"""model_type of the mixtures whose weights are named like this."""
BIASED = ("deepseek_v3", "glm4_moe")
"""Those of them whose routers have a bias (see `ROUTER_BIAS`)."""
EXPERT_NAME = ".experts."
"""Part of the names of expert weights, in files and in a model."""
EXPERTS = ".mlp.experts."
"""Part of the names of expert weights in a model."""
ROUTERS = (".mlp.gate", ".block_sparse_moe.gate")
"""Ends of the names of the layers that choose the experts, without ".weight"."""
ROUTER_BIAS = "e_score_correction_bias"
"""Name in a router of what is added to the scores for the choice alone, [E] float32: no gradient comes to it."""
GATE_UP, DOWN = "gate_up_proj", "down_proj"
MATRICES = {"mlp": ("gate_proj", "up_proj", "down_proj"), "block_sparse_moe": ("w1", "w3", "w2")}
"""Module in the files, `mlp` in every model -> the matrices of an expert: two of its `GATE_UP`, one of its `DOWN`."""
MIXTRAL = ".block_sparse_moe."
_MATRIX = re.compile(r"(.*\.)(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w3|w2)\.weight")


class Mixture(NamedTuple):
    """The experts of each layer that has some."""

    number: int
    per_token: int
    """Number of them that are chosen for a token."""
    dense_layers: int = 0
    """Number of the first layers, which have none."""


def mixture_of(text: Mapping[str, Any]) -> Mixture | None:
    """The experts of a model with this config.json; None for a dense model. Raises ValueError if it does not say."""
    if text.get("model_type") not in FAMILIES:
        return None
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    number = next((text[name] for name in names if text.get(name)), None)
    per_token, dense_layers = text.get("num_experts_per_tok"), text.get("first_k_dense_replace") or 0
    if not isinstance(number, int) or not isinstance(per_token, int):
        raise ValueError(f"a {text['model_type']} needs one of {', '.join(names)}, and num_experts_per_tok")
    if not 0 < per_token <= number:
        raise ValueError(f"num_experts_per_tok={per_token} must be 1 to {number}, the number of experts of a layer")
    return Mixture(number, per_token, dense_layers)


def in_model(name: str) -> str:
    """The name in the model of a tensor that files or an engine call `name`, unless it is an expert's."""
    return name.replace(MIXTRAL, ".mlp.")


def is_all_sparse(text: Mapping[str, Any]) -> bool:
    """True if every layer of a Qwen mixture with this config.json has experts."""
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
        if (match := _MATRIX.fullmatch(name)) is None:
            found[in_model(name)] = (name,)
            continue
        before, expert, matrix = match.groups()
        part = next(parts.index(matrix) for parts in MATRICES.values() if matrix in parts)
        held = f"{before}mlp.experts.{DOWN if part == 2 else GATE_UP}"
        stacked.setdefault(held, {})[int(expert), part] = name
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
    """The matrices of each expert that make up this tensor of the model, in files where `block` (see `MATRICES`) is
    the module of the experts."""
    parts = MATRICES[block][:2] if name.endswith(GATE_UP) else MATRICES[block][2:]
    experts = (f"{name.partition(EXPERTS)[0]}.{block}.experts.{expert}" for expert in range(num_experts))
    return [tuple(f"{expert}.{part}.weight" for part in parts) for expert in experts]
