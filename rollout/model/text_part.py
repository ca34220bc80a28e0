"""What config.json says of the language model, in one place and under one set of names. Imports nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

USUAL_NAMES = {
    "n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
}  # fmt: skip
"""Field of config.json in the family of GPT-2 -> what other models call it."""
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope", "su")
"""Types of rotary embeddings that change with the longest sequence of a batch; su is an older name of longrope."""


def text_part(described: Mapping[str, Any]) -> Mapping[str, Any]:
    """What config.json says of the language model, in the usual names: some models keep it in a nested config."""
    return {USUAL_NAMES.get(name, name): value for name, value in (described.get("text_config") or described).items()}


def rope_length(model: Mapping[str, Any]) -> tuple[int | None, str]:
    """(Tokens, type) of the rotary embedding of a model with this `text_part`: if a sequence of a batch is longer than
    these tokens, all of the batch have other positions. None: no sequence changes the positions of others.
    """
    rope = model.get("rope_parameters") or model.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in LENGTH_DEPENDENT_ROPE:
        return None, kind
    longest, original = model.get("max_position_embeddings"), "original_max_position_embeddings"
    return (longest if kind == "dynamic" else rope.get(original) or model.get(original) or longest), kind
