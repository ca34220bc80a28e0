"""`parity port`: scripts of verl, TRL and slime become recipes that compose, and nothing of them is executed."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from algorithms.config import Aggregation, Bound, CustomConfig, Estimator, KLEstimator, Level, PPOClipConfig, TISConfig
from algorithms.config.loss import CISPOConfig, GSPOConfig, SAPOConfig
from algorithms.config.rejection import RejectConfig
from algorithms.config.spec import RejectedDenominator
from rollout.config import Routing
from trainer.cli.port import run_port
from trainer.compose.compose import resolve
from trainer.compose.peer_page import BEGIN, generated
from trainer.compose.peers import peers
from trainer.compose.port import translated
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
    chosen = {"reward.function": "exact_match", "data.train_path": "base/a.jsonl", "data.eval_path": "base/b.jsonl"}
    words = [f"{problem.key}={chosen[problem.key]}" for problem in run.problems]  # that the script does not choose
    assert all(f"# {problem.key}" in recipe or "# reward_funcs" in recipe for problem in run.problems)
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
    assert config.eval.max_prompts is None, "TRL evaluates all rows"
    assert "# output_dir=$os.environ['X']: depends on" in recipe


@pytest.mark.parametrize(
    ("loss_type", "level", "loss", "aggregation"),
    [
        ("sapo", "token", SAPOConfig, Aggregation.seq_mean_token_mean),
        ("sapo", "sequence", SAPOConfig, Aggregation.seq_mean_token_mean),
        ("cispo", "token", CISPOConfig, Aggregation.token_mean),
        ("cispo", "sequence", CISPOConfig, Aggregation.token_mean),
        ("grpo", "sequence", GSPOConfig, Aggregation.seq_mean_token_mean),
        ("dapo", "sequence", GSPOConfig, Aggregation.token_mean),
        ("luspo", "sequence", GSPOConfig, Aggregation.seq_mean_token_sum),
    ],
)
def test_type_and_level_of_a_loss_of_trl_choose_together(
    loss_type: str,
    level: str,
    loss: type,
    aggregation: Aggregation,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = f'loss_type="{loss_type}", importance_sampling_level="{level}"'
    config, recipe = port("train.py", TRL.replace('loss_type="dr_grpo"', words), tmp_path, monkeypatch)
    assert type(config.loss) is loss and config.loss.aggregation is aggregation
    is_other = level == "sequence" and loss is not GSPOConfig
    assert ("# importance_sampling_level=sequence: loss=" in recipe) is is_other


@pytest.mark.parametrize("given", ["", "actor_rollout_ref.actor.loss_agg_mode=token-mean "])
def test_sapo_of_verl_has_one_aggregation(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = f"{given}actor_rollout_ref.actor.policy_loss.loss_mode=sapo trainer.default"
    config, _ = port("run.sh", VERL.replace("trainer.default", words), tmp_path, monkeypatch)
    assert isinstance(config.loss, SAPOConfig) and config.loss.aggregation is Aggregation.seq_mean_token_mean


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
    critic = "--advantage-estimator ppo --gamma 0.99 --lambd 0.95 --critic-lr 5e-6 --custom-loss-function-path a.b"
    config, recipe = port("run.sh", SLIME.replace("--advantage-estimator grpo", critic), tmp_path, monkeypatch)
    assert (config.advantage.gamma, config.advantage.gae_lambda, config.critic.lr) == (0.99, 0.95, 5e-6)
    assert "# custom_loss_function_path=a.b: a loss of your own is loss=path/to/file.py:Name" in recipe


def test_a_script_of_slime_without_a_critic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = port("run.sh", SLIME, tmp_path, monkeypatch)
    assert config.correction == TISConfig() and config.run.num_steps == 7
    assert config.batch.prompts_per_step == 32 and config.batch.mini_batch_prompts == 8
    assert config.loss == PPOClipConfig(clip_low=0.1, clip_high=0.28, aggregation=Aggregation.seq_mean_token_mean)
    assert config.advantage.estimator is Estimator.grpo and config.policy.num_workers == 4


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        ("--global-batch-size 64 --lr-warmup-iters 10", 3),  # 4 optimizer steps in a rollout step
        ("--num-steps-per-rollout 2 --lr-warmup-iters 10", 5),
        ("--global-batch-size 64 --lr-warmup-fraction 0.3", 2),
    ],
)
def test_a_warm_up_of_slime_counts_optimizer_steps(
    words: str, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, _ = port("run.sh", SLIME.replace("--global-batch-size 64", words), tmp_path, monkeypatch)
    assert config.optim.warmup_rollout_steps == steps


def test_evaluation_and_warm_up_of_verl_are_those_of_a_silent_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "actor_rollout_ref.rollout.top_p=0.9 actor_rollout_ref.rollout.top_k=50 trainer.critic_warmup=5 "
    text = VERL.replace("adv_estimator=grpo", "adv_estimator=gae").replace("trainer.default", f"{words}trainer.default")

    def evaluated(more: str) -> TrainConfig:
        directory = tmp_path / f"with {more}".strip()
        directory.mkdir()
        return port("run.sh", text.replace("trainer.default", f"{more}trainer.default"), directory, monkeypatch)[0]

    config = evaluated("")
    assert (config.sampling.top_p, config.sampling.top_k) == (0.9, 50)
    assert (config.eval.top_p, config.eval.top_k) == (1, -1)
    assert config.critic.warmup_rollout_steps == 4, "verl's step 5 trains the policy"
    assert config.eval.max_prompts is None and evaluated("data.val_max_samples=64 ").eval.max_prompts == 64


@pytest.mark.parametrize(
    ("script", "replays"),
    [
        (VERL, "actor_rollout_ref.actor.router_replay.mode=R3 trainer.default"),
        (VERL, "actor_rollout_ref.rollout.enable_rollout_routing_replay=True trainer.default"),
        (SLIME, "--use-rollout-routing-replay --num-rollout"),
        (TRL, ""),
    ],
)
def test_experts_are_replayed_only_if_the_script_says_so(
    script: str, replays: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "train.py" if script is TRL else "run.sh"
    for given, routing in (("", Routing.live), (replays, Routing.replay))[: 1 + bool(replays)]:
        directory = tmp_path / routing.value
        directory.mkdir()
        text = script.replace("--num-rollout" if script is SLIME else "trainer.default", given) if given else script
        assert port(name, text, directory, monkeypatch)[0].policy.routing is routing


def test_a_response_of_verl_is_divided_by_its_kept_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = VERL.replace("rollout_rs=seq_mean_k1", "rollout_rs=token_k1")
    text = text.replace("actor.clip_ratio_high=0.28", "actor.loss_agg_mode=seq-mean-token-mean")
    config, _ = port("run.sh", text, tmp_path, monkeypatch)
    assert isinstance(config.correction, CustomConfig)
    assert config.correction.rejected_denominator is RejectedDenominator.drop


@pytest.mark.parametrize(
    ("name", "script", "given"),
    [("run.sh", VERL, "trainer.total_training_steps=30"), ("train.py", TRL, "output_dir")],
)
def test_epochs_of_a_silent_script_are_told(
    name: str, script: str, given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, recipe = port(name, script.replace(given, given if script is TRL else ""), tmp_path, monkeypatch)
    assert re.search(r"# \S*epochs=\S+: depends on the number of prompts; set run.num_steps", recipe)


@pytest.mark.parametrize(
    ("words", "ranks", "of_rank", "engines", "of_engine"),
    [
        ("--colocate --actor-num-gpus-per-node 4 --rollout-num-gpus-per-engine 2", 4, 0.5, 2, 1),
        ("--colocate --rollout-num-gpus 4", 8, 0.5, 8, 0.5),
        ("--actor-num-gpus-per-node 4 --rollout-num-gpus 4 --rollout-num-gpus-per-engine 2", 4, 1, 2, 2),
        ("--actor-num-nodes 2 --rollout-num-gpus 8", 16, 1, 8, 1),
    ],
)
def test_a_script_of_slime_gets_the_gpus_that_it_has_there(
    words: str,
    ranks: int,
    of_rank: float,
    engines: int,
    of_engine: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = SLIME.replace("--colocate --actor-num-gpus-per-node 4 --actor-num-nodes 1", words)
    config, _ = port("run.sh", script, tmp_path, monkeypatch)
    assert (config.policy.num_workers, config.policy.gpus_per_worker) == (ranks, of_rank)
    assert (config.rollout.num_engines, config.rollout.gpus_per_engine) == (engines, of_engine)


def test_a_reward_of_slime_that_is_code_comes_before_its_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.sh").write_text(SLIME.replace("--num-rollout 7", "--rm-type dapo --custom-rm-path pkg.my_rm.score"))
    assert run_port(["run.sh"]) == 0
    recipe = capsys.readouterr().out
    assert "reward: {function: 'TODO.py:score'}" in recipe
    assert "# rm_type=dapo: " in recipe and "# custom_rm_path=pkg.my_rm.score: " in recipe


def test_an_engine_that_is_another_here_is_a_comment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, comment in (("vllm", True), ("sglang", False)):
        named = f"actor_rollout_ref.rollout.name={name} trainer.total"
        Path("run.sh").write_text(VERL.replace("trainer.total", named))
        assert run_port(["run.sh"]) == 0
        assert ("# actor_rollout_ref.rollout.name=" in capsys.readouterr().out) is comment


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
    cases = (("--rollout-top-p 0.9", 256, None), ("--eval-top-p 0.7", -1, None))
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


def lines_of(recipe: str, start: str) -> list[str]:
    return [line for line in recipe.splitlines() if line.startswith("#") and start in line]


def test_what_python_computes_or_changes_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
from trl import GRPOConfig as Config, GRPOTrainer
N, LR, HOST = 2e-6, 4, os.uname()
LR, N = N, LR
common = dict(num_generations=N, learning_rate=LR)
common["temperature"] = 0.9
common.update({"seed": 7})
def reward(completions):
    N = 3
def main():
    rows = load_dataset("a/b", "main")["train"].map(lambda N: N)
    args = Config(f"runs/{N}", per_device_train_batch_size=N * 2, max_prompt_length=None, max_steps=10**2,
                  chat_template_kwargs={"enable_thinking": False}, **common)
    args.max_completion_length = 2 * 1024
    setattr(args, "epsilon_high", 0.28)
    trainer = GRPOTrainer("/models/a", [reward], args, rows, peft_config=LoraConfig(r=4, target_modules=["q", "v"]))
    trainer.args.max_grad_norm = 0.3
"""
    config, recipe = port("run.py", text, tmp_path, monkeypatch)
    assert config.batch.group_size == 4 and config.batch.prompts_per_step == 2 and config.run.num_steps == 100
    assert config.optim.lr == 2e-6 and config.optim.max_grad_norm == 0.3 and config.run.seed == 7
    assert config.sampling.temperature == 0.9 and config.sampling.max_new_tokens == 2048
    assert config.loss == PPOClipConfig(clip_high=0.28) and config.policy.lora.targets == r".*\.(q|v)"
    assert "dir: runs/4" in recipe and "path: /models/a" in recipe and config.sources[0] == "a/b:main@train"
    assert "chat_template_kwargs: {enable_thinking: false}" in recipe
    assert lines_of(recipe, "max_prompt_length=null") and lines_of(recipe, ".map(lambda N: N)")


def test_what_python_alone_knows_is_said_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """from trl import GRPOConfig, GRPOTrainer
lr = float(os.environ.get("LR", "3e-6"))
cfg = GRPOConfig(learning_rate=lr, use_vllm=flags.vllm, gradient_checkpointing=flags.gc, **read("c.yaml"))
if flags.big:
    cfg.adam_beta2 = 0.98
for key, value in vars(flags).items():
    setattr(cfg, key, value)
make = partial(GRPOConfig, beta=0.1)
class Mine(GRPOConfig):
    top_p: float = 0.5
other.num_iterations = 3
def main(seed):
    cfg = Mine(seed=seed, *rest)
GRPOTrainer("/models/a", args=parser.parse(), train_dataset=load_dataset("json", data_files="x.jsonl", split="train"))
"""
    _, recipe = port("run.py", text, tmp_path, monkeypatch)
    assert "lr: 1.0e-06" not in recipe and "rollout: torch" not in recipe
    wanted = [(3, "get('LR', '3e-6')"), (3, "flags.vllm"), (3, "flags.gc"), (3, "**read('c.yaml')"), (5, "0.98")]
    wanted += [(7, "setattr(cfg, key, value)"), (8, "beta=0.1"), (9, "top_p: float = 0.5")]
    wanted += [(11, "other.num_iterations"), (13, "$seed"), (13, "*rest"), (14, "parser.parse()"), (14, "x.jsonl")]
    for line, source in wanted:
        assert any(re.search(rf"line {line}\b", each) for each in lines_of(recipe, source)), (line, source)


def test_what_parity_refuses_is_left_out_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = 'use_vllm=True, importance_sampling_level="sequence", top_p=3, num_generations=64'
    config, recipe = port("run.py", TRL.replace("use_vllm=True", words), tmp_path, monkeypatch)
    assert type(config.loss).__name__ == "GSPOConfig" and config.sampling.top_p == 1
    assert lines_of(recipe, "# loss.clip_low=0.2: ") and lines_of(recipe, "# sampling.top_p=3: ")


def test_a_mini_batch_has_at_least_one_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "num_generations=8, per_device_train_batch_size=4, steps_per_generation=8"
    config, _ = port("run.py", TRL.replace("per_device_train_batch_size=32", words), tmp_path, monkeypatch)
    assert config.batch.prompts_per_step == 4 and config.batch.mini_batch_prompts == 1


def test_words_of_a_command_line_keep_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = VERL.replace("main_ppo ", "main_ppo --config-path=config --config-name dapo ")
    more = "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1 trainer.experiment_name='my run' "
    more += "+data.apply_chat_template_kwargs.enable_thinking=False actor_rollout_ref.model.lora_rank=8 "
    more += "'actor_rollout_ref.model.target_modules=[q_proj,v_proj]' trainer.nnodes=$NODES "
    text = (
        text.replace(" $@", f" {more} $@ ${{MORE[@]}} 2>&1 | tee log") + "python -m verl.trainer.main_ppo data.seed=3\n"
    )
    config, recipe = port("run.sh", text, tmp_path, monkeypatch)
    assert config.run.num_steps == 30 and config.optim.warmup_rollout_steps == 3
    assert (config.policy.lora.alpha, config.policy.lora.targets) == (16, r".*\.(q_proj|v_proj)")
    assert "name: my run" in recipe and "chat_template_kwargs: {enable_thinking: false}" in recipe
    for said in ("config_name=dapo", "$@", "${MORE[@]}", "nnodes=$NODES", "another command"):
        assert lines_of(recipe, said), said


@pytest.mark.parametrize(
    ("words", "estimator"),
    [
        ("algorithm.adv_estimator=rloo", Estimator.rloo),
        ("algorithm.adv_estimator=gae", Estimator.gae),
        ("algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=False", Estimator.dr_grpo),
    ],
)
def test_a_default_of_verl_leaves_the_estimator_of_the_script(
    words: str, estimator: Estimator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, _ = port("run.sh", VERL.replace("algorithm.adv_estimator=grpo", words), tmp_path, monkeypatch)
    assert config.advantage.estimator is estimator


def test_a_default_that_is_computed_from_an_unknown_value_is_unknown() -> None:
    given = {"generation_batch_size": 64, "per_device_train_batch_size": "$args.size", "max_steps": 10}
    words, notes = translated(given, peers()["TRL"])
    assert "max_steps" not in words and any(note.startswith("# max_steps=10: depends on") for note in notes)


def test_flags_end_at_a_redirection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = SLIME.replace("/base/b.jsonl", "/base/b.jsonl --lr 3e-6 > log.txt 2>&1 &")
    config, _ = port("run.sh", text, tmp_path, monkeypatch)
    assert config.optim.lr == 3e-6


def test_yaml_of_trl_names_config_and_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
model_name_or_path: /models/a
dataset_name: a/b
dataset_config: main
dataset_train_split: test
eval_strategy: "no"
use_peft: true
lora_target_modules: [q_proj, v_proj]
chat_template_kwargs: {enable_thinking: false}
learning_rate: 2.0e-6
"""
    config, recipe = port("run.yaml", text, tmp_path, monkeypatch)
    assert config.sources[0] == "a/b:main@test" and config.optim.lr == 2e-6
    assert (config.policy.lora.rank, config.policy.lora.alpha) == (16, 32)
    assert config.policy.lora.targets == r".*\.(q_proj|v_proj)" and "enable_thinking: false" in recipe


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
