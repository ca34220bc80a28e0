"""Recipe + overrides -> TrainConfig: what is accepted, sweeps, what stops a start. test_refusals.py: what is not."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from compose_cases import config_of, messages, own_recipe, resolved

from algorithms.config import (
    Aggregation,
    BypassConfig,
    BypassLoss,
    CustomConfig,
    Level,
    MISConfig,
    PPOISConfig,
    TISConfig,
    VanillaISConfig,
)
from rollout.config import DynamicCollectConfig
from rollout.sglang.config import SGLangConfig
from rollout.torch.config import TorchEngineConfig
from trainer.compose.compose import resolve
from trainer.compose.overrides import directory_override, override_words
from trainer.config.train import GROUPS
from trainer.config.training import SmolLM2ModelConfig
from trainer.start.checks import start_problems


def test_a_recipe_gives_typed_values() -> None:
    config = config_of()
    assert config.run.recipe == "arithmetic_grpo"
    assert config.correction == TISConfig()
    assert config.loss.aggregation is Aggregation.seq_mean_token_mean
    assert isinstance(config.rollout, SGLangConfig)
    assert config.run.dir.startswith("outputs/arithmetic_grpo/20"), "interpolations are resolved"


@pytest.mark.parametrize("group", GROUPS)
def test_every_option_of_every_group_can_be_chosen(group: str) -> None:
    resolution = resolved(f"{group}={','.join(GROUPS[group])}", multirun=True)
    assert len(resolution.runs) == len(GROUPS[group])
    for run, option in zip(resolution.runs, GROUPS[group].values(), strict=True):
        if run.config is None:
            # model=hf and data=file have rules that this recipe breaks; that shows that they were chosen.
            assert {problem.key.partition(".")[0] for problem in run.problems} <= {"model", "data"}
        else:
            assert type(getattr(run.config, group)) is option


def test_keys_of_the_chosen_type_can_be_set() -> None:
    assert config_of("correction=tis", "correction.cap=3", "correction.level=sequence").correction == TISConfig(
        cap=3.0, level=Level.sequence
    )
    assert config_of("correction=mis", "correction.high=5").correction == MISConfig(high=5.0)
    bypass = config_of("correction=bypass", "correction.loss=reinforce", "correction.cap=4").correction
    assert bypass == BypassConfig(loss=BypassLoss.reinforce, cap=4.0)
    assert config_of("rollout=torch", "rollout.max_batch_size=7").rollout == TorchEngineConfig(max_batch_size=7)
    assert config_of("loss.dual_clip=3").loss.dual_clip == 3.0
    collect = config_of("collect.max_rounds=2", name="arithmetic_dapo").collect
    assert isinstance(collect, DynamicCollectConfig)
    assert collect.max_rounds == 2


def test_a_path_from_the_home_directory_needs_no_quotes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", f"{tmp_path}/it's me")
    assert config_of("run.dir=~/a, b").run.dir == f"{tmp_path}/it's me/a, b"


def test_values_of_python_are_written_as_words_that_mean_the_same() -> None:
    texts = {"tracking.project": 'it\'s {x}, "y" \\ [z]', "tracking.entity": "null", "run.dir": "a b\\'c"}
    values = {"correction": "mis", "optim.lr": 1e-5, "run.max_hours": None, "run.seed": 3,
              "loss.aggregation": Aggregation.token_mean, "policy.fp32_head": True,
              "rollout.engine_args": {"a": [1, 2.5, "x"]}, **texts}  # fmt: skip
    config = config_of(*override_words(values))
    assert config.correction == MISConfig() and config.optim.lr == 1e-5 and config.run.max_hours is None
    assert config.loss.aggregation is Aggregation.token_mean and config.run.seed == 3
    assert config.policy.fp32_head is True and config.rollout.engine_args == {"a": [1, 2.5, "x"]}
    assert {"tracking.project": config.tracking.project, "tracking.entity": config.tracking.entity,
            "run.dir": config.run.dir} == texts  # fmt: skip
    assert config_of(directory_override(Path("/back\\slash"))).run.dir == "/back\\slash"


def test_engine_options_pass_through_as_plain_values() -> None:
    config = config_of("+rollout.engine_args.mem_fraction_static=0.5", "+rollout.engine_args.json={a: [1, 2]}")
    assert isinstance(config.rollout, SGLangConfig)
    assert config.rollout.engine_args == {"mem_fraction_static": 0.5, "json": {"a": [1, 2]}}
    assert type(config.rollout.engine_args) is dict
    assert type(config.rollout.engine_args["json"]) is dict, "no OmegaConf container may leave the composition"


def test_interpolation_between_keys() -> None:
    config = config_of("loss.aggregation=fixed_length", "loss.fixed_length_tokens=${sampling.max_new_tokens}")
    assert config.loss.fixed_length_tokens == config.sampling.max_new_tokens


def test_a_recipe_can_start_from_another(tmp_path: Path) -> None:
    path = own_recipe(tmp_path, "defaults: [arithmetic_grpo, override /correction: mis, _self_]\nrun: {num_steps: 3}\n")
    resolution = resolve(path, (), own_dir=None, multirun=False)
    config = resolution.runs[0].config
    assert config is not None
    assert (config.run.recipe, config.run.num_steps, config.correction) == ("mine", 3, MISConfig())
    assert config.loss.aggregation is Aggregation.seq_mean_token_mean


def test_a_recipe_says_where_its_own_keys_stand(tmp_path: Path) -> None:
    path = own_recipe(tmp_path, "defaults: [arithmetic_grpo]\nrun: {num_steps: 3}\n")
    [problem] = resolve(path, (), own_dir=None, multirun=False).problems
    assert f"{path}: defaults must begin with /train or another recipe, and end with _self_" in str(problem)


def test_an_option_in_the_body_of_a_recipe_is_answered_with_its_place(tmp_path: Path) -> None:
    path = own_recipe(tmp_path, "defaults: [arithmetic_grpo, _self_]\nrollout: torch\n")
    [problem] = resolve(path, (), own_dir=None, multirun=False).problems
    assert "rollout=torch or rollout=vllm; in a recipe's defaults, override /rollout: torch." in str(problem)


def test_another_option_leaves_out_the_keys_that_the_recipe_gave_to_the_first(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1+1=", "answer": "2"}\n')
    data = (f"data.train_path={rows}", f"data.eval_path={rows}")
    other = config_of("model=smollm2", *data, name="gsm8k_grpo_qwen2.5_0.5b")
    assert other.model == SmolLM2ModelConfig()
    [found] = messages("model=smollm2", "model.path=x", *data, name="gsm8k_grpo_qwen2.5_0.5b")
    assert found.startswith("model.path is not a key of model=smollm2, got 'x'. It belongs to model=hf")
    path = own_recipe(tmp_path, "defaults: [arithmetic_grpo, _self_]\ncorrection: {cap: 4, level: sequence}\n")
    [run] = resolve(path, ("correction=mis",), own_dir=None, multirun=False).runs
    assert run.config is not None and run.config.correction == MISConfig(level=Level.sequence)


def test_a_recipe_that_chooses_another_option_drops_the_keys_of_the_recipe_below(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1+1=", "answer": "2"}\n')
    below = "defaults: [/train, override /model: hf, override /data: file, _self_]\nmodel: {path: no/model}\n"
    (tmp_path / "below.yaml").write_text(f"{below}data: {{train_path: {rows}, eval_path: {rows}}}\n")
    path = own_recipe(tmp_path, "defaults: [below, override /model: smollm2, _self_]\n")
    [run] = resolve(path, (), own_dir=None, multirun=False).runs
    assert run.config is not None and run.config.model == SmolLM2ModelConfig()
    own_recipe(tmp_path, "defaults: [below, override /model: smollm2, _self_]\nmodel: {path: no/model}\n")
    [problem] = resolve(path, (), own_dir=None, multirun=False).problems
    assert str(problem).startswith(f"{path}: model.path is not a key of model=smollm2, got 'no/model'. It belongs to")
    (tmp_path / "above.yaml").write_text("defaults: [mine, _self_]\nmodel: {revision: x}\n")
    [*_, problem] = resolve(tmp_path / "above.yaml", (), own_dir=None, multirun=False).problems
    assert str(problem).startswith(f"{tmp_path / 'above.yaml'}: model.revision is not a key of model=smollm2")


@pytest.mark.parametrize(
    ("defaults", "said"),
    [
        (
            "below, rollout: torch, _self_",
            "choose rollout twice, got 'rollout'. Start from one recipe only, and choose",
        ),
        ("arithmetic_grpo, arithmetic_ppo, _self_", "choose model twice, got 'model'. Start from one recipe only"),
        (
            "arithmetic_grpo, override /rollout: torch, /correction: mis, _self_",
            "choose correction twice, got 'correcti",
        ),
        (
            "override /correction: mis, arithmetic_grpo, _self_",
            "must name what the recipe starts from, arithmetic_grpo, before what it overrides, got 'override correction"
            ": mis'. Move - override /correction: mis behind - arithmetic_grpo.",
        ),
    ],
)
def test_a_choice_that_hydra_refuses_is_explained(tmp_path: Path, defaults: str, said: str) -> None:
    (tmp_path / "below.yaml").write_text("defaults: [arithmetic_grpo, override /rollout: torch, _self_]\n")
    path = own_recipe(tmp_path, f"defaults: [{defaults}]\n")
    [problem] = resolve(path, (), own_dir=None, multirun=False).problems
    assert str(problem).startswith(f"{path}: defaults {said}")


def test_the_directory_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolved("run.dir=a/b").runs[0].output_dir == tmp_path / "a/b"
    swept = resolved("hydra.sweep.dir=c", "run.seed=0,1", multirun=True)
    assert [swept.run_dir(index) for index in range(2)] == [tmp_path / "c/0", tmp_path / "c/1"]


def test_a_preset_is_an_option_whose_keys_can_be_set() -> None:
    resolution = resolved("correction=decoupled_geo_rs_token_tis", "correction.high=3")
    [run] = resolution.runs
    assert run.config is not None
    config = run.config.correction
    assert isinstance(config, CustomConfig)
    assert (config.high, config.reject.geometric_ratio) == (3.0, [0.999, 1.001])
    assert not messages("correction=glob(*)", multirun=True)


def test_a_resume_needs_a_run_or_an_empty_directory(tmp_path: Path) -> None:
    words = ("rollout=torch", f"run.dir={tmp_path / 'run'}", "run.resume=auto")
    assert not start_problems(resolved(*words))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    [problem] = start_problems(resolved(*words))
    assert str(problem).startswith("run.resume finds no run of Parity in run.dir")
    (tmp_path / "run" / "environment.json").write_text('{"versions": {"parity-rl": "1"}}')
    assert not start_problems(resolved(*words))
    [problem] = start_problems(resolved("rollout=torch", "run.resume=auto", "run.seed=1,2", multirun=True))
    assert "must be never in a sweep" in str(problem)
    [problem] = start_problems(resolved("rollout=torch", f"run.dir={tmp_path / 'run' / 'a' / 'b'}"))
    assert str(problem).startswith(f"run.dir must not lie in {tmp_path / 'run'}, a run, got ")
    assert not start_problems(resolved("rollout=torch", f"run.dir={tmp_path / 'run' / 'eval'}"), trains=False)


def test_the_best_is_kept_by_a_metric_of_the_saved_weights() -> None:
    best = "checkpoint.best_metric=eval/accuracy"
    assert not messages(best, "checkpoint.every=20", "eval.every=10", "run.num_steps=40")
    assert not messages(best, "checkpoint.every=4", "eval.every=6", "run.num_steps=13")
    [found] = messages(best, "checkpoint.every=4", "eval.every=6", "run.num_steps=12")
    assert "checkpoint.every=4, eval.every=6 and run.num_steps=12 none before the last is" in found
    assert "Set eval.every=4, or a divisor of it." in found
    [found] = messages(best, "checkpoint.every=5", "eval.every=5", "run.num_steps=5")
    assert "Set checkpoint.every below run.num_steps, or checkpoint.best_metric=null." in found
    [found] = messages(best, "checkpoint.every=4", "eval.every=0")
    assert found.startswith("checkpoint.best_metric needs checkpoints that are evaluated")
    [found] = messages(best, "checkpoint.every=0")
    assert "has no effect: nothing is saved" in found
    [found] = messages("checkpoint.best_metric=reward/mean")
    assert "must be a metric of the saved weights: eval/accuracy or eval/accuracy_sampled or null" in found


def test_evaluation_sets_and_their_sampling(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1+1=", "answer": "2"}\n')
    files = ("model=hf", "model.path=m", "data=file", f"data.train_path={rows}", f"data.eval_path={rows}")
    config = config_of(*files, f"+eval.sets.aime24={rows}", "eval.samples=32", "eval.temperature=0.6")
    assert config.eval.sets == {"aime24": str(rows)}
    assert (config.eval_sampling.temperature, config.eval_sampling.max_new_tokens) == (0.6, 24)
    assert config_of("eval.max_new_tokens=99").eval_sampling.max_new_tokens == 99
    assert config_of("sampling.temperature=0.5").eval_sampling.temperature == 0.5
    found = messages(*files, "+eval.sets.heldout=nosuch.jsonl", "eval.samples=0", "eval.temperature=0")
    named = ["eval.samples", "eval.temperature", "eval.sets.heldout"]
    assert [line.split()[0] for line in found] == named
    [found_file] = messages(*files, "eval.sets.aime=x")
    assert "eval.sets.aime must be an existing file" in found_file
    assert "eval.sets must be empty with data=arithmetic" in " ".join(messages(f"+eval.sets.a={rows}"))


def test_a_sweep_is_checked_before_its_first_run_and_names_the_combination() -> None:
    found = messages("correction=tis,mis", "correction.cap=3", "optim.lr=1e-3,0", "lose.x=1", multirun=True)
    assert found == [
        "lose.x is not a key, got 1. Did you mean loss?",
        "[optim.lr=0] optim.lr must be > 0, got 0.0. The default is 1e-06.",
        "[correction=mis] correction.cap is not a key of correction=mis, got 3. It belongs to correction=tis, "
        "correction=bypass; keys of mis: level, bound, low, high, reject, self_normalize, rejected_denominator.",
    ]


def test_a_sweep_gives_one_run_per_combination() -> None:
    resolution = resolved("correction=tis,mis", "run.seed=range(0,3)", "optim.lr=1e-4", multirun=True)
    assert not resolution.problems
    seen = [(type(run.config.correction), run.config.run.seed) for run in resolution.runs if run.config is not None]
    assert seen == [(kind, seed) for kind in (TISConfig, MISConfig) for seed in range(3)]
    assert resolution.runs[0].output_dir is not None
    assert resolution.runs[0].output_dir.name.startswith("multirun-")


def test_a_glob_sweep_covers_the_group() -> None:
    resolution = resolved("correction=glob(*is, exclude=[decoupled*,bypass*])", multirun=True)
    assert [type(run.config.correction) for run in resolution.runs if run.config is not None] == [
        MISConfig,
        PPOISConfig,
        TISConfig,
        VanillaISConfig,
    ]


@pytest.mark.scenario(33)
def test_a_missing_sglang_is_reported_with_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "sglang" else real(name, *a))
    broken = resolved("loss.clip_hihg=1")
    assert broken.problems, "the config has a problem of its own"
    assert [str(problem) for problem in start_problems(broken)] == [
        "rollout must be an engine that is installed, got 'sglang'. make setup in the checkout, or pip install -e "
        '".[sglang]" there, or use rollout=torch.'
    ]
    assert start_problems(resolved("rollout=torch")) == []
