"""Every key that a user can set says what it means."""

from __future__ import annotations

from typing import get_type_hints

from algorithms.config.rules import Description, describe
from trainer.config.train import GROUPS, TrainConfig


def every_key() -> dict[str, Description]:
    """Dotted key -> its description, over all sections and all options of all groups."""
    kinds = get_type_hints(TrainConfig)
    options = [(name, kind) for name, kind in kinds.items() if name not in GROUPS]
    options += [(group, kind) for group, members in GROUPS.items() for kind in members.values()]
    return {row.key: row for name, kind in options for row in describe(kind, prefix=f"{name}.")}


def test_every_key_has_a_meaning() -> None:
    assert not [key for key, row in every_key().items() if not row.meaning]
