"""Layers of a Hugging Face model that engines hold as one, or under other names. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterable

from rollout.weights.adapter import last_part
from rollout.weights.experts import DOWN, GATE_UP

STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Fused module of SGLang and vLLM -> modules of the Hugging Face model, in the order of their rows."""
EXPERT_WEIGHTS = {"w13_weight": GATE_UP, "w2_weight": DOWN}
"""Weight of the engine's experts -> weight of the model's: both hold [E, 2I, H], the gate first, and [E, H, I]."""


def parts_apart(chosen: Iterable[str], *, among: Iterable[str]) -> str:
    """Layers `among` all of which an engine would hold a part only, as the ends of their names; "" if there are none.

    `chosen` are the layers with an adapter: those of one name have it in all blocks or in none, and so have layers that
    are held as one.
    """
    taken, everywhere = set(chosen), list(among)
    ends = {last_part(name) for name in taken}
    groups = [group for group in STACKED.values() if ends & set(group)]
    groups += [(end,) for end in sorted(ends) if not any(end in group for group in groups)]
    for group in groups:
        if {name for name in everywhere if last_part(name) in group} - taken:
            return " and ".join(group)
    return ""
