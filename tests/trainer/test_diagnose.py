"""Errors of recipe files, and that the diagnosis of an error merges exactly what Hydra merges."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from trainer.compose.catalog import find_recipe
from trainer.compose.compose import resolve
from trainer.compose.diagnose import diagnose
from trainer.compose.overrides import recipe_override
from trainer.compose.session import hydra_session
from trainer.config.train import GROUPS

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
        "correction.capp is not a key of correction=tis, got 1. Did you mean correction.cap? keys of tis: level, cap, "
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
        ("loss: {clip_high: 0.3}\n", "defaults must begin with /train and end with _self_"),
        ("defaults: [_self_, /train]\nloss: {clip_high: 0.3}\n", "defaults must begin with /train and end with _self_"),
        (START + "loss: {clip_high: 0.3\n", "line 3"),
        ("defaults: [/train, /nosuch, _self_]\n", "Could not load 'nosuch'"),
        (START + "loss: {clip_high: 0.3}\nloss: {clip_low: 0.3}\n", "found duplicate key loss"),
        ("defaults: [/train, override /nosuch: tis, _self_]\n", "nosuch"),
        ("- 1\n", "mine"),
    ],
)
def test_a_recipe_file_that_cannot_be_used(tmp_path: Path, text: str, expected: str) -> None:
    path = own_recipe(tmp_path, text)
    found = [str(problem) for problem in resolve(path, (), own_dir=None, multirun=False).problems]
    assert len(found) == 1, found
    assert expected in found[0]
    assert str(path) in found[0]


AGREEMENTS = [
    ("arithmetic_grpo", []),
    ("arithmetic_grpo", ["correction=mis", "correction.high=3", "rollout=torch", "run.num_steps=7", "~collect"]),
    ("arithmetic_dapo", ["+rollout.engine_args.a={b: 1}", "reward={correct: 2, incorrect: -2}"]),
    ("gsm8k_grpo_qwen2.5_0.5b", ["data.train_path='a b'", "policy.dtype=float32", "++optim.lr=0.1"]),
]


@pytest.mark.parametrize(("name", "words"), AGREEMENTS)
def test_the_diagnosis_merges_what_hydra_merges(name: str, words: list[str]) -> None:
    path = find_recipe(name, own_dir=None)
    assert isinstance(path, Path)
    whole = [*words, recipe_override(name)]
    with hydra_session(path, None) as loader:
        expected = compose(name, overrides=whole)
        parsed = OverridesParser.create(config_loader=loader).parse_overrides(whole)
        merged, problems = diagnose(path, parsed, loader=loader, failure=RuntimeError("nothing is wrong"))
    assert [problem.rule for problem in problems] == ["cannot be composed (nothing is wrong)"]
    assert merged is not None
    assert OmegaConf.to_container(merged, resolve=False) == OmegaConf.to_container(expected, resolve=False)
    for group in GROUPS:
        assert OmegaConf.is_missing(merged, group) == OmegaConf.is_missing(expected, group)
        if not OmegaConf.is_missing(merged, group):
            assert OmegaConf.get_type(merged[group]) is OmegaConf.get_type(expected[group])
