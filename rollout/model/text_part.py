"""What config.json says of the language model, in one place and under one set of names. Imports nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

USUAL_NAMES = {
    "n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
}  # fmt: skip
"""Field of config.json in the family of GPT-2 -> what other models call it."""


def text_part(described: Mapping[str, Any]) -> Mapping[str, Any]:
    """What config.json says of the language model, in the usual names: some models keep it in a nested config."""
    return {USUAL_NAMES.get(name, name): value for name, value in (described.get("text_config") or described).items()}
