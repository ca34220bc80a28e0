"""What is answered to names of other trainers, synonyms, typing errors: the right key, the reason, or nothing."""

from __future__ import annotations

from pathlib import Path
from typing import get_type_hints

import pytest
from compose_cases import messages, own_recipe
from test_keys import every_key

from algorithms.config import Problem
from trainer.compose.catalog import find_recipe
from trainer.compose.compose import resolve
from trainer.compose.keys import did_you_mean, nearest, unknown_section
from trainer.compose.renamed import ABSENT, RENAMED, renamed_hint
from trainer.config.paths import recipe_dir
from trainer.config.train import GROUPS, TrainConfig

KINDS = get_type_hints(TrainConfig) | {
    group: GROUPS[group][option]
    for group, option in {
        "model": "hf",
        "data": "file",
        "rollout": "sglang",
        "collect": "fixed",
        "correction": "tis",
        "loss": "ppo_clip",
        "guard": "none",
    }.items()
}

VERL_WORDS = {
    "data.train_batch_size": "batch.prompts_per_step",
    "data.max_prompt_length": "data.max_prompt_tokens",
    "data.filter_overlong_prompts": "data.on_bad_row",
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "policy.activation_checkpoint_every",
    "actor_rollout_ref.model.use_remove_padding": "always on",
    "actor_rollout_ref.model.lora_rank": "Here it is policy.lora.rank.",
    "actor_rollout_ref.actor.optim.lr": "optim.lr",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "optim.warmup_rollout_steps",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "batch.mini_batch_prompts",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "batch.max_tokens_per_microbatch",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "batch.max_tokens_per_microbatch",
    "actor_rollout_ref.actor.ppo_epochs": "batch.passes",
    "actor_rollout_ref.actor.use_kl_loss": "reference.coef",
    "actor_rollout_ref.actor.use_dynamic_bsz": "always on",
    "actor_rollout_ref.actor.clip_ratio_high": "loss.clip_high",
    "actor_rollout_ref.actor.grad_clip": "optim.max_grad_norm",
    "actor_rollout_ref.rollout.name": "rollout=sglang",
    "actor_rollout_ref.rollout.n": "batch.group_size",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "+rollout.engine_args.tp_size",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "+rollout.engine_args.mem_fraction_static",
    "algorithm.adv_estimator": "advantage.estimator",
    "algorithm.kl_ctrl.kl_coef": "reference.coef",
    "custom_reward_function.path": "reward.function",
    "reward_model.reward_manager": "reward.function",
    "trainer.n_gpus_per_node": "policy.num_workers",
    "trainer.nnodes": "cluster.address",
    "trainer.experiment_name": "tracking.name",
    "trainer.project_name": "tracking.project",
    "trainer.logger": "tracking.wandb",
    "trainer.val_before_train": "always evaluated",
    "trainer.total_epochs": "run.num_steps",
}
TRL_WORDS = {
    "cliprange": "loss.clip_low and loss.clip_high",
    "num_ppo_epochs": "batch.passes",
    "total_episodes": "run.num_steps",
    "vf_coef": "critic.lr",
    "peft_config": "policy.lora.rank above 0 trains an adapter",
    "sync_ref_model": "the policy at the start",
    "model_name_or_path": "model.path",
    "learning_rate": "optim.lr",
    "lr_scheduler_type": "optim.schedule",
    "warmup_ratio": "optim.warmup_rollout_steps",
    "per_device_train_batch_size": "batch.prompts_per_step",
    "gradient_accumulation_steps": "batch.max_tokens_per_microbatch",
    "num_generations": "batch.group_size",
    "num_iterations": "batch.passes",
    "steps_per_generation": "batch.mini_batch_prompts",
    "max_completion_length": "sampling.max_new_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "beta": "reference.coef",
    "epsilon": "loss.clip_low",
    "epsilon_high": "loss.clip_high",
    "delta": "loss.dual_clip",
    "loss_type": "loss=ppo_clip",
    "scale_rewards": "advantage.estimator",
    "reward_funcs": "reward.function",
    "reward_weights": "reward.function",
    "mask_truncated_completions": "reward.overlong_buffer_tokens",
    "use_vllm": "rollout=sglang",
    "vllm_mode": "rollout.servers",
    "vllm_importance_sampling_correction": "correction=tis",
    "bf16": "policy.dtype=bfloat16",
    "gradient_checkpointing": "policy.activation_checkpoint_every",
    "output_dir": "run.dir",
    "logging_steps": "every rollout step",
    "save_steps": "checkpoint.every",
    "report_to": "tracking.wandb",
    "run_name": "tracking.name",
    "log_completions": "tracking.samples_per_step",
}


@pytest.mark.parametrize(("word", "expected"), [*VERL_WORDS.items(), *TRL_WORDS.items()])
def test_a_key_of_verl_or_trl_is_answered_with_the_key_here_or_the_reason(word: str, expected: str) -> None:
    assert expected in unknown_section(word.split("."), "x", KINDS).remedy


@pytest.mark.parametrize(
    "word",
    [
        "algorithm.pf_ppo.weight_pow",
        "actor_rollout_ref.actor.policy_loss.clip_cov_lb",
        "actor_rollout_ref.rollout.layered_summon",
        "ray_kwargs.ray_init.num_cpus",
        "data.dataloader_num_workers2",
        "trainer.esi_redundant_time",
        "trainer.default_hdfs_dir",
        "dataloader_prefetch_factor",
        "optim_target_modules",
        "push_to_hub",
        "hub_token",
        "disable_tqdm",
        "ddp_bucket_cap_mb",
        "neftune_noise_alpha",
    ],
)
def test_no_suggestion_is_made_for_a_key_without_a_counterpart(word: str) -> None:
    path = word.split(".")
    assert renamed_hint(path) == ""
    assert did_you_mean(path, [], KINDS) == ""


@pytest.mark.parametrize(
    ("word", "options", "expected"),
    [
        ("TIS", ("mis", "tis"), "tis"),
        ("GRPO", ("grpo", "rloo"), "grpo"),
        ("fp32", ("float32", "bfloat16"), "float32"),
        ("bf16", ("float32", "bfloat16"), "bfloat16"),
        ("on", ("none", "mismatch"), "mismatch"),
        ("off", ("none", "mismatch"), "none"),
        ("off", ("auto", "online", "offline", "disabled"), "disabled"),
        ("none", ("bypass", "recompute", "tis"), "recompute"),
        ("tsi", ("mis", "tis"), "tis"),
        ("low_var_kl", ("k1", "k2", "k3", "unbiased"), "k3"),
        ("seq-mean-token-sum-norm", ("token_mean", "fixed_length"), "fixed_length"),
        ("token_maen", ("token_mean", "token_sum"), "token_mean"),
    ],
)
def test_the_probable_value_is_found_without_guessing(
    word: str, options: tuple[str, ...], expected: str | None
) -> None:
    assert nearest(word, options) == expected


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("loss=grpo", "It is an estimator of advantages: advantage.estimator=grpo."),
        ("loss=DR_GRPO", "It is an estimator of advantages: advantage.estimator=dr_grpo."),
        ("rollout=vllm", "There is no such engine here; rollout=sglang is the server."),
    ],
)
def test_a_choice_of_another_trainer_is_not_taken_for_a_similar_word(word: str, answer: str) -> None:
    resolution = resolve(recipe_dir() / "arithmetic_grpo.yaml", (word,), own_dir=None, multirun=False)
    [problem] = resolution.problems
    assert problem.key == word.partition("=")[0] and problem.remedy == answer


@pytest.mark.parametrize(
    ("entry", "remedy"),
    [
        ("/arithmetic_grp", "Did you mean arithmetic_grpo?"),
        ("override /corection: mis", "Did you mean correction?"),
        ("/nothing_alike", "nothing_alike.yaml is looked for in"),
    ],
)
def test_a_misspelt_name_among_the_defaults_of_a_recipe_is_answered(entry: str, remedy: str, tmp_path: Path) -> None:
    recipe = tmp_path / "own.yaml"
    recipe.write_text(f"defaults:\n  - /train\n  - {entry}\n  - _self_\n")
    [problem] = resolve(recipe, (), own_dir=None, multirun=False).problems
    assert problem.key == "recipe" and problem.remedy.startswith(remedy)


@pytest.mark.parametrize(
    ("line", "key", "remedy"),
    [
        ("optim.lr: 1.0e-3", "optim.lr", "A dot in a file makes no section. Write optim: {lr: 0.001}."),
        ("loss.clip_ratio_c: 3", "loss.clip_ratio_c", "A dot in a file makes no section. Here it is loss.dual_clip."),
        ("a.b: {c: 1}", "a.b.c", "A dot in a file makes no section."),
        ("optim: {betas: {beta1: 0.8}}", "optim.betas.beta1", "Did you mean optim.beta2?"),
    ],
)
def test_a_name_with_dots_is_found_where_it_stands(line: str, key: str, remedy: str, tmp_path: Path) -> None:
    recipe = own_recipe(tmp_path, f"defaults: [/arithmetic_grpo, override /rollout: torch, _self_]\n{line}\n")
    [problem] = resolve(recipe, (), own_dir=None, multirun=False).problems
    assert problem.key == f"{recipe}: {key}" and problem.remedy.startswith(remedy)


def test_an_option_without_override_is_told_how_to_replace_another(tmp_path: Path) -> None:
    recipe = own_recipe(tmp_path, "defaults: [/arithmetic_grpo, /correction: mis, _self_]\n")
    [problem] = resolve(recipe, (), own_dir=None, multirun=False).problems
    assert problem.key == f"{recipe}: defaults" and problem.remedy == "Write - override /correction: mis."


@pytest.mark.parametrize("line", ["run: 20", "run: [1]", "optim: 3", "rollout: [1]"])
def test_a_value_in_the_place_of_a_section_is_named_with_its_file(line: str, tmp_path: Path) -> None:
    recipe = own_recipe(tmp_path, f"defaults: [/arithmetic_grpo, override /rollout: torch, _self_]\n{line}\n")
    [problem] = resolve(recipe, (), own_dir=None, multirun=False).problems
    assert problem.key == f"{recipe}: {line.partition(':')[0]}"
    assert problem.rule == "must be a mapping of its keys to values" and problem.remedy.startswith("Its keys: ")


def test_a_directory_in_the_place_of_a_model_is_answered_with_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    recipe = own_recipe(tmp_path, "defaults: [/arithmetic_grpo, override /rollout: torch, _self_]\n")
    [problem] = resolve(recipe, ("model=tiny",), own_dir=None, multirun=False).problems
    assert problem.remedy == "Write model=hf model.path=tiny for the model in that directory."


def test_every_answer_names_keys_that_exist() -> None:
    known = {*every_key(), *(f"{group}={option}" for group, options in GROUPS.items() for option in options)}
    sections = {key.partition(".")[0] for key in every_key()}
    wrong = []
    for there, text in (RENAMED | ABSENT).items():
        for word in (
            text.replace(",", " ").replace(";", " ").replace(":", " ").replace("(", " ").replace(")", " ").split()
        ):
            key = word.lstrip("+").partition("=")[0].rstrip(".")
            if key.partition(".")[0] in sections and "." in key:
                found = key in known or key.startswith(("rollout.engine_args.", "correction.reject.<"))
                wrong += [] if found else [(there, key)]
    assert wrong == []


def test_a_part_of_a_name_suggests_every_recipe_that_has_it() -> None:
    problem = find_recipe("dapo", own_dir=None)
    assert isinstance(problem, Problem)
    assert "Did you mean arithmetic_dapo or " in problem.remedy


def test_a_recipe_with_the_ending_yml_is_told_its_right_name(tmp_path: Path) -> None:
    (tmp_path / "base.yml").touch()
    problem = find_recipe(str(tmp_path / "base.yml"), own_dir=None)
    assert isinstance(problem, Problem)
    assert problem.remedy == f"Rename the file to {tmp_path / 'base.yaml'}."


def test_the_directory_of_a_run_is_no_recipe_but_holds_one(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    problem = find_recipe(str(tmp_path), own_dir=None)
    assert isinstance(problem, Problem) and f"parity resume {tmp_path} goes on with it" in problem.remedy


def test_a_name_in_the_addressed_section_comes_before_the_same_name_in_another() -> None:
    [said] = messages("critic.optim.lr=1")
    assert "Did you mean critic.lr?" in said


def test_a_file_in_this_directory_needs_its_ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own_recipe(tmp_path, "defaults: [/arithmetic_grpo, _self_]\n")
    found = find_recipe("mine", own_dir=None)
    assert isinstance(found, Problem) and found.remedy.startswith("Write mine.yaml for the file in this directory. ")
