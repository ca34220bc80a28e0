"""Problems of starting a run that show in the environment, or in what a key names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from policy_cases import make_config, save_policy

from rollout.torch.config import TorchEngineConfig
from trainer.compose.compose import resolve
from trainer.compose.unknown_keys import wrong_value
from trainer.config.outputs import TrackingConfig, WandbMode
from trainer.config.paths import recipe_dir
from trainer.limits.machine import Machine
from trainer.models.directory import find_model
from trainer.start.checks import variable_problems
from trainer.start.task_check import _machine_problems


@pytest.mark.parametrize("value", ["foo", "Online"])
def test_a_mode_that_wandb_refuses_is_told_before_a_run(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    config = make_config(Path("model"))
    monkeypatch.setenv("WANDB_MODE", value)
    [problem] = variable_problems([config])
    assert f"$WANDB_MODE must be one of online, offline, disabled, dryrun, run, shared, got {value!r}" in str(problem)
    config.tracking = TrackingConfig(wandb=WandbMode.disabled)
    assert not [*variable_problems([config])]
    for good in ("offline", ""):
        monkeypatch.setenv("WANDB_MODE", good)
        assert not [*variable_problems([make_config(Path("model"))])]


def test_a_secret_that_is_named_and_not_set_is_told_before_a_function_misses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, own = make_config(Path("model")), make_config(Path("model"))
    own.reward.function = "judge.py:score"
    monkeypatch.setenv("PARITY_CHILD_ENV", "SET_KEY, OTHER_KEY,")
    monkeypatch.setenv("SET_KEY", "x")
    [problem] = variable_problems([config, own])
    assert problem.key == "$PARITY_CHILD_ENV" and "set, and not OTHER_KEY, got" in str(problem)
    assert not [*variable_problems([config])], "no function of the user's own reads them"
    monkeypatch.setenv("OTHER_KEY", "")
    assert not [*variable_problems([own])]


def test_too_many_workers_are_told_by_the_key_that_asks_for_most() -> None:
    machine = Machine(cpus=2, gpus=0, memory=1 << 60)

    def said(ranks: int, engines: int) -> str:
        config = make_config(Path("model"), num_workers=ranks)
        config.rollout = TorchEngineConfig(num_engines=engines)
        return str(next(_machine_problems(config, machine, trains=True), ""))

    assert said(1, 4000).startswith("rollout.num_engines must fit on this machine")
    assert "Lower it, or policy.num_workers, or name a Ray cluster" in said(1, 4000)
    assert said(1, 1) == ""


def test_an_adapter_as_a_model_is_called_one(tmp_path: Path) -> None:
    save_policy(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    problem = str(find_model("model.path", str(tmp_path), None))
    assert "It is an adapter: parity export <run> DIR, without --adapter" in problem
    assert f"checkpoint={tmp_path}" in problem


def test_a_list_for_a_text_is_answered_with_the_text_that_means_several() -> None:
    problem = str(wrong_value("policy.lora.targets", ["q_proj", "v_proj"], str, default="all"))
    assert "policy.lora.targets='.*(q_proj|v_proj)'. The default is all." in problem
    problem = str(wrong_value("data.train_path", ["a.jsonl", "b.jsonl"], str))
    assert "a pattern of files data.train_path='DIR/*.jsonl'" in problem and "regular" not in problem


def test_targets_that_sglang_cannot_hold_apart_are_refused() -> None:
    from trainer.start.task_check import task_problems

    def problems(*words: str) -> list[str]:
        found = resolve(recipe_dir() / "arithmetic_grpo.yaml", words, own_dir=None, multirun=False)
        [run] = found.runs
        assert run.config is not None, run.problems
        return [str(each) for each in task_problems([run.config], trains=True)]

    some = ("rollout=sglang", "policy.lora.rank=4", "policy.lora.targets='.*(q|v)_proj'")
    [problem] = problems(*some)
    assert problem.startswith("policy.lora.targets must choose q_proj and k_proj and v_proj in all layers or none")
    assert not problems(*some, "policy.lora.merge=true")
    assert not problems("rollout=torch", *some[1:])
    assert not problems(*some[:2], "policy.lora.targets=attention")
    [problem] = problems(*some[:2], "policy.lora.targets='.*layers.0.mlp.down_proj'")
    assert problem.startswith("policy.lora.targets must choose down_proj in all layers or none")


def test_an_adapter_for_servers_that_run_already_is_refused() -> None:
    words = ("rollout=sglang", "policy.lora.rank=4", "rollout.servers=['http://127.0.0.1:30000']")
    [run] = resolve(recipe_dir() / "arithmetic_grpo.yaml", words, own_dir=None, multirun=False).runs
    assert any("policy.lora.merge must be true with rollout.servers" in str(each) for each in run.problems)
