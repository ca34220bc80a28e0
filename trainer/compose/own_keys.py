"""Words `section.key=value` of a command that has keys of its own -> its config, or every problem of theirs.

Used by `trainer/cli/study.py`, whose keys are not part of a run's config.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from algorithms.config import Checked, ConfigError, Problem
from trainer.compose.keys import accepted, field_names, nearest

Config = TypeVar("Config", bound=Checked)


def read_own_keys(kind: type[Config], words: Sequence[str], *, section: str) -> tuple[Config, list[Problem]]:
    """`section.key=value` words as a `kind`, and every problem; with a problem the config has its defaults."""
    root = OmegaConf.structured(kind)
    hints, names = get_type_hints(kind), field_names(kind)
    problems = []
    for word in words:
        key, is_set, value = word.partition("=")
        name = key.removeprefix(f"{section}.")
        if name not in names:
            close = nearest(name, names)
            hint = f"Did you mean {section}.{close}? " if close else ""
            remedy = f"{hint}Its keys: {', '.join(names)}."
            problems.append(Problem(key=key, rule=f"is not a key of {section}", value=value, remedy=remedy))
            continue
        try:
            root = OmegaConf.merge(root, OmegaConf.from_dotlist([f"{name}={value}"]))
        except OmegaConfBaseException:
            problems.append(Problem(key=key, rule=f"must be {accepted(hints[name])}", value=value if is_set else None))
    try:
        made = OmegaConf.to_object(root)
    except ConfigError as error:
        return kind(), problems + [problem.under(section) for problem in error.problems]
    assert isinstance(made, kind)
    return made, problems
