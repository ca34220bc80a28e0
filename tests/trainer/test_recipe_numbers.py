"""The numbers of every recipe, worked by hand from its source, and the plan that states them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import pytest

from rollout.config import DynamicCollectConfig
from trainer.cli.plan import render_plan
from trainer.compose.catalog import read_card, recipe_files
from trainer.compose.compose import resolve
from trainer.config.components import HFModelConfig
from trainer.config.paths import recipe_dir
from trainer.config.train import TrainConfig
from trainer.limits.estimate import batch_shape
from trainer.limits.machine import Machine

ROOT = Path(__file__).parents[2]
RECIPES = recipe_files(recipe_dir())
MACHINE = Machine(cpus=2, gpus=0, memory=16 * 2**30)


class Arithmetic(NamedTuple):
    """One rollout step and the run, counted by hand."""

    prompts: int
    group: int
    samples: int
    optimizer_steps: int
    """Per rollout."""
    mini_prompts: int
    mini_samples: int
    steps: int
    """Rollout steps of the run."""
    prompt_tokens: int
    response_tokens: int


ARITHMETIC = {
    "arithmetic_async": Arithmetic(16, 8, 128, 1, 16, 128, 40, 6, 24),
    "arithmetic_dapo": Arithmetic(16, 8, 128, 1, 16, 128, 40, 6, 32),
    "arithmetic_grpo": Arithmetic(16, 8, 128, 1, 16, 128, 40, 6, 24),
    "arithmetic_ppo": Arithmetic(128, 1, 128, 2, 64, 64, 40, 6, 24),
    "arithmetic_tool": Arithmetic(16, 8, 128, 1, 16, 128, 30, 6, 32),
    "gsm8k_grpo_smollm2": Arithmetic(8, 8, 64, 1, 8, 64, 100, 384, 192),
    "gsm8k_ppo_qwen2.5_0.5b": Arithmetic(256, 1, 256, 4, 64, 64, 435, 1024, 512),
    "gsm8k_ppo_int8_qwen2.5_0.5b": Arithmetic(256, 1, 256, 4, 64, 64, 435, 1024, 512),
    "gsm8k_ppo_fp8_qwen2.5_0.5b": Arithmetic(256, 1, 256, 4, 64, 64, 435, 1024, 512),
    "gsm8k_grpo_qwen2.5_0.5b": Arithmetic(128, 8, 1024, 2, 64, 512, 100, 1024, 1024),
    "gsm8k_dr_grpo_qwen2.5_0.5b": Arithmetic(128, 8, 1024, 2, 64, 512, 100, 1024, 1024),
    "gsm8k_gspo_qwen2.5_0.5b": Arithmetic(512, 16, 8192, 4, 128, 2048, 140, 2048, 8192),
    "gsm8k_rloo_qwen2.5_0.5b": Arithmetic(1024, 5, 5120, 4, 256, 1280, 105, 512, 1024),
    "gsm8k_reinforce_pp_baseline_qwen2.5_0.5b": Arithmetic(128, 8, 1024, 1, 128, 1024, 100, 1024, 1024),
    "gsm8k_reinforce_qwen2.5_0.5b": Arithmetic(128, 8, 1024, 1, 128, 1024, 100, 1024, 1024),
    "dapo_qwen2.5_32b": Arithmetic(512, 16, 8192, 16, 32, 512, 300, 2048, 20480),
    "dapo_int8_qwen2.5_32b": Arithmetic(512, 16, 8192, 16, 32, 512, 300, 2048, 20480),
    "dapo_qwen2.5_7b": Arithmetic(128, 16, 2048, 4, 32, 512, 300, 2048, 20480),
    "dapo_qwen2.5_math_1.5b": Arithmetic(128, 16, 2048, 4, 32, 512, 300, 1024, 3072),
    "math_grpo_tis_qwen3_4b": Arithmetic(32, 8, 256, 1, 32, 256, 3000, 1024, 8192),
    "math_grpo_tis_rs_qwen3_4b": Arithmetic(32, 8, 256, 1, 32, 256, 3000, 1024, 8192),
    "math_grpo_tis_rs_bn_qwen3_4b": Arithmetic(32, 8, 256, 1, 32, 256, 3000, 1024, 8192),
}

PPO_OBJECTIVE = "sg(min(pi_old/mu, 2)) * PPOclip(pi_theta/pi_old, 0.2, 0.2, dual 3) * A / N_tokens"
DAPO_OBJECTIVE = "sg(min(pi_old/mu, 2)) * PPOclip(pi_theta/pi_old, 0.2, 0.28, dual 10) * A / N_tokens"
MEAN = "(N_sequences * |y|)"
RS = "m * 1[0.5 <= pi_old/mu <= 2] * 1[min_y(pi_old/mu) >= 0.0001] * sg(min(pi_old/mu, 2))"

OBJECTIVES = {
    "gsm8k_grpo_smollm2": f"sg(min(pi_old/mu, 2)) * PPOclip(pi_theta/pi_old, 0.2, 0.2) * A / {MEAN}",
    "gsm8k_ppo_qwen2.5_0.5b": PPO_OBJECTIVE,
    "gsm8k_ppo_int8_qwen2.5_0.5b": PPO_OBJECTIVE,
    "gsm8k_ppo_fp8_qwen2.5_0.5b": PPO_OBJECTIVE,
    "gsm8k_grpo_qwen2.5_0.5b": f"sg(min(pi_old/mu, 2)) * PPOclip(pi_theta/pi_old, 0.2, 0.2) * A / {MEAN}",
    "gsm8k_dr_grpo_qwen2.5_0.5b": "PPOclip(pi_theta/pi_old, 0.2, 0.2) * A / (N_sequences * 1024)",
    "gsm8k_gspo_qwen2.5_0.5b": f"PPOclip(geomean_y(pi_theta/pi_old), 0.0003, 0.0004) * A / {MEAN}",
    "gsm8k_rloo_qwen2.5_0.5b": f"{PPO_OBJECTIVE}, with 0.001 * sum_y k1[KL(pi_theta || pi_ref)] taken off the reward",
    "gsm8k_reinforce_pp_baseline_qwen2.5_0.5b": "m * 1[0.5 <= pi_old/mu <= 5] * sg(pi_old/mu) * "
    "PPOclip(pi_theta/pi_old, 0.2, 0.2) * A / N_tokens + 1e-05 * k2[KL(pi_theta || pi_ref)]",
    "gsm8k_reinforce_qwen2.5_0.5b": "sg(min(pi_old/mu, 2)) * log pi_theta * A / N_sequences",
    "dapo_qwen2.5_32b": DAPO_OBJECTIVE,
    "dapo_int8_qwen2.5_32b": DAPO_OBJECTIVE.replace("mu, 2", "mu, 8"),
    "dapo_qwen2.5_7b": DAPO_OBJECTIVE,
    "dapo_qwen2.5_math_1.5b": DAPO_OBJECTIVE,
    "math_grpo_tis_qwen3_4b": f"sum m * sg(min(pi_old/mu, 2)) * PPOclip(pi_theta/pi_old, 0.2, 0.28) * A / {MEAN}",
    "math_grpo_tis_rs_qwen3_4b": f"{RS} * PPOclip(pi_theta/pi_old, 0.2, 0.28) * A / {MEAN}",
    "math_grpo_tis_rs_bn_qwen3_4b": f"{RS} * PPOclip(pi_theta/pi_old, 0.2, 0.28) * A / (Z * N_sequences * |y|)",
}
"""What the plan must say about the loss."""

DAPO_KEYS = {
    "reward.function": "math_dapo",
    "reward.correct": 1.0,
    "reward.incorrect": -1.0,
    "reward.overlong_penalty": 1.0,
    "collect.over_sampling": 3.0,
    "collect.max_rounds": 10,
    "advantage.estimator.name": "grpo",
    "reference.coef": 0.0,
    "optim.lr": 1e-6,
    "optim.warmup_rollout_steps": 10,
    "optim.weight_decay": 0.1,
    "optim.max_grad_norm": 1.0,
    "sampling.temperature": 1.0,
    "eval.every": 5,
    "eval.samples": 32,
}
PPO_KEYS = {
    "advantage.estimator.name": "gae",
    "advantage.gamma": 1.0,
    "advantage.gae_lambda": 1.0,
    "optim.lr": 1e-6,
    "optim.weight_decay": 0.01,
    "optim.beta2": 0.999,
    "critic.lr": 1e-5,
    "critic.value_clip": 0.5,
    "critic.warmup_rollout_steps": 0,
    "reference.coef": 0.0,
    "reward.function": "gsm8k",
    "sampling.temperature": 1.0,
    "eval.every": 10,
    "checkpoint.every": 20,
}
QWEN3_KEYS = {"advantage.estimator.name": "grpo", "optim.lr": 1e-6, "optim.weight_decay": 0.1, "optim.beta2": 0.98}

PUBLISHED: dict[str, dict[str, object]] = {
    "gsm8k_grpo_smollm2": {
        "advantage.estimator.name": "grpo",
        "optim.lr": 5e-6,
        "reference.coef": 0.0,
        "reward.function": "gsm8k_flexible",
    },
    "gsm8k_ppo_qwen2.5_0.5b": PPO_KEYS | {"rollout.quantization.name": "none"},
    "gsm8k_ppo_int8_qwen2.5_0.5b": PPO_KEYS | {"rollout.quantization.name": "int8"},
    "gsm8k_ppo_fp8_qwen2.5_0.5b": PPO_KEYS | {"rollout.quantization.name": "fp8"},
    "gsm8k_grpo_qwen2.5_0.5b": {"advantage.estimator.name": "grpo", "optim.lr": 1e-6, "reference.coef": 0.0},
    "gsm8k_dr_grpo_qwen2.5_0.5b": {"advantage.estimator.name": "dr_grpo", "optim.lr": 1e-6, "reference.coef": 0.0},
    "gsm8k_gspo_qwen2.5_0.5b": {
        "advantage.estimator.name": "grpo",
        "optim.lr": 1e-6,
        "optim.warmup_rollout_steps": 25,
        "optim.weight_decay": 0.1,
        "reference.coef": 0.0,
    },
    "gsm8k_rloo_qwen2.5_0.5b": {"advantage.estimator.name": "rloo", "optim.lr": 1e-6, "eval.every": 5},
    "gsm8k_reinforce_pp_baseline_qwen2.5_0.5b": {
        "advantage.estimator.name": "reinforce_pp_baseline",
        "collect.over_sampling": 1.0,
        "optim.lr": 5e-7,
        "optim.beta2": 0.95,
        "optim.weight_decay": 0.0,
        "optim.warmup_rollout_steps": 3,
    },
    "gsm8k_reinforce_qwen2.5_0.5b": {"advantage.estimator.name": "reinforce", "reference.coef": 0.0},
    "dapo_qwen2.5_32b": DAPO_KEYS | {"reward.overlong_buffer_tokens": 4096, "model.path": "Qwen/Qwen2.5-32B"},
    "dapo_int8_qwen2.5_32b": DAPO_KEYS | {"reward.overlong_buffer_tokens": 4096, "rollout.quantization.name": "int8"},
    "dapo_qwen2.5_7b": DAPO_KEYS | {"reward.overlong_buffer_tokens": 4096, "model.path": "Qwen/Qwen2.5-7B-Instruct"},
    "dapo_qwen2.5_math_1.5b": DAPO_KEYS | {"reward.overlong_buffer_tokens": 1024},
    "math_grpo_tis_qwen3_4b": QWEN3_KEYS,
    "math_grpo_tis_rs_qwen3_4b": QWEN3_KEYS,
    "math_grpo_tis_rs_bn_qwen3_4b": QWEN3_KEYS,
}
"""What the source says, also where it is our default; batches and loss are in the tables above."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of data for the recipes that need one."""
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text('{"question": "1+1?", "answer": "#### 2"}\n')
    return path


@functools.cache
def composed(name: str, rows: Path) -> TrainConfig:
    """The recipe over `rows`; no model is looked for."""
    is_given = not name.startswith("arithmetic")
    words = [f"data.{part}_path={rows}" for part in ("train", "eval") if is_given]
    resolution = resolve(RECIPES[name], words, own_dir=None, multirun=False)
    assert [str(problem) for problem in resolution.problems] == []
    [run] = resolution.runs
    assert run.config is not None
    return run.config


def value(config: object, key: str) -> object:
    return functools.reduce(getattr, key.split("."), config)


def test_every_recipe_is_worked_by_hand() -> None:
    assert set(ARITHMETIC) == set(RECIPES)
    assert set(OBJECTIVES) == set(PUBLISHED) == {name for name in RECIPES if not name.startswith("arithmetic")}


@pytest.mark.parametrize("name", RECIPES)
def test_the_plan_of_a_recipe_states_its_arithmetic(name: str, rows: Path) -> None:
    want, config = ARITHMETIC[name], composed(name, rows)
    assert want.samples == want.prompts * want.group == want.mini_samples * want.optimizer_steps
    assert want.mini_samples == want.mini_prompts * want.group
    shape = batch_shape(config)
    assert (shape.samples_per_optimizer_step, config.batch.samples_per_step) == (want.mini_samples, want.samples)
    assert (shape.prompt_tokens, config.sampling.max_new_tokens) == (want.prompt_tokens, want.response_tokens)

    text = render_plan(config, machine=MACHINE, output_dir=Path("out"))
    plural = "" if want.optimizer_steps == 1 else "s"
    assert f"{want.prompts} prompts x {want.group} samples = {want.samples} samples per step" in text
    assert (
        f"{want.optimizer_steps} optimizer step{plural} per rollout, {want.mini_prompts} prompts = "
        f"{want.mini_samples:,} samples each; {want.steps:,} steps = "
        f"{want.steps * want.optimizer_steps:,} optimizer steps"
    ) in text
    assert f"{want.prompt_tokens} + {want.response_tokens} tokens per sample" in text
    if isinstance(config.model, HFModelConfig):
        assert f"memory      unknown: {config.model.path} is not a local directory" in text
        assert "parameters unknown" in text
    else:
        assert "each of " in text.split("memory ")[1].splitlines()[0]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_has_the_numbers_of_its_source(name: str, rows: Path) -> None:
    config = composed(name, rows)
    assert {key: value(config, key) for key in PUBLISHED[name]} == PUBLISHED[name]
    text = render_plan(config, machine=MACHINE, output_dir=Path("out"))
    assert OBJECTIVES[name] in text.split("objective ")[1].splitlines()[0]
    is_dynamic = name.startswith(("dapo", "gsm8k_reinforce_pp_baseline"))
    assert isinstance(config.collect, DynamicCollectConfig) == is_dynamic


def test_the_docs_list_every_recipe_and_whether_it_was_verified() -> None:
    rows = {}
    for line in (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("| [`") and "](../recipes/" in line:
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            rows[cells[0]] = cells[-1]
    verified = {name: read_card(path).verified.split(",")[0] for name, path in RECIPES.items()}
    assert rows == {f"[`{name}`](../recipes/{name}.yaml)": said for name, said in verified.items()}
