"""A transformers model -> the same model in exact arithmetic, or what of it has no exact form."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from rollout.exact import products
from rollout.exact.activations import SiLU, sigmoid
from rollout.exact.experts import Experts, is_part, replaced
from rollout.model.text_part import LENGTH_DEPENDENT_ROPE


def row_sums(values: Tensor) -> Tensor:
    """[N, V] -> [N, 1]: a row alone, which torch would split among threads, is added up like one of several."""
    if values.is_cuda:  # of sums `rollout/exact/gpu.py` has means only; not yet run on a GPU
        return values.mean(-1, keepdim=True) * values.shape[-1]
    return values.sum(-1, keepdim=True) if len(values) != 1 else torch.cat([values, values]).sum(-1, keepdim=True)[:1]


def log_softmax(logits: Tensor) -> Tensor:
    """[N, V] float32 -> [N, V], with the operations of the trainer's head (`trainer/scoring/logprob_head.py`)."""
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    return shifted - row_sums(shifted.exp()).log()


def make_exact(model: nn.Module) -> None:
    """Have `model` compute in exact arithmetic from now on, in place; names and parameters stay.

    Call it with its adapters in it and before it is sharded. Its attention is chosen where it is called. Raises
    ValueError with everything that has no exact form.
    """
    if problems := exact_problems(model):
        raise ValueError(f"rollout.exact=true has no exact form of {'; '.join(problems)}")
    for module in model.modules():
        if type(module).__name__ == "Linear" and isinstance(module, nn.Linear):
            module.__class__ = products.Linear
        elif is_part(module, "Experts"):
            module.__class__ = Experts
        elif is_part(module, "TopKRouter"):
            module.forward = replaced(module.forward, {functional.linear: products.linear})
        elif hasattr(module, "shared_expert_gate"):  # weighs the expert that all tokens share
            module.forward = replaced(module.forward, {Tensor.sigmoid: sigmoid})
        for name, child in module.named_children():
            if _is_silu(child):
                setattr(module, name, SiLU())


def exact_problems(model: nn.Module) -> list[str]:
    """The parts of `model` of whose arithmetic nothing is known."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        kind = type(module).__name__
        owns = next(iter(module.parameters(recurse=False)), None) is not None
        is_known = isinstance(module, nn.Embedding) or kind == "Linear" or kind.endswith("RMSNorm")
        is_known = is_known or is_part(module, "Experts") or is_part(module, "TopKRouter")
        if owns and not is_known:
            found.setdefault(kind, f"{kind} ({name})")
        # A function without weights: an activation, dropout, or a container of other modules.
        if not owns and not list(module.children()) and not _has_exact_form(module):
            found.setdefault(kind, f"{kind} ({name})")
    rope = getattr(getattr(model, "config", None), "rope_parameters", None) or {}
    if rope.get("rope_type") in LENGTH_DEPENDENT_ROPE:
        found["rope"] = f"rope_type={rope['rope_type']}, which changes with the longest sequence of a batch"
    return list(found.values())


def _is_silu(module: nn.Module) -> bool:
    return type(module).__name__ in ("SiLUActivation", "SiLU")


def _has_exact_form(module: nn.Module) -> bool:
    kind = type(module).__name__
    empty = isinstance(module, nn.Identity | nn.Dropout | nn.ModuleDict | nn.ParameterDict | nn.ModuleList)
    return empty or _is_silu(module) or kind.endswith("RotaryEmbedding")
