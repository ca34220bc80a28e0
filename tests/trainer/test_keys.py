"""Number of keys that a user can set, and that every key says what it means."""

from __future__ import annotations

from typing import get_type_hints

from algorithms.config.rules import Description, describe
from trainer.config.train import GROUPS, TrainConfig

MAX_KEYS = 173
"""Distinct keys over all options of all groups. A new key needs a recipe that sets it or a document that argues for it;
then this number follows. Four of them are tracking.name, group, tags and notes: W&B's own words for a run, which
people set for every run; docs/tracking.md argues for them. run.resume_from is for docs/resume.md: one checkpoint under
several corrections. policy.lora.merge is for docs/lora.md: what the engines get of an adapter.
sampling.stop is for docs/rollouts.md: base models whose template ends a turn with another token than theirs.
data.continue_assistant is for docs/data_and_reward.md: prompts that begin the answer.
run.profile_steps is for docs/speed.md: traces of chosen steps."""


def every_key() -> dict[str, Description]:
    """Dotted key -> its description, over all sections and all options of all groups."""
    kinds = get_type_hints(TrainConfig)
    options = [(name, kind) for name, kind in kinds.items() if name not in GROUPS]
    options += [(group, kind) for group, members in GROUPS.items() for kind in members.values()]
    return {row.key: row for name, kind in options for row in describe(kind, prefix=f"{name}.")}


def test_the_number_of_keys_does_not_grow() -> None:
    assert len(every_key()) == MAX_KEYS, "a key was added or removed: see MAX_KEYS"


def test_every_key_has_a_meaning() -> None:
    assert not [key for key, row in every_key().items() if not row.meaning]
