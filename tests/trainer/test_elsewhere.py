"""The plan for GPUs that are elsewhere: numbers by hand of a dense model and of a mixture, from config.json alone."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from cli_process import HEAVY, parity
from compose_cases import config_of
from described_models import write_config

from algorithms.config import Problem
from rollout.sglang.config import SGLangConfig
from trainer.cli.commands import run
from trainer.config.train import TrainConfig
from trainer.config.training import Offload
from trainer.limits.elsewhere import (
    FAST,
    MEANS,
    SLOW,
    StepSeconds,
    at_a_time,
    elsewhere_problems,
    spread,
    step_seconds,
)
from trainer.limits.gpus import GPUS, Gpus, gpus_named
from trainer.limits.memory_plan import CONTEXT_BYTES, memory_plan

DATA = ("data.train_path=some/data@train", "data.eval_path=some/data@test")
DENSE, MIXTURE = "Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen3-30B-A3B-Base"


def planned(directory: Path, model: str, *words: str) -> TrainConfig:
    name = "dapo_qwen2.5_7b" if model == DENSE else "math_grpo_mis_qwen3_30b_a3b"
    return config_of(f"model.path={write_config(model, directory)}", *DATA, *words, name=name)


def seconds(
    config: TrainConfig, *, mean: float = MEANS[-1], gpus: Gpus | None = None, slow: bool = False
) -> StepSeconds:
    there = gpus or GPUS["H100-80GB"]
    plan = memory_plan(config, device_bytes=there.memory)
    return step_seconds(plan, there, mean * config.sampling.max_new_tokens, SLOW if slow else FAST)


def test_gpus_are_named_by_number_and_name() -> None:
    found = gpus_named("8xH100-80GB", flag="--on")
    assert isinstance(found, Gpus) and (found.number, found.name, found.memory) == (8, "H100-80GB", 81_559 * 2**20)
    for wrong in ("H100-80GB", "0xH100-80GB", "8xH100", "8 x H100-80GB", "x"):
        problem = gpus_named(wrong, flag="--on")
        assert isinstance(problem, Problem) and "H200-141GB" in str(problem) and problem.key == "--on"


@pytest.mark.parametrize("part", MEANS)
def test_lengths_have_the_mean_and_reach_the_longest(part: float) -> None:
    lengths = spread(1000, mean=part * 4096, longest=4096)
    assert sum(lengths) / 1000 == pytest.approx(part * 4096, rel=0.01)
    assert min(lengths) >= 1 and 0.99 * 4096 < max(lengths) <= 4096
    assert sum(lengths[:500]) == pytest.approx(sum(lengths[500:]), rel=0.03), "the long ones are not at one end"


def test_a_dense_model_by_hand(tmp_path: Path) -> None:
    """Two groups of two responses for an engine, of 101 tokens after prompts of 100."""
    config = planned(
        tmp_path, DENSE, "batch.prompts_per_step=16", "batch.mini_batch_prompts=8", "batch.group_size=2",
        "data.max_prompt_tokens=100", "sampling.max_new_tokens=101", "batch.max_tokens_per_microbatch=10000",
        "reward.overlong_buffer_tokens=10", "policy.activation_checkpoint_every=1", "policy.offload=optimizer",
        "cluster.residency=always", "collect.over_sampling=1",
    )  # fmt: skip
    gpu = GPUS["H100-80GB"]
    plan = memory_plan(config, device_bytes=gpu.memory)
    num, body, head = 7_615_616_512, 7_615_616_512 - 2 * 152_064 * 3584, 152_064 * 3584
    # 28 layers x 2 x 4 heads x 128 numbers of 2 bytes; 0.8 of the GPU less the weights.
    room = (int(0.8 * gpu.memory) - 2 * num) // 57_344
    assert plan.cache_tokens == room and plan.takes_turns
    assert at_a_time(plan, 101) == (int(room / (50 + 101)), 4)
    many = replace(config, collect=replace(config.collect, over_sampling=1.5))
    assert at_a_time(memory_plan(many, device_bytes=gpu.memory), 101)[1] == 6, "a round has more groups than a step"
    words = ("schedule=bounded", "schedule.max_staleness=2", "collect=dynamic", "batch.prompts_per_step=5")
    ahead = config_of(*words, "batch.group_size=3", "rollout.num_engines=2")
    assert ahead.requests_per_engine == 2 * 8 * 3 / 2, "the engines begin two steps at once"
    bandwidth, rate = 0.75 * 3.35e12, 0.45 * 989e12
    # 100 decode steps of 4 responses, with 101 to 200 tokens each; then two prompts are read.
    decode = sum(2 * (body + head) + 57_344 * 4 * (101 + step) for step in range(100)) / bandwidth
    cells = 2 * 28 * 3584
    prefill = 2 * (2 * body * 100 + cells * 100**2 + 2 * head) / rate
    # Forward of 16 prompts and 32 responses; 8 ranks; one micro-batch in each of two optimizer steps.
    forward = 2 * body * (16 * 100 + 32 * 101) + 2 * head * 32 * 101 + cells * 16 * (2 * 201**2 - 100**2)
    forward /= 8 * rate
    link = 0.8 * 450e9
    gather, reduce = 7 / 8 * 2 * num / link, 7 / 8 * 4 * num / link
    assert forward < 2 * gather, "so few tokens wait for the network"
    states = 2 * 2 * 8 * num / 8 / 40e9
    sync = 2 * num / 40e9 + (2 * num + 2 * 4 * num / 8) / 40e9
    found = seconds(config)
    assert found.rollout == pytest.approx(decode + prefill, rel=1e-6)
    assert found.log_probs == pytest.approx(2 * gather)
    assert found.training == pytest.approx(2 * (2 * gather + reduce) + states, rel=1e-6)
    assert found.sync == pytest.approx(sync, rel=1e-6)
    assert found.step == pytest.approx(found.rollout + found.log_probs + found.training + found.sync)
    fast = seconds(config, gpus=gpu._replace(link=1e18))
    assert fast.log_probs == pytest.approx(forward, rel=1e-6)
    assert fast.training == pytest.approx(4 * forward + states, rel=1e-6)  # a layer is computed again
    config.schedule = config_of("schedule=one_step_off").schedule  # no rule is checked
    apart = seconds(config)
    assert apart.step == pytest.approx(max(apart.rollout, apart.log_probs + apart.training) + apart.sync)


def test_an_engine_beside_an_awake_rank_has_its_share_of_what_is_left(tmp_path: Path) -> None:
    words = ("batch.prompts_per_step=16", "batch.mini_batch_prompts=8", "sampling.max_new_tokens=101")
    config = planned(tmp_path, DENSE, *words, "reward.overlong_buffer_tokens=10", "cluster.residency=never")
    gpu, num = GPUS["H200-141GB"], 7_615_616_512
    assert (config.policy.num_workers, config.rollout.gpu_share) == (8, 0.5)
    left = gpu.memory - 4 * num // 8 - CONTEXT_BYTES  # float32 shards of the rank, which starts first
    assert memory_plan(config, device_bytes=gpu.memory).cache_tokens == (int(0.5 * left) - 2 * num) // 57_344


@pytest.mark.parametrize("offload", ["none", "optimizer", "parameters"])
def test_a_rank_that_fits_at_no_length_is_refused_with_a_way_out(tmp_path: Path, offload: str) -> None:
    """The update of policy.offload=optimizer has the states of AdamW on the GPU too."""
    config = planned(tmp_path, DENSE, "policy.num_workers=2", "rollout.num_engines=2", f"policy.offload={offload}")
    gpus = GPUS["A100-40GB"]._replace(name="A100-40GB", number=2)
    found = list(elsewhere_problems(memory_plan(config, device_bytes=gpus.memory), gpus))
    refused = [problem for problem in found if problem.key == "policy.num_workers"]
    assert len(refused) == (offload != "parameters")
    assert all("policy.offload=parameters" in problem.remedy for problem in refused)


def test_a_mixture_by_hand(tmp_path: Path) -> None:
    config = planned(
        tmp_path, MIXTURE, "batch.prompts_per_step=32", "batch.group_size=2", "sampling.max_new_tokens=2",
        "data.max_prompt_tokens=100",
    )  # fmt: skip
    gpu = GPUS["H200-141GB"]
    plan = memory_plan(config, device_bytes=gpu.memory)
    num, experts, head = 30_532_122_624, 48 * 128 * 3 * 2048 * 768, 151_936 * 2048
    # An engine has 4 GPUs, and each of these one head of keys and values.
    assert plan.cache_tokens == (int(0.8 * gpu.memory) - num // 2) // (48 * 2 * 128 * 2)
    # One decode step of 32 responses: the experts that 32 tokens meet, 8 of 128 each.
    read = num - experts - head + experts * (1 - (1 - 8 / 128) ** 32)
    decode = (2 * read + 48 * 1024 * 2 * 32 * 101) / (4 * 0.75 * 4.8e12)
    body = num - 2 * head - experts * 120 // 128
    prefill = 16 * (2 * body * 100 + 2 * 48 * 4096 * 100**2 + 2 * head) / (4 * 0.45 * 989e12)
    assert seconds(config, gpus=gpu).rollout == pytest.approx(decode + prefill, rel=1e-6)


CHANGES: dict[str, tuple[str, Callable[[TrainConfig], object], Gpus]] = {
    "a faster memory": ("rollout", lambda config: None, GPUS["H100-80GB"]._replace(bytes_per_s=4.8e12)),
    "more of it": ("rollout", lambda config: None, GPUS["H200-141GB"]),
    "more FLOPs": ("training", lambda config: None, GPUS["H100-80GB"]._replace(flops=2e15)),
    "more ranks": ("training", lambda config: setattr(config.policy, "num_workers", 16), GPUS["H100-80GB"]),
    "more engines": ("rollout", lambda config: setattr(config.rollout, "num_engines", 16), GPUS["H100-80GB"]),
    "layers kept": (
        "training", lambda config: setattr(config.policy, "activation_checkpoint_every", 0), GPUS["H100-80GB"],
    ),
    "fewer samples": ("step", lambda config: setattr(config.batch, "prompts_per_step", 64), GPUS["H100-80GB"]),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_helps_takes_fewer_seconds(tmp_path: Path, change: str) -> None:
    phase, make, gpus = CHANGES[change]
    config = planned(tmp_path, DENSE, "policy.activation_checkpoint_every=1")
    before = seconds(config)
    make(config)
    assert getattr(seconds(config, gpus=gpus), phase) < 0.97 * getattr(before, phase)


def test_an_engine_of_8_bits_reads_and_keeps_projections_of_one_byte_beside_a_cache_of_two(tmp_path: Path) -> None:
    gpu, words = GPUS["H100-80GB"], ("sampling.max_new_tokens=2", "reward.overlong_buffer_tokens=1")
    half, eight = (planned(tmp_path, DENSE, *words, f"rollout.quantization={each}") for each in ("none", "fp8"))
    engines = [memory_plan(config, device_bytes=gpu.memory) for config in (half, eight)]
    head, body = 152_064 * 3584, 7_615_616_512 - 2 * 152_064 * 3584
    assert [plan.engine.weights for plan in engines if plan.engine] == [2 * (body + 2 * head), body + 4 * head]
    tokens = [plan.cache_tokens or 0 for plan in engines]
    assert tokens[1] - tokens[0] == pytest.approx(body / 57_344, abs=1)
    # One decode step reads the body once, and the cache of every sequence.
    saved = seconds(half).rollout - seconds(eight).rollout
    assert saved == pytest.approx(body / (0.75 * gpu.bytes_per_s), rel=1e-6)


def test_longer_responses_and_slower_software_take_more_seconds(tmp_path: Path) -> None:
    for model in (DENSE, MIXTURE):
        config = planned(tmp_path, model)
        steps = [seconds(config, mean=mean) for mean in MEANS]
        for name in ("rollout", "log_probs", "training", "step"):
            assert getattr(steps[0], name) < getattr(steps[1], name) < getattr(steps[2], name)
        slow = seconds(config, slow=True)
        assert all(low < high < 6 * low for low, high in zip(steps[2], slow, strict=True))
    offloaded = planned(tmp_path, DENSE)
    offloaded.policy.offload = Offload.optimizer
    assert seconds(offloaded).training > seconds(planned(tmp_path, DENSE)).training


def test_config_json_is_enough_and_nothing_heavy_is_loaded(tmp_path: Path) -> None:
    model = write_config(MIXTURE, tmp_path)
    before = sorted(tmp_path.rglob("*"))
    words = ("train", "math_grpo_mis_qwen3_30b_a3b", f"model.path={model}", *DATA, "--on", "8xH100-80GB")
    outcome = parity(*words, cwd=tmp_path, watched=HEAVY, env={"CUDA_VISIBLE_DEVICES": ""})
    assert (outcome.code, outcome.loaded, outcome.err) == (0, (), "")
    assert sorted(tmp_path.rglob("*")) == before
    assert "needs 4 CPU and 8 GPU; 8 x H100-80GB of 79.6 GiB are elsewhere: enough" in outcome.out
    assert "this machine" not in outcome.out
    assert len(re.findall(r"tokens in the mean: rollout .* to .*, training .*, step .*; 500 steps ", outcome.out)) == 3
    # 12 bytes for each parameter; two that stay, and one that is written.
    assert "run.dir grows to 1 TiB, with 3 checkpoints of 341 GiB" in outcome.out
    assert math.isclose(3 * 12 * 30_532_122_624 / 2**40, 1, abs_tol=0.005)


def test_a_wrong_name_is_refused_and_too_few_gpus_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "dapo_qwen2.5_7b", f"model.path={write_config(DENSE, tmp_path)}", *DATA, "--on"]
    assert run([*words, "8xH1000"]) == 2
    refused = capsys.readouterr().err
    assert "1 problem" in refused and "--on must be a number of GPUs, x, and their name, got '8xH1000'" in refused
    assert run([*words, "4xH100-80GB"]) == 2
    shown, refused = capsys.readouterr()
    assert "needs 4 CPU and 8 GPU; 4 x H100-80GB of 79.6 GiB are elsewhere: TOO FEW" in shown
    assert "--on must name at least the 8 GPUs of the run, got '4xH100-80GB'" in refused
    of_three = ["+rollout.engine_args.tp_size=3", "rollout.num_engines=1", "rollout.gpus_per_engine=3"]
    assert run([*words, "16xH100-80GB", *of_three, "policy.gpus_per_worker=1"]) == 2
    assert "tp_size=3 divides, not 28, for which 1, 2, 4, 7" in capsys.readouterr().err
    assert run([*words, "8xH100-80GB", "sampling.max_new_tokens=32768"]) == 2
    assert "sampling.max_new_tokens" in capsys.readouterr().err  # config.json has 32,768 positions
    assert run([*words, "8xRTX-4090-24GB"]) == 0
    shown = capsys.readouterr().out
    assert "the rank alone" in shown and "WHICH MAY NOT FIT" in shown
    assert run([*words, "8xH100-80GB", "optim.lr=-1"]) == 2 and "optim.lr" in capsys.readouterr().err
    assert run(["train", "arithmetic_grpo", "--on", "1xH100-80GB"]) == 2
    shown, refused = capsys.readouterr()
    assert not re.search(r"^(cache|time|assumed)", shown, re.MULTILINE), "it uses no GPU"
    assert "policy.gpus_per_worker must be above 0 for a run on H100-80GB" in refused


def test_a_cache_without_room_is_told(tmp_path: Path) -> None:
    config = planned(tmp_path, DENSE)
    assert isinstance(config.rollout, SGLangConfig)
    config.rollout.engine_args = {"mem_fraction_static": 0.1}
    gpus = GPUS["H100-80GB"]._replace(name="H100-80GB", number=8)
    plan = memory_plan(config, device_bytes=gpus.memory)
    assert at_a_time(plan, 5120) == (0, 0)
    # Weights of 7.6 billion parameters in 16 bits; a tenth of what 79.6 GiB have left beside an awake rank.
    [problem] = elsewhere_problems(plan, gpus)
    assert "the weights take 14.2 GiB of the 7.41 GiB that an engine has" in problem.rule
    config.rollout.engine_args = {"mem_fraction_static": 0.8}
    plan = memory_plan(config, device_bytes=gpus.memory)
    assert list(elsewhere_problems(plan, gpus)) == []
    [problem] = elsewhere_problems(plan, gpus._replace(memory_mib=4096))
    assert problem.key == "policy.num_workers" and "a rank needs 14.2 GiB at any length" in problem.rule
    config.sampling.max_new_tokens = plan.cache_tokens
    [problem] = elsewhere_problems(plan, gpus)
    assert problem.key == "sampling.max_new_tokens"
    assert f"the cache of an engine has room for {plan.cache_tokens:,}" in problem.rule


@pytest.mark.parametrize(("size", "keys"), [(8, []), (16, ["rollout.gpus_per_engine"])])
def test_an_engine_is_on_one_machine(tmp_path: Path, size: int, keys: list[str]) -> None:
    config = planned(tmp_path, DENSE)
    assert isinstance(config.rollout, SGLangConfig)
    config.rollout.num_engines, config.rollout.gpus_per_engine = 1, size / 2
    config.rollout.engine_args = {"tp_size": size}
    gpus = GPUS["H100-80GB"]._replace(name="H100-80GB", number=16)
    problems = [*elsewhere_problems(memory_plan(config, device_bytes=gpus.memory), gpus)]
    assert [problem.key for problem in problems] == keys


def test_an_engine_holds_no_more_than_it_samples_at_once() -> None:
    few, all_of_them = (
        memory_plan(config_of("rollout=torch", f"rollout.max_batch_size={slots}"), device_bytes=None).engine
        for slots in (16, 10_000)
    )
    assert few is not None and all_of_them is not None
    assert all_of_them.kv_cache == 128 / 16 * few.kv_cache, "128 samples of a step"
