"""A real SGLang server with an adapter proves what it holds and uses, goes on with new ones, and faults end a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from adapter_cases import PROMPTS, rank_and_engine, start_run
from policy_cases import make_config, move_adapter
from sglang_cases import LONG, stopped_until_sync
from tiny_model import write_tiny_model
from torch import Tensor

import rollout.sglang.engine
import rollout.sglang.weight_update
from rollout.collect.requests import make_sample
from rollout.config import DType
from rollout.engine import WeightSyncError, wait_for
from rollout.sglang.config import SGLangConfig
from rollout.types import GenerateRequest, Generation, SamplingParams
from trainer.batch.packing import micro_batch
from trainer.cluster.weight_sync import sync_weights
from trainer.config.train import TrainConfig
from trainer.config.training import LoraConfig
from trainer.run.probe import ProbeError, mean_gap

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)], ids=["tp1", "tp2"])
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, ...]]:
    """(config, OneRank, OneEngine) with the tensor parallelism of the parameter."""
    path = tmp_path_factory.mktemp("model")
    write_tiny_model(path, model_type="qwen2", tied=True, max_positions=LONG + 20)
    engine = SGLangConfig(dtype=DType.float32, engine_args={"tp_size": request.param})
    config = make_config(path, num_workers=1)
    policy = replace(config.policy, lora=LoraConfig(rank=4, alpha=8))
    config = replace(config, rollout=engine, policy=policy)
    with rank_and_engine(config, path, tmp_path_factory.mktemp("logs")) as (policy, engines):
        yield config, policy, engines


def requests(*, max_new_tokens: int = 12) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            prompt_id=number,
            sample_index=0,
            prompt_token_ids=ids,
            sampling=SamplingParams(temperature=1.0, max_new_tokens=max_new_tokens, seed=number),
        )
        for number, ids in enumerate(PROMPTS)
    ]


def scored(policy: Any, asked: list[GenerateRequest], generations: list[Generation]) -> list[Tensor]:
    """The trainer's log-probs of the tokens of each response, with its adapter of now."""
    micros = [micro_batch([make_sample(*pair)]) for pair in zip(asked, generations, strict=True)]
    answers = policy.logprobs(micros)
    return [answer[micro.response_index] for answer, micro in zip(answers, micros, strict=True)]


def reported(generations: list[Generation]) -> list[Tensor]:
    return [torch.tensor(each.logprobs) for each in generations]


def test_the_server_samples_with_the_adapter_that_it_is_given(started: tuple[TrainConfig, Any, Any]) -> None:
    config, policy, engines = started
    assert "adapter proven in use" in start_run(config, policy, engines)
    move_adapter(policy.worker)
    first = sync_weights(policy, engines, policy_version=1)
    assert first.is_adapter
    assert engines.engine.policy_version == 1
    generations = engines.generate(requests())
    assert {version for each in generations for version in each.token_versions} == {1}
    assert mean_gap(reported(generations), scored(policy, requests(), generations)) < 1e-5


def test_the_frozen_weights_are_sent_once(started: tuple[TrainConfig, Any, Any]) -> None:
    _, policy, engines = started
    engines.engine._weights._base_mark = ""  # as after a start
    sizes = [sync_weights(policy, engines, policy_version=1).num_bytes for _ in range(2)]
    adapter = 4 * sum(each.numel() for name, each in policy.worker._policy.model.named_parameters() if "lora_" in name)
    assert sizes[1] == adapter
    assert sizes[0] > 3 * adapter


def test_every_tensor_of_the_adapter_is_digested(started: tuple[TrainConfig, Any, Any]) -> None:
    _, policy, engines = started
    sync_weights(policy, engines, policy_version=1)
    expected = engines.engine._weights._expected
    fused = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    wanted = {f"model.layers.{n}.{module}.lora_{m}.weight" for n in range(2) for module in fused for m in "AB"}
    assert all(rank.keys() == wanted for rank in expected)
    for rank in range(len(expected)):
        for name in wanted:
            right = expected[rank][name]
            expected[rank][name] = "0" * 16
            with pytest.raises(WeightSyncError, match=name):
                engines.engine._weights.verify(policy_version=1)
            expected[rank][name] = right


def test_responses_under_way_go_on_with_the_new_adapter(
    started: tuple[TrainConfig, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, policy, engines = started
    sync_weights(policy, engines, policy_version=1)
    engine, body_of = engines.engine, rollout.sglang.engine.body_of

    def endless(request: GenerateRequest, **options: Any) -> dict[str, Any]:
        body = body_of(request, **options)
        body["sampling_params"]["ignore_eos"] = True
        return body

    monkeypatch.setattr(rollout.sglang.engine, "body_of", endless)
    asked = requests(max_new_tokens=LONG)
    engine.submit([10, 11, 12, 13], asked)
    engines.generate(requests(max_new_tokens=2))
    move_adapter(policy.worker)
    for name, parameter in policy.worker._policy.model.named_parameters():
        if "lora_B" in name:
            parameter.data.to_local().mul_(-1)
    with stopped_until_sync(engine, monkeypatch):
        sync_weights(policy, engines, policy_version=2)
    engines.generate(requests(max_new_tokens=2))
    engine.abort(None)
    generations = wait_for([10, 11, 12, 13], engine.poll, others=[])
    new = scored(policy, asked, generations)
    for generation, mine in zip(generations, new, strict=True):
        assert set(generation.token_versions) == {1, 2}
        sampled = torch.tensor(generation.token_versions) == 2
        gaps = (torch.tensor(generation.logprobs) - mine).abs()
        assert gaps[sampled].max() < 1e-4
        assert gaps[~sampled].mean() > 1e-3
    move_adapter(policy.worker)
    sync_weights(policy, engines, policy_version=2)


def leaves_it_out(monkeypatch: pytest.MonkeyPatch, engines: Any) -> None:
    """Requests do not name the adapter."""
    body_of = rollout.sglang.engine.body_of
    monkeypatch.setattr(rollout.sglang.engine, "body_of", lambda request, **_: body_of(request))


def keeps_the_old_one(monkeypatch: pytest.MonkeyPatch, engines: Any) -> None:
    """The new adapter does not reach the server."""
    monkeypatch.setattr(engines.engine._weights, "_payloads", lambda part: iter(()))


def mixes_layers(monkeypatch: pytest.MonkeyPatch, engines: Any) -> None:
    """The server takes the matrices of one layer for those of another."""
    update = rollout.sglang.weight_update
    describe = update.describe_weights

    def spoiled(weights: Any, **options: Any) -> str:
        swap = {"layers.0.": "layers.1.", "layers.1.": "layers.0."}
        tensors = [
            replace(spec, name=next((spec.name.replace(a, b) for a, b in swap.items() if a in spec.name), spec.name))
            for spec in weights.tensors
        ]
        return describe(replace(weights, tensors=tensors), **options)

    monkeypatch.setattr(update, "describe_weights", spoiled)


def scales_it(monkeypatch: pytest.MonkeyPatch, engines: Any) -> None:
    """The server multiplies by another number than alpha / rank."""
    update = rollout.sglang.weight_update
    described = update.described_adapter
    monkeypatch.setattr(update, "described_adapter", lambda adapter: described(adapter) | {"lora_alpha": 16})


@pytest.mark.parametrize("fault", [leaves_it_out, keeps_the_old_one, mixes_layers, scales_it])
def test_no_run_starts_with_a_server_that_has_another_adapter(
    started: tuple[TrainConfig, Any, Any], fault: Any
) -> None:
    config, policy, engines = started
    engine = engines.engine
    for name, parameter in policy.worker._policy.model.named_parameters():
        if "lora_B" in name:
            parameter.data.to_local().zero_()  # as a run begins
    with pytest.MonkeyPatch.context() as patch:
        fault(patch, engines)
        engine._version = 0
        with pytest.raises((ProbeError, WeightSyncError)) as stopped:
            start_run(config, policy, engines)
    assert "lora_" in str(stopped.value) or "adapter" in str(stopped.value)
    engine._version = 0
    policy.end_adapter_probe()
    assert "adapter proven in use" in start_run(config, policy, engines)
    sync_weights(policy, engines, policy_version=2)
