"""Weight syncs of a real SGLang server: replaced, verified bit by bit, refused, repeated, after a sleep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from packing_cases import pack
from sglang_cases import PROMPTS, Served, largest_gap, make_requests, publisher_of
from tiny_model import write_tiny_model

from rollout.engine import EngineError, WeightSyncError
from rollout.sglang.client import ClientError, SGLangClient
from rollout.sglang.expected import ExpectedDigests
from rollout.sglang.loader import LOADER
from rollout.sglang.weight_update import WeightUpdate, describe_weights
from rollout.types import PackedWeights, SharedWeights
from rollout.weights.shared_weights import WeightReader

pytestmark = pytest.mark.sglang


def test_weights_are_replaced_verified_and_used(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = make_requests(PROMPTS, num_samples=4)
    before = served.engine.generate(requests)
    old_version = served.version
    assert {generation.policy_version for generation in before} == {old_version}
    assert served.engine.policy_version == old_version
    new = write_tiny_model(tmp_path / "new", seed=1)
    with monkeypatch.context() as patched:
        patched.setattr("rollout.sglang.weight_update.PART_BYTES", 100_000)  # several requests
        report = served.engine.load_weights(served.packed(new))
    served.version, served.model = old_version + 1, new
    assert report.policy_version == served.engine.policy_version == old_version + 1
    assert report.num_tensors == len(list(new.named_parameters()))
    assert report.num_bytes == sum(parameter.nbytes for parameter in new.parameters())
    assert report.load_s > 0 and report.verify_s > 0
    after = served.engine.generate(requests)
    assert {generation.policy_version for generation in after} == {old_version + 1}
    # The same prompts were in the prefix cache: their log-probs are those of the new weights only if it was dropped.
    assert largest_gap(requests, after, new, temperature=1.0) < 1e-4
    served.verify()


def test_the_server_reads_what_the_trainer_published_without_a_copy_in_between(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = write_tiny_model(tmp_path / "new", seed=5)
    named = list(new.named_parameters())
    publisher, reader = publisher_of(named), WeightReader()

    def staged(*_: object) -> None:
        raise AssertionError("the weights are in shared memory already")

    monkeypatch.setattr("rollout.sglang.weight_update.WeightRegion", staged)
    for _ in range(3):
        with reader.opened(publisher.publish(named, policy_version=served.version + 1)) as packed:
            report = served.engine.load_weights(packed)
        reader.release()
        served.version, served.model = served.version + 1, new
        assert not report.in_place and served.engine.policy_version == served.version
    assert len(publisher._pool._regions) == 1
    requests = make_requests(PROMPTS)
    assert largest_gap(requests, served.engine.generate(requests), new, temperature=1.0) < 1e-4


def test_digests_that_the_trainer_made_are_used_and_a_wrong_one_is_found(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = list(served.model.named_parameters())
    publisher, reader, layout = publisher_of(named), WeightReader(), served.info.layout
    assert layout is not None

    def published(version: int) -> SharedWeights:
        expected = ExpectedDigests(layout, sent=publisher.names)
        shared = publisher.publish(named, policy_version=version, watchers=[expected.add])
        shared.engine_digests = {layout: expected.result()}
        return shared

    def made_again(*_: object) -> None:
        raise AssertionError("the trainer has made the digests of this layout")

    right = published(served.version + 1)
    with reader.opened(right) as packed, monkeypatch.context() as patched:
        patched.setattr(ExpectedDigests, "add", made_again)
        served.engine.load_weights(packed)
    served.version += 1
    wrong, name = published(served.version + 1), "model.layers.1.self_attn.qkv_proj.weight"
    wrong.engine_digests[layout][0][name] = "0" * 16
    with (
        reader.opened(wrong) as packed,
        pytest.raises(WeightSyncError, match=rf"{name}, made of .*: sent 0{{16}}, held"),
    ):
        served.engine.load_weights(packed)
    reader.close()


def test_a_tied_lm_head_may_be_sent_if_it_is_the_embedding(served: Served) -> None:
    named = [*served.model.named_parameters(), ("lm_head.weight", served.model.get_output_embeddings().weight)]
    served.engine.load_weights(pack(named, policy_version=served.version + 1, dtype=torch.float32))
    served.version += 1
    named[-1] = ("lm_head.weight", named[-1][1] + 1)
    differing = pack(named, policy_version=served.version + 1, dtype=torch.float32)
    with pytest.raises(WeightSyncError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        served.engine.load_weights(differing)


def test_wrong_weights_are_refused_before_anything_is_sent(served: Served) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    flipped = served.packed(served.model)
    spec = next(spec for spec in flipped.tensors if spec.name == name)
    flipped.data[spec.offset + 5] ^= 1
    with pytest.raises(WeightSyncError, match=rf"engine 0 .*{name} .*{spec.digest}.*"):
        served.engine.load_weights(flipped)

    named = dict(served.model.named_parameters())
    del named["model.norm.weight"]
    named["value_head.weight"] = torch.zeros(1)
    version = served.version + 1
    wrong_names = pack(named.items(), policy_version=version, dtype=torch.float32)
    with pytest.raises(
        WeightSyncError, match=rf"policy version {version}: missing .*model\.norm\.weight; .*value_head"
    ):
        served.engine.load_weights(wrong_names)

    assert served.engine.policy_version == served.version
    requests = make_requests(PROMPTS)
    generations = served.engine.generate(requests)
    assert largest_gap(requests, generations, served.model, temperature=1.0) < 1e-4


@pytest.mark.scenario(18)
def test_a_bit_lost_inside_the_engine_is_caught_and_stops_generation(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are right when they arrive; one bit changes on the way into SGLang."""
    name = "model.layers.0.self_attn.v_proj.weight"
    new = write_tiny_model(tmp_path / "new", seed=2)
    packed = served.packed(new)
    stage = WeightUpdate._staged

    def lossy(self: WeightUpdate, part: PackedWeights) -> PackedWeights:
        data = part.data.copy()
        for spec in part.tensors:
            if spec.name == name:
                data[spec.offset] ^= 1
        return stage(self, replace(part, data=data))

    with monkeypatch.context() as patched:
        patched.setattr(WeightUpdate, "_staged", lossy)
        with pytest.raises(WeightSyncError) as caught:
            served.engine.load_weights(packed)
    text = str(caught.value)
    assert f"policy version {served.version + 1} that it was sent" in text
    assert f"(it reports version 'unverified-{served.version + 1}')" in text
    assert "model.layers.0.self_attn.qkv_proj.weight, made of" in text and name in text
    assert text.count("sent ") - text.count("was sent") == 1, "exactly one parameter disagrees"
    with pytest.raises(EngineError, match=r"generate: the weights are unusable: the sync of policy version"):
        served.engine.generate(make_requests(PROMPTS))
    with pytest.raises(EngineError, match="which no completed sync set"):
        _ = served.engine.policy_version
    served.load(new)
    requests = make_requests(PROMPTS)
    assert largest_gap(requests, served.engine.generate(requests), new, temperature=1.0) < 1e-4


def test_weights_changed_behind_our_back_are_caught(served: Served) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    changed = served.model.get_parameter(name).detach().clone()
    changed[3, 4] += 1e-3
    served.verify()
    served.client.call("/begin_weight_update", body={}, timeout_s=30)
    publisher = publisher_of([(name, changed)])
    with WeightReader().opened(publisher.publish([(name, changed)], policy_version=99)) as packed:
        body = {"serialized_named_tensors": [describe_weights(packed)], "load_format": LOADER}
        served.client.call("/update_weights_from_tensor", body=body, timeout_s=30)
    served.client.call("/end_weight_update", body={}, timeout_s=30)
    with pytest.raises(WeightSyncError, match=rf"{name}, made of {name}: sent .*, held "):
        served.verify()
    served.load(served.model)
    served.verify()


@pytest.mark.scenario(18)
def test_a_sync_that_breaks_in_the_middle_can_be_repeated(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: WeightUpdate, part: PackedWeights) -> PackedWeights:
        raise ClientError("POST /update_weights_from_tensor: HTTP 500: planted", status=500)

    with monkeypatch.context() as patched:
        patched.setattr(WeightUpdate, "_staged", fail)
        with pytest.raises(
            WeightSyncError, match=r"engine 0 .* load_weights: the new weights were not loaded: .*planted"
        ):
            served.engine.load_weights(served.packed(served.model))
    with pytest.raises(EngineError, match="the weights are unusable"):
        served.engine.generate(make_requests(PROMPTS))
    served.load(served.model)
    assert served.engine.policy_version == served.version


def test_after_a_sleep_weights_come_before_the_cache_and_before_any_sampling(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU SGLang's memory saver gives nothing back; its routes, their order and their refusals are the same."""
    asked: list[tuple[str, object]] = []
    call = SGLangClient.call

    def record(self: SGLangClient, route: str, *, timeout_s: float, body: Mapping[str, Any] | None = None) -> Any:
        if body is not None:
            asked.append((route, body.get("tags")))
        return call(self, route, timeout_s=timeout_s, body=body)

    monkeypatch.setattr(SGLangClient, "call", record)
    requests = make_requests(PROMPTS, temperature=0.0)
    before = served.engine.generate(requests)
    asked.clear()
    for _ in range(2):
        served.engine.sleep()
    assert asked == [("/release_memory_occupation", ["weights", "kv_cache", "cuda_graph"])]
    for _ in range(2):
        served.engine.wake()
    assert asked[1:] == [("/resume_memory_occupation", ["weights"])]
    with pytest.raises(EngineError, match=r"unusable: they were given up while the engine slept; load weights again"):
        served.engine.generate(requests)
    asked.clear()
    served.load(served.model)
    routes = [route for route, _ in asked]
    assert asked[-1] == ("/resume_memory_occupation", ["kv_cache", "cuda_graph"])
    assert routes.count("/resume_memory_occupation") == 1 and "/update_weights_from_tensor" in routes
    after = served.engine.generate(requests)
    assert [generation.token_ids for generation in after] == [generation.token_ids for generation in before]
