"""Shared by the tests of composition: a recipe, its config, and the messages about it."""

from __future__ import annotations

from pathlib import Path

from trainer.compose.catalog import find_recipe
from trainer.compose.compose import Resolution, resolve
from trainer.config.train import TrainConfig


def recipe(name: str) -> Path:
    found = find_recipe(name, own_dir=None)
    assert isinstance(found, Path), found
    return found


def resolved(*words: str, name: str = "arithmetic_grpo", multirun: bool = False) -> Resolution:
    return resolve(recipe(name), words, own_dir=None, multirun=multirun)


def config_of(*words: str, name: str = "arithmetic_grpo") -> TrainConfig:
    resolution = resolved(*words, name=name)
    assert not resolution.problems, [str(problem) for problem in resolution.problems]
    config = resolution.runs[0].config
    assert config is not None
    return config


def messages(*words: str, name: str = "arithmetic_grpo", multirun: bool = False) -> list[str]:
    return [str(problem) for problem in resolved(*words, name=name, multirun=multirun).problems]


def own_recipe(directory: Path, text: str, *, name: str = "mine") -> Path:
    path = directory / f"{name}.yaml"
    path.write_text(text)
    return path
