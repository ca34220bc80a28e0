"""The plan of a run: arithmetic worked by hand, sizes against real models, and what it says about this machine."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from compose_cases import config_of

import trainer.limits.estimate
from algorithms.config import (
    AdvantageConfig,
    BaselineScope,
    BypassConfig,
    Estimator,
    KLEstimator,
    KLPlacement,
    MISConfig,
    RecomputeConfig,
    ReferenceKLConfig,
    RejectedDenominator,
)
from rollout.config import DType, SamplingConfig
from rollout.sglang.config import SGLangConfig
from rollout.task_config import ArithmeticDataConfig, FileDataConfig
from rollout.torch.config import TorchEngineConfig
from trainer.cli.plan import forwards, render_plan
from trainer.config.outputs import CheckpointConfig, DumpConfig, EvalConfig
from trainer.config.train import TrainConfig
from trainer.config.training import (
    ArithmeticModelConfig,
    BatchConfig,
    ClusterConfig,
    CriticConfig,
    HFModelConfig,
    PolicyConfig,
)
from trainer.limits.estimate import batch_shape, critic_shape, engine_memory, model_shape, rank_memory
from trainer.limits.machine import Machine
from trainer.limits.model_shape import UnknownShapeError, directory_shape
from trainer.text.plain import size

MACHINE = Machine(cpus=2, gpus=0, memory=16 * 2**30)


def arithmetic_config() -> TrainConfig:
    return TrainConfig(
        model=ArithmeticModelConfig(), data=ArithmeticDataConfig(), sampling=SamplingConfig(max_new_tokens=16)
    )


def plan(config: TrainConfig, *, machine: Machine = MACHINE) -> str:
    return render_plan(config, machine=machine, output_dir=Path("/somewhere/out"))


def test_what_a_run_writes_is_compared_with_its_disk() -> None:
    """Weights and two moments in float32; two checkpoints stay while a third is written."""
    config = arithmetic_config()
    each, free = 12 * model_shape(config).num_parameters, shutil.disk_usage("/").free
    config.checkpoint.every, config.checkpoint.keep = 1, 2
    line = next(line for line in plan(config).splitlines() if line.startswith("disk"))
    assert f"grows to {size(3 * each)}, with 3 checkpoints of {size(each)}; " in line and line.endswith("free: enough")
    config.checkpoint.keep = free // each
    line = next(line for line in plan(config).splitlines() if line.startswith("disk"))
    assert line.endswith("free: TOO LITTLE")
    config.checkpoint.every = 0
    assert re.search(r"^disk +run\.dir has no checkpoint \(checkpoint\.every=0\)$", plan(config), re.MULTILINE)


def test_batch_arithmetic_by_hand(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").touch()
    rows = str(tmp_path / "rows.jsonl")
    config = TrainConfig(
        model=HFModelConfig(path="some/model"),
        data=FileDataConfig(train_path=rows, eval_path=rows, max_prompt_tokens=100),
        sampling=SamplingConfig(max_new_tokens=200),
        batch=BatchConfig(prompts_per_step=12, group_size=5, mini_batch_prompts=4, max_tokens_per_microbatch=1000),
        policy=PolicyConfig(num_workers=3),
    )
    shape = batch_shape(config)
    assert shape.tokens_per_sample == 300
    assert shape.tokens_per_step == 12 * 5 * 300
    assert shape.samples_per_optimizer_step == 20
    # 20 samples on 3 ranks are at most 7 on one; 3 samples of 300 tokens fit into 1000.
    assert shape.microbatches == 3
    text = plan(config)
    assert "12 prompts x 5 samples = 60 samples per step" in text
    assert re.search(r"^reward +exact_match$", text, re.MULTILINE)
    assert "3 optimizer steps per rollout, 4 prompts = 20 samples each; 40 steps = 120 optimizer steps" in text
    assert "at the cap 100 + 200 tokens per sample, 18,000 per step; 3 micro-batches of at most 1,000 tokens" in text


def test_the_longest_arithmetic_prompt_is_exact() -> None:
    from rollout.data.arithmetic import TOKENS, arithmetic_problems

    split = arithmetic_problems()
    # Every character of a prompt is a token of its own.
    assert set("".join(problem.prompt for problem in split.train)) <= set(TOKENS)
    longest = max(len(problem.prompt) for problem in (*split.train, *split.heldout))
    assert batch_shape(arithmetic_config()).prompt_tokens == longest


@pytest.mark.parametrize(("width", "layers"), [(128, 3), (64, 1)])
def test_arithmetic_sizes_are_those_of_the_real_model(width: int, layers: int) -> None:
    from trainer.models.base_model import _new_model

    model = ArithmeticModelConfig(hidden_size=width, num_layers=layers)
    network = _new_model(model, pad_token_id=0, eos_token_id=1)
    shape = model_shape(replace(arithmetic_config(), model=model))
    assert shape.num_parameters == sum(parameter.numel() for parameter in network.parameters())
    layer = network.model.layers[0]
    assert shape.layer_parameters == sum(parameter.numel() for parameter in layer.parameters())
    assert shape.vocab_size == network.lm_head.weight.shape[0]
    heads = network.config.num_key_value_heads
    assert shape.kv_size == 2 * heads * network.config.hidden_size // network.config.num_attention_heads


def test_sizes_of_a_saved_model_come_from_its_files(tmp_path: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    network = Qwen2ForCausalLM(config)
    network.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1, "the test wants several files"
    shape = model_shape(replace(arithmetic_config(), model=HFModelConfig(path=str(tmp_path)), data=_rows(tmp_path)))
    assert shape.num_parameters == sum(parameter.numel() for parameter in network.parameters())
    assert shape.root_parameters == 2 * 97 * 32 + 32
    assert (shape.num_layers, shape.vocab_size, shape.kv_size) == (2, 97, 2 * 2 * 8)


def test_sizes_are_known_by_the_names_of_gpt2_and_beside_a_field_that_is_null(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    network = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64))
    network.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    # Where it is null, transformers takes one KV head per head.
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_key_value_heads": None}))
    shape = directory_shape(tmp_path)
    assert shape.num_parameters == sum(parameter.numel() for parameter in network.parameters())
    assert (shape.num_layers, shape.attention_size, shape.kv_size) == (2, 32, 64)


def _rows(directory: Path) -> FileDataConfig:
    (directory / "rows.jsonl").touch()
    return FileDataConfig(train_path=str(directory / "rows.jsonl"), eval_path=str(directory / "rows.jsonl"))


def test_memory_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer.limits.estimate, "LOGPROB_CHUNK_TOKENS", 10)
    monkeypatch.setattr(trainer.limits.estimate, "CHUNK_BYTES", 0)
    config = replace(
        arithmetic_config(),
        model=ArithmeticModelConfig(hidden_size=128, num_layers=3),
        policy=PolicyConfig(num_workers=4, dtype=DType.bfloat16),
        rollout=SGLangConfig(num_engines=2),
        batch=BatchConfig(prompts_per_step=3, group_size=3),
    )
    shape = model_shape(config)
    n, layer = shape.num_parameters, shape.layer_parameters
    memory = rank_memory(config, shape)
    assert n % 4 == 0, "so that the shards below are exact"
    assert (memory.weights, memory.gradients, memory.optimizer) == (n, n, 2 * n)
    assert memory.gathered == 2 * (n - 3 * layer + 2 * layer)
    # The gradient of a layer, in bfloat16 and in float32 as it is reduced, and that of the head, which is small here.
    assert memory.backward == 6 * layer + 2 * shape.head_parameters
    assert memory.on_device == 4 * n + memory.gathered + memory.activations + memory.backward
    wide = replace(shape, vocab_size=5000)
    # A head of 5,000 words: bfloat16 logits of a chunk of ten tokens, two blocks no larger than that for the softmax,
    # and the gradient, as it is summed in float32 and as it is rounded.
    assert rank_memory(config, wide).backward == 10 * 5000 * 2 * 3 + 5000 * 128 * (4 + 2)
    engine = engine_memory(config, shape)
    assert engine.weights == 2 * n
    # 9 samples on 2 engines are at most 5 on one; 6 + 16 tokens; keys and values of 3 layers of width 128, bfloat16.
    assert engine.kv_cache == 5 * 22 * 3 * 2 * 128 * 2
    assert engine_memory(replace(config, rollout=TorchEngineConfig(num_engines=2)), shape) == engine


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (None, "is not a local directory"),
        ({}, "config.json"),
        ({"config.json": "{}"}, "num_attention_heads"),
        ({"config.json": '{"num_attention_heads": '}, "config.json"),
    ],
)
def test_an_unknown_size_says_why(tmp_path: Path, files: dict[str, str] | None, reason: str) -> None:
    directory = tmp_path / "model"
    if files is not None:
        directory.mkdir()
        for name, text in files.items():
            (directory / name).write_text(text)
    config = replace(arithmetic_config(), model=HFModelConfig(path=str(directory)), data=_rows(tmp_path))
    with pytest.raises(UnknownShapeError, match=reason):
        model_shape(config)
    assert "memory      unknown: " in plan(config)
    assert "parameters unknown" in plan(config)


def test_a_file_that_is_not_safetensors_is_unknown(tmp_path: Path) -> None:
    sizes = {"num_attention_heads": 4, "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 97}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    config = replace(arithmetic_config(), model=HFModelConfig(path=str(tmp_path)), data=_rows(tmp_path))
    with pytest.raises(UnknownShapeError, match="not a safetensors file"):
        model_shape(config)


def test_forwards_and_their_reason() -> None:
    config = arithmetic_config()
    assert forwards(config) == (
        "3 forward equivalents per token: 1 forward, 2 for its backward, none for pi_old: with one mini-batch per "
        "rollout the first training forward is pi_old"
    )
    twice = replace(config, batch=BatchConfig(mini_batch_prompts=8), correction=RecomputeConfig())
    assert forwards(twice).startswith("4 forward equivalents")
    assert "because one rollout serves 2 optimizer steps" in forwards(twice)
    again = replace(twice, batch=BatchConfig(mini_batch_prompts=8, passes=3))
    assert forwards(again) == (
        "10 forward equivalents per token: 1 forward, 2 for its backward in each of 3 passes, and 1 for pi_old, "
        "because one rollout serves 6 optimizer steps"
    )
    text = plan(again)
    assert "6 optimizer steps per rollout (3 passes), 8 prompts = 64 samples each; 40 steps = 240 optimizer" in text
    whole = replace(again, batch=BatchConfig(passes=3))
    assert forwards(whole).startswith("9 forward equivalents")
    assert "the first training forward is pi_old" in forwards(whole)
    bypass = replace(twice, correction=BypassConfig())
    assert forwards(bypass).startswith("3 forward equivalents")
    assert "the correction does without it" in forwards(bypass)
    drop = replace(config, correction=MISConfig(rejected_denominator=RejectedDenominator.drop))
    assert forwards(drop).startswith("3 forward equivalents")
    kept = replace(drop, advantage=AdvantageConfig(baseline_scope=BaselineScope.kept))
    assert forwards(kept).startswith("4 forward equivalents")
    assert "on which the advantages depend" in forwards(kept)
    referenced = replace(config, reference=ReferenceKLConfig(coef=1e-3))
    assert forwards(referenced).startswith("4 forward equivalents") and "1 for the reference" in forwards(referenced)


def test_a_critic_is_counted_and_described(tmp_path: Path) -> None:
    config = arithmetic_config()
    with_critic = replace(
        config,
        advantage=AdvantageConfig(estimator=Estimator.gae, gae_lambda=0.95),
        critic=CriticConfig(warmup_rollout_steps=2),
    )
    assert "critic" not in plan(config)
    assert forwards(with_critic).startswith("7 forward equivalents")
    assert forwards(with_critic).endswith("and 4 for the critic: 1 for the values, 3 to train it")
    twice = replace(with_critic, batch=replace(with_critic.batch, passes=2))
    assert forwards(twice).startswith("13 forward equivalents")
    assert forwards(twice).endswith("and 7 for the critic: 1 for the values, 6 to train it")
    text = plan(with_critic)
    assert "starts from the model of the policy, lr 1e-05, value clip 0.5; GAE with gamma 1, lambda 0.95" in text
    assert "whitened; the first 2 steps without the policy" in text
    shape = model_shape(config)
    assert critic_shape(config) is None and critic_shape(with_critic) == shape
    alone, both = rank_memory(config, shape), rank_memory(with_critic, shape, shape)
    # float32 weights, gradients and two moments, on two ranks; both roots are gathered at one time, in bfloat16.
    shard = shape.num_parameters // 2
    assert (both.weights - alone.weights, both.optimizer - alone.optimizer) == (shard * 4, shard * 8)
    assert both.gradients - alone.gradients == shard * 4
    assert both.gathered - alone.gathered == shape.root_parameters * 2
    assert both.on_device - alone.on_device == shard * 16 + both.gathered - alone.gathered
    assert f"weights {size(both.weights)} (policy and critic)" in text
    elsewhere = replace(with_critic, critic=CriticConfig(path="some/model"))
    assert "memory      unknown: some/model is not a local directory" in plan(elsewhere)


def test_placement_is_compared_with_the_machine() -> None:
    config = replace(
        arithmetic_config(),
        policy=PolicyConfig(num_workers=2, gpus_per_worker=1.0),
        rollout=SGLangConfig(num_engines=1, gpus_per_engine=1.0),
    )
    assert "needs 0.75 CPU and 3 GPU; this machine has 2 CPU, 0 GPU, 16 GiB: IT DOES NOT FIT" in plan(config)
    large = Machine(cpus=8, gpus=3, memory=2**38)
    assert "this machine has 8 CPU, 3 GPU, 256 GiB: it fits" in plan(config, machine=large)
    few_gpus = Machine(cpus=8, gpus=2, memory=2**38)
    assert "IT DOES NOT FIT" in plan(config, machine=few_gpus)
    elsewhere = replace(config, cluster=ClusterConfig(address="10.0.0.1:6379"))
    assert "of the Ray cluster at 10.0.0.1:6379, which is not asked now" in plan(elsewhere)


def test_keys_of_a_kl_that_is_off_are_remarked_on() -> None:
    config = arithmetic_config()
    in_reward = ReferenceKLConfig(estimator=KLEstimator.k1, placement=KLPlacement.reward)
    off, on = (replace(config, reference=replace(in_reward, coef=coef)) for coef in (0.0, 1e-3))
    said = "without effect: reference.estimator=k1 and reference.placement=reward, because reference.coef=0"
    assert said in plan(off) and "without effect" not in plan(on) and "without effect" not in plan(config)


def test_evaluation_and_files() -> None:
    config = replace(arithmetic_config(), eval=EvalConfig(every=5, max_prompts=7))
    text = plan(config)
    assert "before the first step, every 5 steps and after the last: up to 7 held-out prompts" in text
    assert "/somewhere/out: metrics.jsonl, samples.jsonl" in text
    assert "every 5" not in plan(replace(config, eval=EvalConfig(every=0)))
    assert "none: a run that dies is lost (checkpoint.every saves)" in text
    saving = plan(replace(config, checkpoint=CheckpointConfig(every=4)))
    assert "every 4 steps and after the last, the newest 2 stay" in saving
    assert "parity replay" not in text
    dumping = plan(replace(config, dump=DumpConfig(every=3)))
    assert "every 3 steps for parity replay, the newest 4 stay; at most about" in dumping


def test_sizes_read_well() -> None:
    assert [size(n) for n in (0, 999, 1024, 1536, 15 * 2**30, 2**50)] == [
        "0 B",
        "999 B",
        "1 KiB",
        "1.5 KiB",
        "15 GiB",
        "1.02e+03 TiB",
    ]


def test_keys_without_effect_and_a_rate_that_is_not_met_are_told() -> None:
    words = (
        "checkpoint.every=0", "checkpoint.keep=5", "checkpoint.asynchronous=true", "dump.keep=3",
        "reward.overlong_penalty=3", "collect.max_partial_age=3", "episode.timeout_s=3", "tracking.wandb=disabled",
        "tracking.tags=[a]", "optim.warmup_rollout_steps=100",
    )  # fmt: skip
    notes = "\n".join(config_of(*words).notes())
    for said in (
        "without effect: checkpoint.keep=5 and checkpoint.asynchronous=true, because checkpoint.every=0 saves nothing",
        "without effect: dump.keep=3, because dump.every=0 writes no dump",
        "without effect: reward.overlong_penalty=3.0, because reward.overlong_buffer_tokens=0 turns the penalty off",
        "without effect: collect.max_partial_age=3, because collect.partial=false keeps no response",
        "without effect: episode.timeout_s=3.0, because there is no episode.function",
        "without effect: tracking.tags=[a], because tracking.wandb=disabled turns W&B off",
        "optim.warmup_rollout_steps=100 lasts until the end, run.num_steps=40: optim.lr is not met",
    ):
        assert said in notes
    few = config_of("collect=dynamic", "collect.min_prompts=50", "batch.prompts_per_step=16")
    assert "without effect: collect.min_prompts=50, because a step has batch.prompts_per_step=16" in few.notes()
    assert not list(config_of("collect=dynamic", "collect.min_prompts=2").notes())
    on = ("checkpoint.every=5", "dump.every=2", "reward.overlong_buffer_tokens=4", "episode.function=calculator")
    assert not list(config_of(*words[1:5], words[6], *on).notes())
