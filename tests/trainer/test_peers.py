"""What is answered to names of other trainers, synonyms, typing errors: the right key, the reason, or nothing."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import get_type_hints

import pytest
from compose_cases import messages, own_recipe
from test_keys import every_key

from algorithms.config import Problem
from trainer.compose.catalog import find_recipe
from trainer.compose.compose import resolve
from trainer.compose.peer_script import read_script
from trainer.compose.peers import is_words, peer_hint, peers
from trainer.compose.unknown_keys import nearest, unknown_section
from trainer.config.paths import recipe_dir
from trainer.config.train import GROUPS, PRESETS, TrainConfig

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

WORDS = [
    ("data.train_batch_size", 8, "Here it is batch.prompts_per_step=8."),
    ("data.filter_overlong_prompts", True, "Here it is data.on_bad_row=skip."),
    ("actor_rollout_ref.model.use_remove_padding", True, "It is always on."),
    ("actor_rollout_ref.actor.optim.lr", 1e-6, "Here it is optim.lr=1e-06."),
    ("critic.optim.lr", 1e-5, "Here it is critic.lr=1e-05."),
    ("actor_rollout_ref.ref.fsdp_config.param_offload", True, "The reference has the policy's settings."),
    ("actor_rollout_ref.actor.kl_loss_type", "low_var_kl", "Here it is reference.estimator=k3."),
    ("actor_rollout_ref.actor.kl_loss_type", "kl", "K1 is refused in the loss"),
    ("actor_rollout_ref.actor.use_kl_loss", True, "reference.weighted=false"),
    ("algorithm.use_kl_in_reward", False, "Nothing to write"),
    ("algorithm.use_kl_in_reward", True, "reference.placement=reward"),
    ("algorithm.norm_adv_by_std_in_grpo", False, "Here it is advantage.estimator=dr_grpo."),
    ("algorithm.rollout_correction.rollout_is", "token", "Here it is correction=tis correction.level=token"),
    ("algorithm.rollout_correction.rollout_rs", "seq_mean_k3", "Here it is correction.reject.mean_k3="),
    ("actor_rollout_ref.rollout.name", "vllm", "Here it is rollout=sglang."),
    ("reward_model.reward_kwargs.overlong_buffer_cfg.len", 64, "Here it is reward.overlong_buffer_tokens=64."),
    ("trainer.logger", ["console"], "Here it is tracking.wandb=disabled."),
    ("loss_type", "dr_grpo", "Here it is loss.aggregation=fixed_length loss.fixed_length_tokens="),
    ("loss_type", "bnpo", "loss.aggregation=token_mean"),
    ("algorithm.rollout_correction.loss_type", "reinforce", "correction.anchor=none"),
    ("eps_clip", 0.2, "Here it is loss.clip_low=0.2 loss.clip_high="),
    ("eps_clip_high", 0.28, "Here it is loss.clip_high=0.28."),
    ("algorithm.kl_ctrl.kl_coef", 0.01, "the KL in the reward, reference.placement=reward."),
    ("entropy_coef", 0.01, "Here it is loss.entropy_coef=0.01."),
    ("eval-interval", 5, "Here it is eval.every=5."),
    ("advantage_estimator", "rloo", "Here it is advantage.estimator=rloo."),
    ("trainer.algorithm.advantage_estimator", "gae", "Here it is advantage.estimator=gae."),
    ("lora_alpha", 32, "Here it is policy.lora.alpha=32."),
    ("scale_rewards", "batch", "Here it is advantage.estimator=reinforce_pp_baseline."),
    ("scale_rewards", "none", "Here it is advantage.estimator=dr_grpo."),
    (
        "vllm_importance_sampling_mode",
        "sequence_mask",
        "correction.level=sequence correction.bound=mask",
    ),
    (
        "vllm_importance_sampling_mode",
        "token_truncate",
        "Here it is correction=tis correction.level=token",
    ),
    ("bf16", True, "Here it is policy.dtype=bfloat16."),
    ("use_peft", True, "policy.lora.rank above 0 trains an adapter."),
    ("use-tis", True, "Here it is correction=tis correction.cap="),
    ("tis_ratio_type", "token", "Here it is correction.level=token."),
]


@pytest.mark.parametrize(("word", "value", "expected"), WORDS)
def test_the_value_of_another_trainers_key_decides_the_answer(word: str, value: object, expected: str) -> None:
    assert expected in unknown_section(word.split("."), value, KINDS).remedy


def test_every_key_of_verls_trainer_and_every_field_of_trls_grpo_config_is_answered() -> None:
    """With their own defaults, which are those of the table: skipped without the packages of requirements/bench.txt."""
    for trainer, settings in (("verl", verl_settings()), ("TRL", trl_settings())):
        peer = peers()[trainer]
        assert [key for key, value in settings.items() if not peer.answer(key.split("."), value)] == []
        for key, value in peer.defaults.items():
            if not (isinstance(value, str) and value.startswith("{")):
                assert key in settings and value == settings[key], key


def verl_settings() -> dict[str, object]:
    """Every key of verl's `python -m verl.trainer.main_ppo`, with its default."""
    verl = pytest.importorskip("verl")
    path = Path(verl.__file__).parent / "trainer" / "config" / "_generated_ppo_trainer.yaml"
    return {key: value for key, value in read_script(path)[0].items() if not key.endswith("_target_")}


def trl_settings() -> dict[str, object]:
    """Every field of TRL's GRPOConfig, with its default."""
    config = pytest.importorskip("trl").GRPOConfig
    return {each.name: None if each.default is MISSING else each.default for each in fields(config)}


def test_no_row_answers_a_key_of_parity_that_is_misspelt() -> None:
    cut = [key[:-1] for key in every_key() if len(key.rpartition(".")[2]) > 2]
    doubled = [f"{key}{key[-1]}" for key in every_key()]
    hints = {key: peer_hint(key.split("."), 1) for key in (*cut, *doubled)}
    found = {key for key, hint in hints.items() if hint.startswith("Here it is")}
    assert found == {"optim.beta", "loss.entropy_coeff"}  # names of TRL and verl
    assert "Did you mean data.eval_path?" in messages("data=file", "data.eval_pat=1")[0]


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
        ("loss.clip_ratio_c: 3", "loss.clip_ratio_c", "A dot in a file makes no section. Here it is loss.dual_clip=3."),
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
    known = {f"{group}={option}" for group in GROUPS for option in [*GROUPS[group], *PRESETS.get(group, {})]}
    known |= {*every_key(), "correction.reject"}
    further = ("rollout.engine_args.", "correction.reject.<", "eval.sets.")
    sections = {key.partition(".")[0] for key in every_key()}
    texts = [text for peer in peers().values() for answers in peer.keys.values() for text in answers.values()]
    wrong = []
    for word in (word for text in texts for word in re.split(r"[ ,;:()']+", re.sub(r"\{.*?\}", "x", text))):
        key, is_set, value = word.lstrip("+").rstrip(".").partition("=")
        if key in GROUPS and is_set and value != "x":
            wrong += [] if f"{key}={value}" in known or ".py" in value or "path" in value else [word]
        elif key.partition(".")[0] in sections and "." in key:
            wrong += [] if key in known or key.startswith(further) else [word]
    assert wrong == []
    assert sum(map(is_words, texts)) > 200


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
    assert "Here it is critic.lr=1." in said


def test_a_file_in_this_directory_needs_its_ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own_recipe(tmp_path, "defaults: [/arithmetic_grpo, _self_]\n")
    found = find_recipe("mine", own_dir=None)
    assert isinstance(found, Problem) and found.remedy.startswith("Write mine.yaml for the file in this directory. ")
