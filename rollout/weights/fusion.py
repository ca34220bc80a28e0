"""How engines fuse weights: names of their parameters -> the Hugging Face tensors that lie in them, in order.

SGLang and vLLM stack the same layers under the same names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rollout.engine import LayoutError
from rollout.weights.adapter import A_SENT, B_SENT
from rollout.weights.experts import ROUTER_BIAS, in_model, is_experts
from rollout.weights.packed_weights import listed
from rollout.weights.stacked import EXPERT_WEIGHTS, STACKED

VOCABULARY_PARAMETERS = ("embed_tokens.weight", "lm_head.weight")
"""Parameters whose rows engines pad with zeros."""
TIED_NAME = "lm_head.weight"
EMBEDDING_NAME = "model.embed_tokens.weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fusion:
    """The HF tensors that make up each parameter of the engine."""

    sources: dict[str, tuple[str, ...]]
    """Engine parameter -> HF tensors, stacked along the first dimension."""
    tied: bool
    """True if lm_head was sent although the engine has no such parameter: its bytes must equal the embedding's."""


def plan_fusion(held: Iterable[str], *, sent: Iterable[str]) -> Fusion:
    """Match the names of the engine's parameters, `held`, with those of the HF tensors, `sent`.

    Raises LayoutError naming every tensor that is missing or unknown, and engine parameters that no rule explains (a
    model with unknown fusing).
    """
    available = set(sent)
    sources: dict[str, tuple[str, ...]] = {}
    used: set[str] = set()
    missing: list[str] = []
    unexplained: list[str] = []
    for name in held:
        parts = (name,) if name in available else _unstack(name)
        absent = [part for part in parts if part not in available]
        used.update(parts)
        if not absent:
            sources[name] = parts
        elif len(absent) == len(parts) and not _looks_plain(name, parts):
            unexplained.append(name)
        else:
            missing += absent
    tied = TIED_NAME in available - used and EMBEDDING_NAME in sources
    unknown = available - used - ({TIED_NAME} if tied else set())
    problems = []
    if unexplained:
        problems.append(
            f"engine parameters that no rule makes up from HF tensors: {listed(unexplained)} (known: models that "
            f"stack {', '.join(STACKED)} and experts; weight syncs of this model cannot be verified)"
        )
    if missing:
        problems.append(f"missing tensors: {listed(missing)}")
    if unknown:
        problems.append(f"tensors that the engine does not have: {listed(unknown)}")
    if problems:
        raise LayoutError("; ".join(problems))
    return Fusion(sources=sources, tied=tied)


def _unstack(name: str) -> tuple[str, ...]:
    """HF tensors behind a parameter of the engine: model.layers.0.mlp.gate_up_proj.weight -> gate_proj, up_proj."""
    parts = in_model(name).split(".")
    if parts[-1] in EXPERT_WEIGHTS:
        return (".".join([*parts[:-1], EXPERT_WEIGHTS[parts[-1]]]),)
    for fused, sources in STACKED.items():
        if fused in parts:
            at = parts.index(fused)
            return tuple(".".join([*parts[:at], source, *parts[at + 1 :]]) for source in sources)
    return (".".join(parts),)


def _looks_plain(name: str, parts: Sequence[str]) -> bool:
    """True if a rule covers the parameter, so that absent parts are missing tensors and not an unknown model."""
    plain = (
        ".norm.weight",
        "_proj.weight",
        "_proj.weight_scale",
        "_proj.bias",
        "layernorm.weight",
        "_norm.weight",
        ".mlp.gate.weight",
        ROUTER_BIAS,
        "shared_expert_gate.weight",
        A_SENT,
        B_SENT,
        *VOCABULARY_PARAMETERS,
    )
    return len(parts) > 1 or is_experts(parts[0]) or f".{parts[0]}".endswith(plain)
