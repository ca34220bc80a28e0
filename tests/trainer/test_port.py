"""`parity port`: scripts of verl, TRL and slime become recipes that compose, and nothing of them is executed."""

from __future__ import annotations

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
GRPOTrainer(model="/models/a", reward_funcs=[os.mkdir("OWNED")], args=args)
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
   --colocate --actor-num-gpus-per-node 4 --actor-num-nodes 1 ${GRPO_ARGS[@]} "${ARGS[@]}" --num-rollout 7
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
    text = TRL.replace("args=args)", 'args=args, train_dataset=load_dataset("a", "b", split="c"), eval_dataset="d@e")')
    config, recipe = port("train.py", text, tmp_path, monkeypatch)
    assert config.loss == PPOClipConfig(aggregation=Aggregation.fixed_length, fixed_length_tokens=2048)
    assert config.correction == CustomConfig(level=Level.sequence, bound=Bound.mask, high=3.0)
    assert config.advantage.estimator is Estimator.dr_grpo and config.optim.lr == 2e-6
    assert config.reference.estimator is KLEstimator.unbiased and not config.reference.weighted
    assert config.batch.prompts_per_step == 4 and config.sources == ["a:b@c", "d@e"]
    assert "# output_dir=$os.environ['X']: depends on" in recipe


def test_a_script_of_slime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = SLIME + "--eval-prompt-data aime /base/b.jsonl\n"
    config, _ = port("run.sh", text.replace("7\n--eval", "7 --eval"), tmp_path, monkeypatch)
    assert config.correction == TISConfig() and config.run.num_steps == 7
    assert config.batch.prompts_per_step == 32 and config.batch.mini_batch_prompts == 8
    assert config.loss == PPOClipConfig(clip_low=0.1, clip_high=0.28, aggregation=Aggregation.seq_mean_token_mean)
    assert config.advantage.estimator is Estimator.grpo and config.policy.num_workers == 4


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
