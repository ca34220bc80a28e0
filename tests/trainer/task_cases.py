"""A recipe of one's own with its model, data and functions, for tests of what is refused before a start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from data_cases import byte_tokenizer
from policy_cases import save_policy

from trainer.compose.compose import resolve
from trainer.config.train import TrainConfig

RECIPE = """
defaults: [/arithmetic_grpo, override /model: hf, override /data: file, override /rollout: torch, _self_]
model: {path: tiny}
data: {train_path: rows.jsonl, eval_path: rows.jsonl, prompt_key: q, answer_key: a, max_prompt_tokens: 60}
reward: {function: "own.py:reward"}
"""
REWARDS = """
def reward(response, answer): return float(response == answer)
def raises(response, answer): raise KeyError(answer)
def of_verl(data_source, solution_str, ground_truth): return 1.0
def on_plain(response, prompt):
    if "[user]" in prompt: raise ValueError("it is templated")
    return 1.0
"""
FORMS = """
def templated(response, prompt):
    assert prompt == "[user]0?[assistant]"
    return 1.0
def nevertemplated(response, prompt):
    assert "user" not in prompt
    return 1.0
def instructed(response, prompt):
    assert prompt == "0? Count"
    return 1.0
def neverinstructed(response, prompt):
    assert "Count" not in prompt
    return 1.0
"""
TURNS = """
async def turns(episode):
    await episode.generate()
async def fails(episode):
    raise KeyError("turn")
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a recipe of one's own, its model of a context of 128 tokens, its data and its reward."""
    directory = tmp_path_factory.mktemp("own")
    byte_tokenizer(save_policy(directory / "tiny", vocab_size=300))
    rows = [{"q": f"{number}?", "a": str(number)} for number in range(30)]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "own.py").write_text(REWARDS)
    (directory / "forms.py").write_text(FORMS)
    (directory / "turns.py").write_text(TURNS)
    (directory / "empty.jsonl").touch()
    (directory / "broken.jsonl").write_text('{"q": "1?", "a": "1"}\n{"q": "2?"\n')
    chat = {"q": [{"role": "user", "content": "1?"}], "a": "1"}
    (directory / "chat.jsonl").write_text(json.dumps(chat) + "\n")
    away = RECIPE.replace("/model: hf", "/model: smollm2").replace("model: {path: tiny}\n", "")
    (directory / "away.yaml").write_text(away)
    (directory / "mine.yaml").write_text(RECIPE)
    return directory


@pytest.fixture
def own(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(made)
    return made


def config_of(own: Path, *words: str) -> TrainConfig:
    [found] = resolve(own / "mine.yaml", words, own_dir=None, multirun=False).runs
    assert found.config is not None, found.problems
    return found.config


def edit_config(directory: Path, **fields: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
