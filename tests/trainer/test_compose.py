"""Recipe + overrides -> TrainConfig: what is accepted, and every message about what is not."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

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
from rollout.config import DynamicCollectConfig, SGLangConfig, TorchEngineConfig
from trainer.compose.catalog import find_recipe
from trainer.compose.compose import Resolution, resolve
from trainer.compose.read import build_config
from trainer.compose.session import empty_root, plain
from trainer.compose.start import start_problems
from trainer.config.components import SmolLM2ModelConfig
from trainer.config.train import GROUPS, TrainConfig


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


# --------------------------------------------------------------------------------------------- what is accepted


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


def test_the_directory_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolved("run.dir=a/b").runs[0].output_dir == tmp_path / "a/b"
    swept = resolved("hydra.sweep.dir=c", "run.seed=0,1", multirun=True)
    assert [swept.run_dir(index) for index in range(2)] == [tmp_path / "c/0", tmp_path / "c/1"]


# ---------------------------------------------------------------------------------------------- what is refused

REFUSALS = {
    "keys that do not exist": [
        (
            "loss.clip_hihg=0.3",
            "loss.clip_hihg is not a key of loss=ppo_clip, got 0.3. Did you mean loss.clip_high? keys of ppo_clip: a",
        ),
        ("lr=1e-5", "lr is not a key, got 1e-05. Did you mean optim.lr?"),
        ("batch.lr=1e-5", "batch.lr is not a key of batch, got 1e-05. Did you mean optim.lr?"),
        ("num_step=3", "num_step is not a key, got 3. Did you mean run.num_steps?"),
        ("bactch.group_sise=4", "bactch.group_sise is not a key, got 4. Did you mean batch.group_size?"),
        ("corection=mis", "corection is not a key, got 'mis'. Did you mean correction?"),
        ("sampling.temperature.x=3", "sampling.temperature.x is not a key: sampling.temperature is a single value"),
        ("sampling.top_p=0.9", "sampling.top_p is not a key of sampling, got 0.9. Here it is off: truncated sampling"),
        ("zzz=3", "zzz is not a key, got 3. Sections: run, model, data, rollout, sampling"),
        (
            "reward={correct:2,incorect:1}",
            "reward.incorect is not a key of reward, got 1. Did you mean reward.incorrec",
        ),
        (
            "hydra.job.chdir=true",
            "hydra.job.chdir has no effect: Parity starts the runs itself, got 'true'. Use run.dir",
        ),
        ("hydra/launcher=joblib", "hydra/launcher has no effect: Parity starts the runs itself, got 'joblib'."),
    ],
    "a plus sign smuggles nothing in": [
        ("+loss.clip_hihg=0.3", "loss.clip_hihg is not a key of loss=ppo_clip, got 0.3. Did you mean loss.clip_high?"),
        ("++seed=3", "seed is not a key, got 3. Did you mean run.seed?"),
    ],
    "additions and removals": [
        ("~loss.clip_low", "~loss.clip_low cannot be removed, got 0.2."),
        ("+correction=mis", "+correction is not how a group is chosen, got 'mis'. Write correction=mis."),
        ("~model", "model must be chosen, got None. Use one of model=hf, model=smollm2, model=arithmetic."),
    ],
    "options that do not exist": [
        (
            "correction=tiss",
            "ppo_is, recompute, tis, vanilla_is, got 'tiss'. Did you mean correction=tis?",
        ),
        ("correction=tiss", "Did you mean correction=tis?"),
        ("rollout=sglan", "rollout must be one of sglang, torch, got 'sglan'. Did you mean rollout=sglang?"),
        ("collect=null", "collect must be one of dynamic, fixed, got None."),
    ],
    "keys of another option": [
        (
            "correction.high=3",
            "correction.high is not a key of correction=tis, got 3. It belongs to correction=mis, correction=custom; k",
        ),
        ("rollout.max_batch_size=3", "max_batch_size is not a key of rollout=sglang, got 3. It belongs to rollout=tor"),
        ("model.path=x", "model.path is not a key of model=arithmetic, got 'x'. It belongs to model=hf; keys of arith"),
        ("correction.hihg=3", "Did you mean correction.high of correction=mis?"),
    ],
    "wrong types": [
        ("batch.group_size=4.5", "batch.group_size must be an integer, got 4.5."),
        ("loss.clip_low=abc", "loss.clip_low must be a number, got 'abc'."),
        ("loss.dual_clip=abc", "loss.dual_clip must be a number or null, got 'abc'."),
        ("run.seed=null", "run.seed must be an integer, got None."),
        ("reward.function=[1,2]", "reward.function must be text, got [1, 2]."),
        ("loss.aggregation=token_maen", "must be one of token_mean, seq_mean_token_mean, seq_mean_token_sum, fixed_le"),
        ("loss.aggregation=token_maen", "got 'token_maen'. Did you mean loss.aggregation=token_mean?"),
        (
            "policy=3",
            "policy must be a mapping of its keys to values, got 3. Its keys: policy.num_workers, policy.dtype",
        ),
        ("optim.lr=nan", "optim.lr must be a finite number, got nan."),
        ("optim.weight_decay=???", "optim.weight_decay must be set, got '???'."),
        ("optim.beta2=${no.key}", "optim.beta2 cannot be resolved (Interpolation key 'no.key' not found), got '${no.k"),
    ],
    "rules": [
        (
            "correction.cap=-1",
            "correction.cap must be >= 1, or on-policy tokens are cut, got -1.0. Use correction=vanilla_is",
        ),
        ("batch.mini_batch_prompts=5", "batch.mini_batch_prompts must divide batch.prompts_per_step (16), got 5."),
        ("loss.clip_low=1.5", "loss.clip_low must lie in (0, 1), got 1.5. Vetted: 0.2."),
        ("+rollout.engine_args.port=3", "rollout.engine_args.port is set by Parity, got 3. Remove it."),
        ("reward.overlong_buffer_tokens=999", "reward.overlong_buffer_tokens must be < sampling.max_new_tokens ("),
        ("episode.function=calculators", "must be one of calculator, path.py:function, or null, got 'calculators'"),
        ("reward.function=gsm8", "or path.py:function, got 'gsm8'. Did you mean reward.function=gsm8k?"),
        ("data=file", "model arithmetic knows only the vocabulary of data=arithmetic, got 'file'."),
        ("data=file", "data.train_path must be set, got ''."),
    ],
    "what must be given": [("model=hf", "model.path must be set, got ''. A local directory or a hub name.")],
    "words": [
        ("loss.clip_low", "loss.clip_low is not an override, got 'loss.clip_low'. Write key=value."),
        ("a=b=c", "a cannot be read (mismatched input '=' expecting <EOF>), got 'a=b=c'. Quote a value that holds"),
        ("optim.lr=1e-3,1e-4", "optim.lr must be one value, got '1e-3,1e-4'. Add -m for one run per value"),
        ("run.recipe=x", "run.recipe is set by the command line, got 'x'. Remove it."),
    ],
}


@pytest.mark.parametrize("rows", REFUSALS.values(), ids=[name.replace(" ", "-") for name in REFUSALS])
def test_refusals_name_key_rule_value_and_way_out(rows: list[tuple[str, str]]) -> None:
    found = messages(*dict(rows))
    for word, expected in rows:
        assert any(expected in message for message in found), f"{word}: {expected!r} not in {found}"
    assert len(found) == len({message.split()[0] for message in found}), f"a key is reported twice: {found}"
    assert len(found) <= len(rows) + 1, f"something else is reported: {found}"


@pytest.mark.scenario(31)
def test_all_problems_come_together_and_once() -> None:
    found = messages(
        "loss.clip_hihg=0.3",
        "correction=mis",
        "correction.cap=3",
        "batch.group_size=1",
        "reward.overlong_buffer_tokens=999",
        "sampling.top_p=0.9",
        "optim.lr=abc",
        "colect=dynamic",
        "a=b=c",
    )
    keys = [message.split()[0] for message in found]
    assert sorted(keys) == [
        "a",
        "batch.group_size",
        "colect",
        "correction.cap",
        "loss.clip_hihg",
        "optim.lr",
        "reward.overlong_buffer_tokens",
        "sampling.top_p",
    ]


def test_a_misspelt_option_does_not_hide_or_invent_problems_below_it() -> None:
    # The key belongs to the option that was meant, and its value breaks that option's rule.
    found = messages("correction=mi", "correction.high=-2", "collect=dinamic", "collect.over_sampling=2")
    assert [message.split()[0] for message in found] == ["correction", "collect", "correction.low"]


def test_build_config_does_not_raise_and_collects_every_component() -> None:
    root = empty_root()
    chosen = {"model": "hf", "data": "file", "rollout": "torch", "collect": "fixed", "schedule": "sync"}
    chosen["guard"] = "none"
    kinds = {group: GROUPS[group][option] for group, option in chosen.items()}
    for group, kind in kinds.items():
        root[group] = plain(kind)
    root.optim.lr = -1.0
    root.tracking.samples_per_step = -1
    config, unreadable, broken = build_config(root, kinds)
    assert config is None
    assert {problem.key for problem in [*unreadable, *broken]} == {
        "correction",
        "loss",
        "model.path",
        "data.train_path",
        "data.eval_path",
        "optim.lr",
        "tracking.samples_per_step",
    }


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("correction.rollout_is_threshold=3", "Here it is correction.cap."),
        ("algorithm.rollout_correction.bypass_mode=true", "Here it is correction=bypass."),
        ("+algorithm.rollout_correction.rollout_is_threshold=3", "Here it is correction.cap."),
        ("vllm_importance_sampling_cap=3", "Here it is correction.cap."),
        ("loss.clip_ratio_c=3", "Here it is loss.dual_clip."),
        ("correction.veto=1e-4", "Here it is correction.reject.veto."),
        ("batch.num_generations=3", "Here it is batch.group_size."),
        ("learning_rate=1e-6", "Here it is optim.lr."),
        ("data.train_files=train.parquet", "Here it is data.train_path."),
        ("actor_rollout_ref.rollout.n=8", "Here it is batch.group_size."),
        ("rollout.n=8", "Here it is batch.group_size."),
        ("actor_rollout_ref.rollout.val_kwargs.n=4", "Here it is eval.samples."),
        ("policy.cpus_per_worker=1", "Here it is a constant now: leave the key out."),
        ("guard.k3.trip=1", "Here it is guard.max_k3."),
        ("trainer.total_epochs=15", "Here it is run.num_steps: rollout steps, of which an epoch has prompts / batch."),
    ],
)
def test_a_key_of_another_trainer_and_a_former_key_are_translated(word: str, expected: str) -> None:
    [found] = messages(word)
    assert expected in found


def test_the_sections_are_listed_where_no_key_is_similar() -> None:
    sections = f"Sections: {', '.join(TrainConfig.__dataclass_fields__)}."
    words = ("actor_rollout_ref.rollout.n=8", "zzz=3", "optim.lr=-1", "trainer.total_training_steps=15")
    assert messages(*words) == [
        "actor_rollout_ref.rollout.n is not a key, got 8. Here it is batch.group_size.",
        f"zzz is not a key, got 3. {sections}",
        "trainer.total_training_steps is not a key, got 15. Here it is run.num_steps.",
        "optim.lr must be > 0, got -1.0.",
    ]
    one_of_two = messages("lose.x=1,2", "zzz=3", multirun=True)
    assert [sections in message for message in one_of_two] == [False, True, False]


def test_nested_keys_are_checked_like_any_other() -> None:
    assert not messages("correction=mis", "correction.reject.max_k3=0.5", "correction.reject.token_ratio=[0.5,3]")
    found = messages("correction=mis", "correction.reject.max_k4=0.5", "correction.reject.veto=2", "optim.lr=-1")
    assert len(found) == 3, found
    assert any("correction.reject.max_k4 is not a key of correction.reject" in message for message in found)
    assert any(message.startswith("correction.reject.veto must lie in (0, 1) or be null") for message in found)
    [found_type] = messages("correction=mis", "correction.reject.token_ratio=abc")
    assert "correction.reject.token_ratio must be a list, each entry a number or null, got 'abc'" in found_type


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


def test_the_best_is_kept_by_a_metric_of_the_saved_weights() -> None:
    best = "checkpoint.best_metric=eval/accuracy"
    assert not messages(best, "checkpoint.every=20", "eval.every=10", "run.num_steps=40")
    assert not messages(best, "checkpoint.every=4", "eval.every=6", "run.num_steps=13")
    [found] = messages(best, "checkpoint.every=4", "eval.every=6", "run.num_steps=12")
    assert "checkpoint.every=4 and eval.every=6 none before the last is" in found
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
    named = ["eval.samples", "eval.temperature", "eval.sets.heldout", "eval.sets.heldout"]
    assert [line.split()[0] for line in found] == named
    [found_file] = messages(*files, "eval.sets.aime=x")
    assert "eval.sets.aime must be an existing file" in found_file
    assert "eval.sets must be empty with data=arithmetic" in " ".join(messages(f"+eval.sets.a={rows}"))


# ---------------------------------------------------------------------------------------------------- sweeps


def test_a_sweep_is_checked_before_its_first_run_and_names_the_combination() -> None:
    found = messages("correction=tis,mis", "correction.cap=3", "optim.lr=1e-3,0", "lose.x=1", multirun=True)
    assert found == [
        "lose.x is not a key, got 1. Did you mean loss?",
        "[optim.lr=0] optim.lr must be > 0, got 0.0.",
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


def test_a_sweep_without_a_value_is_refused() -> None:
    [found] = messages("correction=glob(zzz*)", multirun=True)
    assert found.startswith("correction must have a value, got 'glob(zzz*)'. Options: recompute, ppo_is")


def test_what_hydra_would_do_in_a_recipe_is_refused(tmp_path: Path) -> None:
    path = own_recipe(tmp_path, "defaults: [arithmetic_grpo, _self_]\nhydra: {mode: MULTIRUN}\n")
    [problem] = resolve(path, (), own_dir=None, multirun=False).problems
    assert str(problem) == (
        f"{path}: hydra has no effect: Parity starts the runs itself, got {{'mode': 'MULTIRUN'}}. Remove it."
    )


CODE = "{_target_: os.system, command: 'touch owned'}"
CHOSEN = "[/train, override /model: arithmetic, override /data: arithmetic, {}, _self_]"


@pytest.mark.parametrize(
    ("file", "content", "choice"),
    [
        ("hydra/callbacks/own.yaml", f"x: {CODE}", "override /hydra/callbacks: own"),
        ("hydra/launcher/own.yaml", CODE, "override /hydra/launcher: own"),
        ("hydra/sweeper/own.yaml", CODE, "override /hydra/sweeper: own"),
        ("hydra/job_logging/own.yaml", "root: {level: INFO}", "override /hydra/job_logging: own"),
        ("guard/own.yaml", f"# @package _global_\nhydra: {{callbacks: {{x: {CODE}}}}}", "override /guard: own"),
        ("guard/train.yaml", f"# @package _global_\nhydra: {{callbacks: {{x: {CODE}}}}}", "override /guard: train"),
        ("guard/own.yaml", f"# @package hydra.callbacks.x\n{CODE}", "override /guard: own"),
    ],
)
def test_nothing_that_hydra_would_call_gets_in_through_files_of_the_user(
    tmp_path: Path, file: str, content: str, choice: str
) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(content + "\n")
    path = own_recipe(tmp_path, f"defaults: {CHOSEN.format(choice)}\n")
    problems = [str(problem) for problem in resolve(path, (), own_dir=tmp_path, multirun=False).problems]
    expected = f"{tmp_path / file}: hydra has no effect: Parity starts the runs itself"
    assert [text for text in problems if text.startswith(expected)], problems


def test_a_recipe_cannot_put_a_secret_of_the_environment_into_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    monkeypatch.setenv("OWNER", "ada")
    text = (
        "defaults: [arithmetic_grpo, _self_]\ntracking: {project: '${oc.env:WANDB_API_KEY}', entity: '${oc.env:OWNER}'}"
    )
    path = own_recipe(tmp_path, text)
    [problem] = resolve(path, (), own_dir=None, multirun=False).problems
    assert str(problem).startswith(f"{path}: tracking.project cannot be resolved")
    assert "oc.env must not read WANDB_API_KEY, whose name is that of a secret" in str(problem)
    assert "0123456789" not in str(problem)
    [run] = resolve(path, ("tracking.project=p",), own_dir=None, multirun=False).runs
    assert run.config is not None and run.config.tracking.entity == "ada"


def test_the_directory_of_one_run_cannot_be_given_to_a_sweep() -> None:
    assert messages("run.dir=x", "run.seed=0,1", multirun=True) == [
        "run.dir has no effect in a sweep: every run has its own directory, got 'x'. Remove it; hydra.sweep.dir=... "
        "names the directory that holds them all."
    ]


# ------------------------------------------------------------------------------------- what stops a real start


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used/metrics.jsonl").touch()
    (tmp_path / "empty").mkdir()
    used = start_problems(resolved(f"run.dir={tmp_path}/used"))
    assert [problem.key for problem in used] == ["run.dir"]
    assert "must be absent or empty" in str(used[0])
    assert start_problems(resolved(f"run.dir={tmp_path}/empty")) == []
    assert start_problems(resolved(f"run.dir={tmp_path}/absent")) == []
    swept = start_problems(resolved(f"hydra.sweep.dir={tmp_path}/used", "run.seed=0,1", multirun=True))
    assert [problem.key for problem in swept] == ["hydra.sweep.dir"]


@pytest.mark.scenario(33)
def test_a_missing_sglang_is_reported_with_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "sglang" else real(name, *a))
    broken = resolved("loss.clip_hihg=1")
    assert broken.problems, "the config has a problem of its own"
    assert [str(problem) for problem in start_problems(broken)] == [
        "rollout must be an engine that is installed, got 'sglang'. make setup in the checkout, or pip install "
        '".[sglang]" there, or use rollout=torch.'
    ]
    assert start_problems(resolved("rollout=torch")) == []
