"""`parity port`: scripts of verl, TRL and slime become recipes that compose, and nothing of them is executed."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from algorithms.config import Aggregation, Bound, CustomConfig, Estimator, KLEstimator, Level, PPOClipConfig, TISConfig
from algorithms.config.rejection import RejectConfig
from algorithms.config.spec import RejectedDenominator
from trainer.cli.port import run_port
from trainer.compose.compose import resolve
from trainer.compose.peer_page import BEGIN, generated
from trainer.config.train import TrainConfig

DOCS = Path(__file__).parents[2] / "docs"
VERL = r"""
set -x
n=16; bsz=128
touch OWNED $(touch OWNED) `touch OWNED`
DATA=${DATA:-"${BASE:-"/base"}"}
train_files="['$DATA/train.parquet']"
python3 -m verl.trainer.main_ppo \
    data.train_files="$train_files" data.val_files=${DATA}/test.parquet \
    data.train_batch_size=$bsz data.gen_batch_size=$((bsz * 3)) \
    data.max_response_length=$((1024 * 8)) \
    actor_rollout_ref.rollout.n=${n} actor_rollout_ref.actor.ppo_mini_batch_size=$((bsz / 4)) \
    algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False \
    +algorithm.filter_groups.enable=True \
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.01 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_rs=seq_mean_k1 \
    algorithm.rollout_correction.rollout_rs_threshold="0.5_2.0" \
    actor_rollout_ref.model.path=/models/a actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=2 \
    trainer.default_local_dir=$WHERE trainer.total_training_steps=30 $@
"""
TRL = """
import os
from trl import GRPOConfig, GRPOTrainer
os.mkdir("OWNED")
LENGTH = 2048
args = GRPOConfig(loss_type="dr_grpo", scale_rewards="none", beta=0.04, use_vllm=True, learning_rate=2e-6,
                  max_completion_length=LENGTH, per_device_train_batch_size=32, output_dir=os.environ["X"])
rows = load_dataset("a", "b", split="c")
GRPOTrainer(model="/models/a", reward_funcs=[os.mkdir("OWNED")], train_dataset=rows, eval_dataset="d@e", args=args)
"""
SLIME = """
GRPO_ARGS=(
   --advantage-estimator grpo
   # --eps-clip 0.9
   --eps-clip 0.1
   --eps-clip-high 0.28
   --use-tis
)
ARGS=(--hf-checkpoint /models/a --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 64)
ray job submit --address="http://127.0.0.1:8265" -- python3 train.py --prompt-data /base/a.jsonl \\
   --colocate --actor-num-gpus-per-node 4 --actor-num-nodes 1 ${GRPO_ARGS[@]} "${ARGS[@]}" --num-rollout 7 \\
   --eval-prompt-data aime /base/b.jsonl
"""


def port(name: str, text: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[TrainConfig, str]:
    """The config of the recipe of a script, and its text; files of the script do not exist."""
    monkeypatch.chdir(directory)
    base = directory / "base"
    base.mkdir()
    for file in ("train.parquet", "test.parquet", "a.jsonl", "b.jsonl"):
        (base / file).touch()
    (directory / name).write_text(text.replace("/base", str(base)))
    assert run_port([name, "-o", "mine.yaml"]) == 0
    recipe = (directory / "mine.yaml").read_text()
    [run] = resolve(directory / "mine.yaml", (), own_dir=None, multirun=False, unneeded=()).runs
    assert {problem.key for problem in run.problems} <= {"reward.function"}  # that nobody chose
    words = ("reward.function=exact_match",) if run.problems else ()
    [run] = resolve(directory / "mine.yaml", words, own_dir=None, multirun=False, unneeded=()).runs
    assert run.config is not None, run.problems
    assert sorted(path.name for path in directory.iterdir()) == ["base", "mine.yaml", name]
    return run.config, recipe


def test_a_script_of_verl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, recipe = port("run.sh", VERL, tmp_path, monkeypatch)
    assert config.batch.prompts_per_step == 128 and config.batch.group_size == 16
    assert config.sampling.max_new_tokens == 8192 and config.run.num_steps == 30
    assert [Path(each).name for each in config.sources] == ["train.parquet", "test.parquet"]
    assert config.collect.over_sampling == 3 and config.batch.mini_batch_prompts == 32
    assert config.correction == CustomConfig(
        level=Level.token,
        bound=Bound.truncate,
        high=2.0,
        reject=RejectConfig(geometric_ratio=[0.5, 2.0]),
        rejected_denominator=RejectedDenominator.drop,
    )
    assert config.loss == PPOClipConfig(clip_high=0.28, dual_clip=3.0)
    assert config.reference.estimator is KLEstimator.k3 and not config.reference.weighted
    assert "# trainer.default_local_dir=$WHERE: depends on" in recipe
    assert "# actor_rollout_ref.actor.ulysses_sequence_parallel_size=2: ranks are data-parallel" in recipe


def test_a_script_of_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, recipe = port("train.py", TRL, tmp_path, monkeypatch)
    assert config.loss == PPOClipConfig(aggregation=Aggregation.fixed_length, fixed_length_tokens=2048)
    assert config.correction == CustomConfig(level=Level.sequence, bound=Bound.mask, high=3.0)
    assert config.advantage.estimator is Estimator.dr_grpo and config.optim.lr == 2e-6
    assert config.reference.estimator is KLEstimator.unbiased and not config.reference.weighted
    assert config.batch.prompts_per_step == 4 and config.sources == ["a:b@c", "d@e"]
    assert "# output_dir=$os.environ['X']: depends on" in recipe


@pytest.mark.parametrize("name", ["vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max"])
@pytest.mark.parametrize("mode", ["sequence_mask", "token_truncate"])
def test_an_older_name_of_a_key_counts_as_the_newer(
    name: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = f"use_vllm=True, vllm_importance_sampling_mode='{mode}', {name}=5.0, "
    config, _ = port("train.py", TRL.replace("use_vllm=True, ", words), tmp_path, monkeypatch)
    truncated = TISConfig(level=Level.token, cap=5.0)
    masked = CustomConfig(level=Level.sequence, bound=Bound.mask, high=5.0)
    assert config.correction == (truncated if mode == "token_truncate" else masked)


def test_a_script_of_slime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = port("run.sh", SLIME, tmp_path, monkeypatch)
    assert config.correction == TISConfig() and config.run.num_steps == 7
    assert config.batch.prompts_per_step == 32 and config.batch.mini_batch_prompts == 8
    assert config.loss == PPOClipConfig(clip_low=0.1, clip_high=0.28, aggregation=Aggregation.seq_mean_token_mean)
    assert config.advantage.estimator is Estimator.grpo and config.policy.num_workers == 4


def test_a_reward_that_no_script_names_is_refused_by_the_dry_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    functions = TRL.replace('[os.mkdir("OWNED")]', "[accuracy, length]")
    silent = TRL.replace('reward_funcs=[os.mkdir("OWNED")], ', "")
    for name, text in (("accuracy", functions), ("reward", silent), ("reward", VERL)):
        script = tmp_path / ("run.sh" if text is VERL else "run.py")
        script.write_text(text)
        assert run_port([script.name]) == 0
        recipe = capsys.readouterr().out
        (tmp_path / "mine.yaml").write_text(recipe)
        [run] = resolve(tmp_path / "mine.yaml", (), own_dir=None, multirun=False, unneeded=()).runs
        assert [problem.value for problem in run.problems if problem.key == "reward.function"] == [f"TODO.py:{name}"]
        assert re.search("^# reward", recipe, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "steps", "warmup", "saved", "evaluated", "mini_batch"),
    [
        ("num_iterations=1", 300, 0, 50, 25, None),
        ("num_iterations=2, warmup_ratio=0.1", 150, 15, 25, 13, None),
        ("steps_per_generation=8, gradient_accumulation_steps=2, warmup_steps=10", 75, 3, 13, 7, 8),
        ("generation_batch_size=128, num_iterations=2, warmup_steps=0.1", 38, 4, 7, 4, 4),
        ("steps_per_generation=2, gradient_accumulation_steps=4, warmup_steps=10", 600, 20, 100, 50, None),
    ],
)
def test_steps_of_trl_count_its_optimizer(
    words: str,
    steps: int,
    warmup: int,
    saved: int,
    evaluated: int,
    mini_batch: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rollout step of TRL's has steps_per_generation x num_iterations / gradient_accumulation_steps of them."""
    given = f'max_steps=300, save_steps=50, eval_strategy="steps", eval_steps=25, {words}'
    config, _ = port(
        "run.py",
        TRL.replace("device_train_batch_size=32", f"device_train_batch_size=32, {given}"),
        tmp_path,
        monkeypatch,
    )
    assert config.run.num_steps == steps and config.optim.warmup_rollout_steps == warmup
    assert config.checkpoint.every == saved and config.eval.every == evaluated
    assert config.batch.mini_batch_prompts == mini_batch
    of_rollout = config.batch.optimizer_steps_per_rollout
    assert steps == (600 if "accumulation_steps=4" in words else math.ceil(300 / of_rollout))  # a half there, one here


@pytest.mark.parametrize(
    ("words", "ranks", "of_rank", "of_engine"),
    [
        ("use_vllm=True", 1, 0.5, 0.5),
        ("use_vllm=False", 1, 0.5, 0.5),
        ("use_vllm=True, vllm_tensor_parallel_size=2", 2, 0.5, 1),
        ('use_vllm=True, vllm_mode="server"', 1, 1, 1),
        ("use_vllm=True, use_cpu=True", 1, 0, 0),
    ],
)
def test_a_script_of_trl_gets_the_gpus_that_it_has_there(
    words: str, ranks: int, of_rank: float, of_engine: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, _ = port("run.py", TRL.replace("use_vllm=True", words), tmp_path, monkeypatch)
    assert (config.policy.num_workers, config.policy.gpus_per_worker) == (ranks, of_rank)
    assert config.rollout.gpus_per_engine == of_engine


def test_top_p_gets_the_top_k_that_a_server_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = (("--rollout-top-p 0.9", 256, None), ("--eval-top-p 0.7", -1, 256))
    cases += (("--rollout-top-p 0.9 --rollout-top-k 20", 20, None),)
    for number, (words, sampled, evaluated) in enumerate(cases):
        directory = tmp_path / str(number)
        directory.mkdir()
        config, recipe = port("run.sh", SLIME.replace("--colocate", f"--colocate {words}"), directory, monkeypatch)
        assert config.sampling.top_k == sampled and config.eval.top_k == evaluated
        assert ("top_k=256" in recipe) is (256 in (sampled, evaluated))


def test_an_adapter_of_trl_has_the_defaults_of_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, (words, rank, alpha) in enumerate((("r=4, lora_alpha=6", 4, 6), ("r=4", 4, 8), ("", 8, 8))):
        directory = tmp_path / str(number)
        directory.mkdir()
        text = TRL.replace("args=args)", f"args=args, peft_config=LoraConfig({words}))")
        config, recipe = port("run.py", text, directory, monkeypatch)
        assert (config.policy.lora.rank, config.policy.lora.alpha) == (rank, alpha)
        assert ("# peft_config" in recipe) is (not words)


def test_comments_say_what_was_not_read_and_which_value_was_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = 'source "$HERE/model.sh"\nk=1; k=1\nn=5; if x; then n=3; fi; n+=2\n'
    text = f"{before}{SLIME.replace('rollout 7', 'rollout $n')}n=9\n"
    config, recipe = port("run.sh", text, tmp_path, monkeypatch)
    assert config.run.num_steps == 32
    [n] = re.findall("^# n: .*", recipe, re.MULTILINE)
    assert "32" in n and "9" not in n and "# k" not in recipe
    assert "# source $HERE/model.sh: " in recipe


def test_what_holds_no_settings_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in (("a.sh", "echo hello\n"), ("a.py", "x = ("), ("a.yaml", "a: [")):
        (tmp_path / name).write_text(text)
        assert run_port([str(tmp_path / name)]) == 2
    assert run_port([str(tmp_path / "none.sh")]) == 2
    assert capsys.readouterr().err.count("parity port: 1 problem") == 4


def test_the_page_ends_with_the_table() -> None:
    page = (DOCS / "from_other_trainers.md").read_text(encoding="utf-8")
    expected = "python -m trainer.compose.peer_page docs/from_other_trainers.md"
    assert page.partition(BEGIN)[2] == generated().removeprefix(BEGIN), expected
