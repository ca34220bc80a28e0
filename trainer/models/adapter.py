"""The directory of an adapter, as peft writes it: is it a LoRA adapter of the model of a run?

Read before torch or transformers is imported, from adapter_config.json and the headers of the safetensors file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from algorithms.config import Problem
from rollout.weights.adapter import A_SENT, B_SENT
from rollout.weights.files import tensor_shapes
from trainer.rundir.weights_source import ADAPTER_CONFIG

PLAIN: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",), "bias": ("none",), "use_dora": (False, None), "use_rslora": (False, None),
    "rank_pattern": ({}, None), "alpha_pattern": ({}, None), "modules_to_save": ([], None),
    **dict.fromkeys(("alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication"), (None,)),
    **dict.fromkeys(("monteclora_config", "use_bdlora", "use_qalora"), (False, None)),
    "fan_in_fan_out": (False, None), "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}  # fmt: skip
"""Settings of peft -> the values with which an adapter is y = x W^T + (alpha / r) x A^T B^T and nothing else. PiSSA and
its like begin by changing W."""
ALL_LINEAR = "all-linear"
"""peft's name for all linear layers."""
MODEL_MARK = "parity_model_mark"
"""Key of the mark in the metadata of the file of an adapter."""
FILE_PREFIX = "base_model.model."
"""What peft puts before the names of the model's layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterFacts:
    """What an adapter's directory says without its numbers."""

    rank: int
    alpha: float


def read_adapter(
    key: str, directory: Path, shapes: Mapping[str, tuple[int, ...]] | None, *, mark: str | None = None
) -> AdapterFacts | Problem:
    """The facts of the adapter in `directory`, or the Problem of `key`.

    `shapes` are those of the model's linear layers [out, in], and `mark` tells its weights from others
    (`trainer/rundir/model_mark.py`); None if they are not known. An adapter that `parity export` wrote has the mark of
    the weights beside which it was trained.
    """

    def wrong(rule: str, remedy: str = "") -> Problem:
        return Problem(key=key, rule=rule, value=str(directory), remedy=remedy)

    try:
        described: Any = json.loads((directory / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        other = [f"{name}={described.get(name)}" for name, values in PLAIN.items() if described.get(name) not in values]
        rank, alpha = int(described["r"]), float(described["lora_alpha"])
        stored, own_mark = tensor_shapes(directory), _mark_in(directory)
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
    ranks = {shape[0] for name, shape in stored.items() if name.endswith(A_SENT)}
    if ranks != {rank}:
        return wrong(f"must hold matrices of the rank r={rank} in {ADAPTER_CONFIG}, not of {sorted(ranks)}")
    if unnamed := [layer for layer in layers if not _is_target(layer, described.get("target_modules"))]:
        return wrong(f"must name its layers in target_modules of {ADAPTER_CONFIG}, which leaves out {unnamed[0]}")
    if None not in (mark, own_mark) and mark != own_mark:
        return wrong("must be of these weights: it was trained beside others", "Name the recipe of its run.")
    for layer in layers if shapes is not None else ():
        assert shapes is not None
        if layer not in shapes:
            return wrong(f"must be of this model, which has no linear layer {layer}", "Name the recipe of its run.")
        found = (stored[f"{FILE_PREFIX}{layer}{B_SENT}"][0], stored[f"{FILE_PREFIX}{layer}{A_SENT}"][1])
        if found != shapes[layer]:
            rule = f"must be of this model: {layer} has shape {list(shapes[layer])}, the adapter is for {list(found)}"
            return wrong(rule, "Name the recipe of its run.")
    return AdapterFacts(rank=rank, alpha=alpha)


def _mark_in(directory: Path) -> str | None:
    """The mark of the weights beside which the adapter was trained, if its file has one."""
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="numpy") as file:
            return (file.metadata() or {}).get(MODEL_MARK)
    return None


def _is_target(layer: str, targets: object) -> bool:
    """True if peft's target_modules choose the layer: a list of ends of names, or a regular expression."""
    if isinstance(targets, str):
        return targets == ALL_LINEAR or re.fullmatch(targets, layer) is not None
    return isinstance(targets, list) and any(layer == each or layer.endswith(f".{each}") for each in targets)
