"""The directory of an adapter, as peft writes it: is it a LoRA adapter of the model of a run?

Read before torch or transformers is imported, from adapter_config.json and the headers of the safetensors file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from algorithms.config import Problem
from rollout.weights.adapter import A_SENT, B_SENT
from trainer.limits.model_shape import tensor_shapes
from trainer.rundir.weights_source import ADAPTER_CONFIG

PLAIN: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",), "bias": ("none",), "use_dora": (False, None), "use_rslora": (False, None),
    "rank_pattern": ({}, None), "alpha_pattern": ({}, None), "modules_to_save": ([], None),
    "fan_in_fan_out": (False, None),
}  # fmt: skip
"""Settings of peft -> the values with which an adapter is y = x W^T + (alpha / r) x A^T B^T and nothing else."""
FILE_PREFIX = "base_model.model."
"""What peft puts before the names of the model's layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterFacts:
    """What an adapter's directory says without its numbers."""

    rank: int
    alpha: float
    layers: tuple[str, ...]
    """Names of the model's layers that it belongs to."""


def read_adapter(key: str, directory: Path, shapes: Mapping[str, tuple[int, ...]] | None) -> AdapterFacts | Problem:
    """The facts of the adapter in `directory`, or the Problem of `key`.

    `shapes` are those of the model's linear layers [out, in]; None if they are not known.
    """

    def wrong(rule: str, remedy: str = "") -> Problem:
        return Problem(key=key, rule=rule, value=str(directory), remedy=remedy)

    try:
        described: Any = json.loads((directory / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        other = [f"{name}={described.get(name)}" for name, values in PLAIN.items() if described.get(name) not in values]
        rank, alpha = int(described["r"]), float(described["lora_alpha"])
        stored = tensor_shapes(directory)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return wrong(f"must be the directory of an adapter that can be read ({type(error).__name__}: {error})")
    if other:
        return wrong(
            f"must be a plain LoRA adapter, without {', '.join(other)}", "Merge it with peft, and name the model."
        )
    layers = [name.removeprefix(FILE_PREFIX).removesuffix(A_SENT) for name in stored if name.endswith(A_SENT)]
    expected = {f"{FILE_PREFIX}{layer}{end}" for layer in layers for end in (A_SENT, B_SENT)}
    if not layers or expected != set(stored):
        return wrong(f"must hold {A_SENT} and {B_SENT} of linear layers, and nothing else")
    for layer in layers if shapes is not None else ():
        assert shapes is not None
        if layer not in shapes:
            return wrong(f"must be of this model, which has no linear layer {layer}", "Name the recipe of its run.")
        found = (stored[f"{FILE_PREFIX}{layer}{B_SENT}"][0], stored[f"{FILE_PREFIX}{layer}{A_SENT}"][1])
        if found != shapes[layer]:
            rule = f"must be of this model: {layer} has shape {list(shapes[layer])}, the adapter is for {list(found)}"
            return wrong(rule, "Name the recipe of its run.")
    return AdapterFacts(rank=rank, alpha=alpha, layers=tuple(layers))
