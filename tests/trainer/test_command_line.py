"""Commands that Parity prints: a shell, and Hydra's grammar behind it, read the very path."""

from __future__ import annotations

import shlex

import pytest

from trainer.compose.compose import resolve
from trainer.compose.overrides import path_override
from trainer.compose.read import read_own_keys
from trainer.config.paths import recipe_dir
from trainer.study.config import StudyConfig
from trainer.text.plain import command_line

PATHS = [
    "outputs/a/2026-11-28_10-00-00",
    "my runs/one two",
    "a,b",
    "it's/here",
    'say "so"',
    "a(1)[2]{3}",
    "ä=b:c",
    'it\'s "both"',
    "one;two `x` & $y",
]


@pytest.mark.parametrize("path", PATHS)
def test_a_printed_path_is_read_as_it_is(path: str) -> None:
    [word] = shlex.split(command_line(path_override("run.dir", path)))
    [run] = resolve(recipe_dir() / "arithmetic_grpo.yaml", (word,), own_dir=None, multirun=False).runs
    assert run.config is not None and run.config.run.dir == path
    [word] = shlex.split(command_line(path_override("study.dir", path)))
    config, problems = read_own_keys(StudyConfig, [word], section="study")
    assert not problems and config.dir == path
    assert shlex.split(command_line("parity", "resume", path)) == ["parity", "resume", path]
