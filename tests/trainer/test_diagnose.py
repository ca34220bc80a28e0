"""Errors of recipe files."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.compose.compose import resolve

START = "defaults: [/train, override /model: arithmetic, override /data: arithmetic, _self_]\n"


def own_recipe(directory: Path, text: str) -> Path:
    path = directory / "mine.yaml"
    path.write_text(text)
    return path


def test_every_mistake_of_a_recipe_file_names_the_file(tmp_path: Path) -> None:
    path = own_recipe(
        tmp_path,
        "defaults: [/train, override /model: arithmetik, override /data: arithmetic, _self_]\n"
        "loss: {clip_hihg: 0.3, clip_low: abc}\n"
        "num_stepz: 4\n"
        "rollout: {engine_args: {mem_fraction_static: 0.5}}\n",
    )
    found = [str(p) for p in resolve(path, ("correction.capp=1",), own_dir=None, multirun=False).problems]
    assert [message for message in found if str(path) not in message] == [
        "correction.capp is not a key of correction=tis, got 1. Did you mean correction.cap? Keys of tis: level, cap, "
        "self_normalize."
    ]
    text = "\n".join(found)
    assert (
        f"{path}: model must be one of arithmetic, hf, smollm2, got 'arithmetik'. Did you mean model=arithmetic?"
        in text
    )
    assert f"{path}: loss.clip_hihg is not a key of loss=ppo_clip, got 0.3. Did you mean loss.clip_high?" in text
    assert f"{path}: loss.clip_low must be a number, got 'abc'." in text
    assert f"{path}: num_stepz is not a key, got 4. Did you mean run.num_steps?" in text
    assert len(found) == 5


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "loss: {clip_high: 0.3}\n",
            "defaults is missing; it must begin with /train or another recipe, and end with _self_.",
        ),
        (
            "defaults: [_self_, /train]\nloss: {clip_high: 0.3}\n",
            "defaults must begin with /train or another recipe, and end with _self_, got ['_self_', '/train']",
        ),
        (START + "loss: {clip_high: 0.3\n", "line 3"),
        ("defaults: [/train, /nosuch, _self_]\n", "Could not load 'nosuch'"),
        ("defaults: [/nosuch, _self_]\n", "nosuch.yaml is looked for in "),
        (START + "loss: {clip_high: 0.3}\nloss: {clip_low: 0.3}\n", "found duplicate key loss"),
        ("defaults: [/train, override /nosuch: tis, _self_]\n", "What defaults can choose: model, data, rollout, "),
        ("defaults: [/mine, _self_]\n", "defaults lead back to the recipe itself. Start from /train"),
        ("defaults: [/mien, _self_]\n", "Did you mean mine?"),
        ("- 1\n", "must be a mapping of keys to values, got [1]. Its first key is defaults"),
    ],
)
def test_a_recipe_file_that_cannot_be_used(tmp_path: Path, text: str, expected: str) -> None:
    path = own_recipe(tmp_path, text)
    found = [str(problem) for problem in resolve(path, (), own_dir=None, multirun=False).problems]
    assert len(found) == 1, found
    assert expected in found[0]
    assert str(path) in found[0]
