"""A real SGLang server on a tiny random model: tokens, log-probs, seeds, weight syncs, faults, and a clean end.

Two servers in all: `served` (Qwen2, tied, float32) lives until the last test of its block kills it; `untied` (Qwen3,
bfloat16) until the last test stops it. Tests run in the order of the file.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
import torch
from bucket_cases import pack_buckets
from lying_server import Lie, lying_front
from tiny_model import EOS_TOKEN_ID, VOCAB_SIZE, write_tiny_model

from rollout.collect.filters import invalid_reason
from rollout.config import DType, PauseMode, SGLangConfig
from rollout.engine import EngineError, EngineInfo, WeightSyncError
from rollout.sglang.client import ClientError, Endpoint, SGLangClient
from rollout.sglang.cpu.platform import ATTENTION_BACKEND
from rollout.sglang.engine import SGLangEngine
from rollout.sglang.external import ADMIN_API_KEY, API_KEY
from rollout.sglang.loader import LOADER
from rollout.sglang.scratch import Scratch
from rollout.sglang.server import SGLangServer
from rollout.sglang.weight_update import REQUIRED_ROUTES, WeightUpdate, describe_bucket
from rollout.types import FinishReason, GenerateRequest, Generation, SamplingParams, WeightBucket
from rollout.weights.buckets import TensorShape
from rollout.weights.shared_weights import WeightPublisher, WeightReader
from trainer.run.probe import ProbeError, judge, rounding_tolerance

if TYPE_CHECKING:
    from transformers import PreTrainedModel

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

PROMPTS = [[3, 4, 5, 6, 7, 8, 9, 10], [20, 21, 22], [40], [11, 12, 13, 14, 11, 12, 13, 14, 50, 60]]
FAULT_TIMEOUT_S = 8.0
"""A dead server must be noticed within this on a loaded machine; on an idle one it takes well under a second."""


@dataclass
class Served:
    """A running engine and what is known about it."""

    engine: SGLangEngine
    info: EngineInfo
    model: PreTrainedModel
    log: Path
    version: int = 0

    @property
    def client(self) -> SGLangClient:
        server = self.engine._server
        assert server is not None
        return server.client()

    def buckets(self, model: PreTrainedModel, *, dtype: torch.dtype = torch.float32) -> list[WeightBucket]:
        """The model's weights as the next version, in several buckets."""
        return pack_buckets(
            model.named_parameters(), policy_version=self.version + 1, bucket_bytes=100_000, dtype=dtype
        )

    def load(self, model: PreTrainedModel) -> None:
        self.engine.load_weights(self.buckets(model))
        self.version += 1
        self.model = model


def publisher_of(named: list[tuple[str, torch.Tensor]]) -> WeightPublisher:
    shapes = [TensorShape(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named]
    return WeightPublisher(shapes, bucket_bytes=100_000, dtype=torch.float32)


def start(directory: Path, *, model_type: str, tied: bool, dtype: DType, tp_size: int = 1) -> Served:
    model = write_tiny_model(directory / "model", seed=0, model_type=model_type, tied=tied)
    config = SGLangConfig(dtype=dtype, generate_timeout_s=120, sync_timeout_s=120, engine_args={"tp_size": tp_size})
    engine = SGLangEngine(config, index=0, seed=0, device="cpu", log_dir=directory / "logs", num_threads=1)
    info = engine.start(directory / "model")
    return Served(engine=engine, info=info, model=model, log=directory / "logs" / "engine-0.log")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    running = start(tmp_path_factory.mktemp("qwen2"), model_type="qwen2", tied=True, dtype=DType.float32)
    yield running
    running.engine.stop()


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    # Without effect at temperature 1; at others the server then reports log-probs that are not those of its samples.
    os.environ["SGLANG_RETURN_ORIGINAL_LOGPROB"] = "1"
    try:
        running = start(tmp_path_factory.mktemp("qwen3"), model_type="qwen3", tied=False, dtype=DType.bfloat16)
    finally:
        del os.environ["SGLANG_RETURN_ORIGINAL_LOGPROB"]
    yield running
    running.engine.stop()


def make_requests(
    prompts: list[list[int]], *, num_samples: int = 1, temperature: float = 1.0, max_new_tokens: int = 24, seed: int = 0
) -> list[GenerateRequest]:
    """`num_samples` requests per prompt, each with a seed of its own."""
    return [
        GenerateRequest(
            prompt_id=prompt_id,
            sample_index=sample,
            prompt_token_ids=prompt,
            sampling=SamplingParams(
                temperature=temperature,
                max_new_tokens=max_new_tokens,
                seed=seed + prompt_id * 1000 + sample,
                stop_token_ids=(EOS_TOKEN_ID,),
            ),
        )
        for prompt_id, prompt in enumerate(prompts)
        for sample in range(num_samples)
    ]


def reference_logprobs(
    model: PreTrainedModel, prompt: list[int], response: list[int], *, temperature: float
) -> torch.Tensor:
    """[R] log-probs of the response under a float32 forward of transformers."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[0]
    scores = torch.log_softmax(logits.float() / temperature, dim=-1)
    at = torch.arange(len(prompt) - 1, len(prompt) + len(response) - 1)
    return scores[at, torch.tensor(response)]


def largest_gap(
    requests: list[GenerateRequest],
    generations: list[Generation],
    model: PreTrainedModel,
    *,
    temperature: float,
    shift: int = 0,
) -> float:
    """Largest |engine - transformers| over all response tokens; `shift` compares each token with a later one."""
    gaps = []
    for request, generation in zip(requests, generations, strict=True):
        assert generation.logprobs is not None
        expected = reference_logprobs(model, request.prompt_token_ids, generation.token_ids, temperature=temperature)
        engine = torch.tensor(generation.logprobs)
        count = len(engine) - shift
        if count > 0:
            gaps.append((engine[:count] - expected[shift:]).abs().max().item())
    return max(gaps)


def tokens(generations: list[Generation]) -> list[list[int]]:
    return [generation.token_ids for generation in generations]


def alive(pids: tuple[int, ...]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def scratch_of(running: Served) -> Scratch:
    server = running.engine._server
    assert server is not None and server._scratch is not None
    return server._scratch


# ---------------------------------------------------------------------------------------------- start and security


def test_info_names_live_processes_that_listen_on_loopback(served: Served) -> None:
    assert served.info.name.startswith("sglang 0.")
    assert served.info.address.startswith("http://127.0.0.1:")
    assert len(served.info.pids) >= 3
    assert alive(served.info.pids) == list(served.info.pids)
    port = int(served.info.address.rsplit(":", 1)[1])
    listening = [
        connection.laddr.ip
        for pid in served.info.pids
        for connection in psutil.Process(pid).net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    ]
    assert listening == ["127.0.0.1"]


def test_keys_are_in_no_process_list_environment_or_log(served: Served) -> None:
    server = served.engine._server
    assert server is not None
    for key in (server._api_key, server._admin_api_key):
        assert len(key) >= 40
        for pid in served.info.pids:
            assert key.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
            assert key.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
        assert key not in served.log.read_text(encoding="utf-8")
    assert "'api_key': '[redacted]'" in served.log.read_text(encoding="utf-8")
    assert stat.S_IMODE(served.log.stat().st_mode) == 0o600


def test_wrong_keys_get_401(served: Served) -> None:
    server = served.engine._server
    assert server is not None
    stranger = SGLangClient(Endpoint(address=server.address, api_key="guess", admin_api_key="guess"))
    user = SGLangClient(Endpoint(address=server.address, api_key=server._api_key, admin_api_key=server._api_key))
    body = {"input_ids": [[3]], "sampling_params": [{"max_new_tokens": 1}]}
    for client, route, sent in (
        (stranger, "/generate", body),
        (stranger, "/model_info", None),
        (stranger, "/openapi.json", None),
        (stranger, "/weights_checker", {"action": "checksum"}),
        (user, "/weights_checker", {"action": "checksum"}),
        (user, "/pause_generation", {"mode": "abort"}),
    ):
        with pytest.raises(ClientError) as caught:
            client.call(route, body=sent, timeout_s=30)
        assert caught.value.status == 401, route


def test_a_server_on_a_cpu_attends_in_batches(served: Served) -> None:
    assert served.client.call("/server_info", timeout_s=30)["attention_backend"] == ATTENTION_BACKEND


# ------------------------------------------------------------------------------------------------------ generation


def test_greedy_equals_transformers_and_repeats(served: Served) -> None:
    requests = make_requests(PROMPTS, temperature=0.0, max_new_tokens=16)
    first = served.engine.generate(requests)
    assert tokens(served.engine.generate(requests)) == tokens(first)
    for request, generation in zip(requests, first, strict=True):
        context, expected = list(request.prompt_token_ids), []
        while len(expected) < 16 and EOS_TOKEN_ID not in expected:
            with torch.inference_mode():
                logits = served.model(input_ids=torch.tensor([context]), use_cache=False).logits
            expected.append(int(logits[0, -1].argmax()))
            context.append(expected[-1])
        assert generation.token_ids == expected


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_transformers_at_the_same_temperature(served: Served, temperature: float) -> None:
    requests = make_requests(PROMPTS, num_samples=8, temperature=temperature)
    generations = served.engine.generate(requests)
    assert largest_gap(requests, generations, served.model, temperature=temperature) < 1e-4


def test_the_comparison_sees_a_wrong_temperature_shift_or_weight(served: Served, tmp_path: Path) -> None:
    requests = make_requests(PROMPTS, num_samples=8, temperature=0.7)
    generations = served.engine.generate(requests)
    assert largest_gap(requests, generations, served.model, temperature=1.0) > 0.1
    assert largest_gap(requests, generations, served.model, temperature=0.7, shift=1) > 0.1
    other = write_tiny_model(tmp_path / "other", seed=1)
    assert largest_gap(requests, generations, other, temperature=0.7) > 0.1
    nearly = write_tiny_model(tmp_path / "nearly", seed=0)
    with torch.no_grad():
        nearly.get_parameter("model.layers.1.self_attn.k_proj.bias")[0] += 0.05
    assert largest_gap(requests, generations, nearly, temperature=0.7) > 2e-4


def test_responses_end_with_the_sampled_eos_or_at_the_bound(served: Served) -> None:
    requests = make_requests(PROMPTS, num_samples=24, max_new_tokens=24, seed=50)
    generations = served.engine.generate(requests)
    stopped = [generation for generation in generations if generation.finish_reason is FinishReason.stop]
    complete = [generation for generation in generations if generation.finish_reason is FinishReason.length]
    assert len(stopped) >= 5 and len(complete) >= 5
    assert len(stopped) + len(complete) == len(generations)
    for generation in stopped:
        assert generation.token_ids[-1] == EOS_TOKEN_ID
        assert EOS_TOKEN_ID not in generation.token_ids[:-1]
    for generation in complete:
        assert len(generation.token_ids) == 24
        assert EOS_TOKEN_ID not in generation.token_ids
    # Every token has its log-prob, the end-of-sequence included, and it is the right one.
    assert all(g.logprobs is not None and len(g.logprobs) == len(g.token_ids) for g in generations)
    assert largest_gap(requests, generations, served.model, temperature=1.0) < 1e-4
    # The model's own end-of-sequence ends a response that names no stop token, in the same place.
    silent = [replace(request, sampling=replace(request.sampling, stop_token_ids=())) for request in requests]
    assert tokens(served.engine.generate(silent)) == tokens(generations)


def test_stop_token_ids_end_a_response(served: Served) -> None:
    request = make_requests(PROMPTS[:1], temperature=0.0, max_new_tokens=8)[0]
    (free,) = served.engine.generate([request])
    stop = free.token_ids[2]
    sampling = replace(request.sampling, stop_token_ids=(stop,))
    (bounded,) = served.engine.generate([replace(request, sampling=sampling)])
    assert bounded.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert bounded.finish_reason is FinishReason.stop


def test_a_response_depends_on_its_own_seed_and_on_nothing_else(served: Served) -> None:
    requests = make_requests(PROMPTS, num_samples=8)
    together = tokens(served.engine.generate(requests))
    assert tokens(served.engine.generate(requests)) == together
    backwards = tokens(served.engine.generate(requests[::-1]))[::-1]
    assert backwards == together
    alone = [tokens(served.engine.generate([request]))[0] for request in requests[::5]]
    assert alone == together[::5]
    reseeded = tokens(served.engine.generate(make_requests(PROMPTS, num_samples=8, seed=7_000_000)))
    assert sum(one == other for one, other in zip(together, reseeded, strict=True)) <= 1
    group = together[:8]
    assert len({tuple(response) for response in group}) == 8


def test_samples_follow_the_models_law(served: Served) -> None:
    """First tokens of 1500 seeds against softmax(logits / T): chi-square over the whole vocabulary."""
    count, temperature = 1500, 0.5
    requests = make_requests(PROMPTS[:1], num_samples=count, temperature=temperature, max_new_tokens=1)
    drawn = torch.tensor(tokens(served.engine.generate(requests))).view(-1)
    with torch.inference_mode():
        logits = served.model(input_ids=torch.tensor(PROMPTS[:1]), use_cache=False).logits[0, -1]
    expected = torch.softmax(logits / temperature, dim=-1) * count
    observed = drawn.bincount(minlength=VOCAB_SIZE)
    chi_square = ((observed - expected) ** 2 / expected).sum().item()
    assert chi_square < (VOCAB_SIZE - 1) + 5 * (2 * (VOCAB_SIZE - 1)) ** 0.5
    cold = torch.softmax(logits, dim=-1) * count
    assert ((observed - cold) ** 2 / cold).sum().item() > (VOCAB_SIZE - 1) + 8 * (2 * (VOCAB_SIZE - 1)) ** 0.5


def test_greedy_truncated_and_free_requests_share_a_batch(served: Served) -> None:
    free = make_requests(PROMPTS, num_samples=2)
    greedy = make_requests(PROMPTS, temperature=0.0)
    narrow = [replace(r, sampling=replace(r.sampling, top_k=3, top_p=0.9, min_p=0.01)) for r in free]
    mixed = served.engine.generate([*free, *greedy, *narrow])
    assert tokens(mixed[: len(free)]) == tokens(served.engine.generate(free))
    assert tokens(mixed[len(free) : len(free) + len(greedy)]) == tokens(served.engine.generate(greedy))
    for request, generation in zip(narrow, mixed[len(free) + len(greedy) :], strict=True):
        context = list(request.prompt_token_ids)
        for token in generation.token_ids:
            with torch.inference_mode():
                logits = served.model(input_ids=torch.tensor([context]), use_cache=False).logits[0, -1]
            assert token in logits.topk(3).indices.tolist()
            context.append(token)


def test_requests_that_cannot_be_served_are_refused_and_the_engine_goes_on(served: Served) -> None:
    (request,) = make_requests(PROMPTS[:1])
    long = replace(request, sampling=replace(request.sampling, max_new_tokens=510 - 7))
    with pytest.raises(ValueError, match=r"prompt 0/0: 8 prompt tokens and max_new_tokens=503 exceed .* 510 tokens"):
        served.engine.generate([long])
    for broken, text in (
        (replace(request, prompt_token_ids=[]), "the prompt has no tokens"),
        (replace(request, prompt_token_ids=[3, VOCAB_SIZE]), f"token ids outside 0..{VOCAB_SIZE - 1}"),
        (replace(request, prompt_token_ids=[-1]), "token ids outside"),
        (replace(request, sampling=replace(request.sampling, temperature=-1.0)), "temperature must be >= 0"),
    ):
        with pytest.raises(ValueError, match=text):
            served.engine.generate([request, broken])
    with pytest.raises(EngineError, match=r"generate: POST /generate: HTTP 400: .*top_p must be in"):
        served.engine.generate([replace(request, sampling=replace(request.sampling, top_p=2.0))])
    unreadable = replace(request, sampling=replace(request.sampling, seed=np.int64(3)))  # type: ignore[arg-type]
    with pytest.raises(EngineError, match=r"generate: \w+: Type is not JSON serializable"):
        served.engine.generate([unreadable])
    assert served.engine.generate([]) == []
    longest = replace(request, sampling=replace(request.sampling, max_new_tokens=510 - 8, stop_token_ids=(), seed=3))
    (generation,) = served.engine.generate([longest])
    assert generation.finish_reason is FinishReason.stop or len(generation.token_ids) == 502


def test_the_probe_accepts_this_server_at_any_temperature(served: Served) -> None:
    for temperature in (1.0, 0.7):
        assert judged(served, temperature=temperature, lowest=DType.float32).abs().max() < 1e-4


# ----------------------------------------------------------------------------------------------------- weight sync


def test_weights_are_replaced_verified_and_used(served: Served, tmp_path: Path) -> None:
    requests = make_requests(PROMPTS, num_samples=4)
    before = served.engine.generate(requests)
    assert {generation.policy_version for generation in before} == {0}
    assert served.engine.policy_version == 0
    new = write_tiny_model(tmp_path / "new", seed=1)
    buckets = served.buckets(new)
    assert len(buckets) > 1
    report = served.engine.load_weights(buckets)
    served.version, served.model = 1, new
    assert report.policy_version == served.engine.policy_version == 1
    assert report.num_tensors == len(list(new.named_parameters()))
    assert report.num_bytes == sum(parameter.nbytes for parameter in new.parameters())
    assert report.load_s > 0 and report.verify_s > 0
    after = served.engine.generate(requests)
    assert {generation.policy_version for generation in after} == {1}
    # The same prompts were in the prefix cache: their log-probs are those of the new weights only if it was dropped.
    assert largest_gap(requests, after, new, temperature=1.0) < 1e-4
    served.engine.verify_weights()


def test_the_server_reads_what_the_trainer_published_without_a_copy_in_between(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = write_tiny_model(tmp_path / "new", seed=5)
    named = list(new.named_parameters())
    publisher, reader = publisher_of(named), WeightReader()

    def staged(*_: object) -> None:
        raise AssertionError("the buckets are in shared memory already")

    monkeypatch.setattr("rollout.sglang.weight_update.WeightRegion", staged)
    for _ in range(3):
        with reader.opened(publisher.publish(named, policy_version=served.version + 1)) as buckets:
            assert len(buckets) > 1
            report = served.engine.load_weights(buckets)
        reader.release()
        served.version, served.model = served.version + 1, new
        assert not report.in_place and served.engine.policy_version == served.version
    assert len(publisher._pool._regions) == 1
    requests = make_requests(PROMPTS)
    assert largest_gap(requests, served.engine.generate(requests), new, temperature=1.0) < 1e-4


def test_a_tied_lm_head_may_be_sent_if_it_is_the_embedding(served: Served) -> None:
    named = [*served.model.named_parameters(), ("lm_head.weight", served.model.get_output_embeddings().weight)]
    buckets = pack_buckets(named, policy_version=served.version + 1, bucket_bytes=1 << 20, dtype=torch.float32)
    served.engine.load_weights(buckets)
    served.version += 1
    named[-1] = ("lm_head.weight", named[-1][1] + 1)
    buckets = pack_buckets(named, policy_version=served.version + 1, bucket_bytes=1 << 20, dtype=torch.float32)
    with pytest.raises(WeightSyncError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        served.engine.load_weights(buckets)


def test_wrong_buckets_are_refused_before_anything_is_sent(served: Served) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    flipped = served.buckets(served.model)
    bucket = next(b for b in flipped if any(spec.name == name for spec in b.tensors))
    spec = next(spec for spec in bucket.tensors if spec.name == name)
    bucket.data[spec.offset + 5] ^= 1
    with pytest.raises(WeightSyncError, match=rf"engine 0 .*{name} .*{spec.digest}.*"):
        served.engine.load_weights(flipped)

    named = dict(served.model.named_parameters())
    del named["model.norm.weight"]
    named["value_head.weight"] = torch.zeros(1)
    version = served.version + 1
    wrong_names = pack_buckets(named.items(), policy_version=version, bucket_bytes=1 << 20, dtype=torch.float32)
    with pytest.raises(
        WeightSyncError, match=rf"policy version {version}: missing .*model\.norm\.weight; .*value_head"
    ):
        served.engine.load_weights(wrong_names)

    mixed = served.buckets(served.model)
    mixed[0].policy_version += 1
    with pytest.raises(WeightSyncError, match="different policy versions"):
        served.engine.load_weights(mixed)

    assert served.engine.policy_version == served.version
    requests = make_requests(PROMPTS)
    generations = served.engine.generate(requests)
    assert largest_gap(requests, generations, served.model, temperature=1.0) < 1e-4


def test_a_bit_lost_inside_the_engine_is_caught_and_stops_generation(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bucket is right when it arrives; one bit changes on the way into SGLang."""
    name = "model.layers.0.self_attn.v_proj.weight"
    new = write_tiny_model(tmp_path / "new", seed=2)
    buckets = served.buckets(new)
    share = WeightUpdate._shared

    def lossy(self: WeightUpdate, bucket: WeightBucket) -> WeightBucket:
        data = bucket.data.copy()
        for spec in bucket.tensors:
            if spec.name == name:
                data[spec.offset] ^= 1
        return share(self, replace(bucket, data=data))

    with monkeypatch.context() as patched:
        patched.setattr(WeightUpdate, "_shared", lossy)
        with pytest.raises(WeightSyncError) as caught:
            served.engine.load_weights(buckets)
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
    served.engine.verify_weights()
    served.client.call("/begin_weight_update", body={}, timeout_s=30)
    publisher = publisher_of([(name, changed)])
    with WeightReader().opened(publisher.publish([(name, changed)], policy_version=99)) as (bucket,):
        body = {"serialized_named_tensors": [describe_bucket(bucket)], "load_format": LOADER}
        served.client.call("/update_weights_from_tensor", body=body, timeout_s=30)
    served.client.call("/end_weight_update", body={}, timeout_s=30)
    with pytest.raises(WeightSyncError, match=rf"engine 0 .*verify_weights: .*{name}, made of {name}: sent .*, held "):
        served.engine.verify_weights()
    with pytest.raises(EngineError, match="the weights are unusable"):
        served.engine.generate(make_requests(PROMPTS))
    served.load(served.model)
    served.engine.verify_weights()


def test_a_sync_that_breaks_in_the_middle_can_be_repeated(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: WeightUpdate, bucket: WeightBucket) -> WeightBucket:
        raise ClientError("POST /update_weights_from_tensor: HTTP 500: planted", status=500)

    with monkeypatch.context() as patched:
        patched.setattr(WeightUpdate, "_shared", fail)
        with pytest.raises(
            WeightSyncError, match=r"engine 0 .* load_weights: the new weights were not loaded: .*planted"
        ):
            served.engine.load_weights(served.buckets(served.model))
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


# -------------------------------------------------------------------------------------------------------- streaming


def poll_all(engine: SGLangEngine, count: int, *, into: dict[int, Generation] | None = None) -> dict[int, Generation]:
    """Poll until `count` completions are there, by ticket; each comes once."""
    got = {} if into is None else into
    deadline = time.monotonic() + 60
    while len(got) < count:
        assert time.monotonic() < deadline, f"{len(got)} of {count} came back"
        for ticket, generation in engine.poll(1.0):
            assert ticket not in got
            got[ticket] = generation
    return got


def long_running(engine: SGLangEngine) -> list[GenerateRequest]:
    """Requests that have been submitted (tickets 0, 1, ...), of which some are under way."""
    requests = make_requests(PROMPTS, num_samples=8, max_new_tokens=400, seed=11)
    engine.submit(range(len(requests)), requests)
    return requests


def test_samples_come_back_as_they_end_and_are_those_of_a_blocking_call(served: Served) -> None:
    requests = make_requests(PROMPTS, num_samples=6, max_new_tokens=200)
    assert served.engine.poll(0.0) == []
    served.engine.submit(range(100, 100 + len(requests)), requests)
    got: dict[int, Generation] = {}
    polls = 0
    while len(got) < len(requests):
        completions = served.engine.poll(5.0)
        polls += bool(completions)
        got |= dict(completions)
    assert polls > 2, "a short response waited for the long ones"
    assert tokens([got[100 + i] for i in range(len(requests))]) == tokens(served.engine.generate(requests))
    for generation in got.values():
        assert generation.token_versions == [served.version] * len(generation.token_ids)


def test_an_abort_returns_the_tokens_so_far_and_a_resumed_response_is_one_response(served: Served) -> None:
    requests = long_running(served.engine)
    served.engine.submit([900], [requests[0]])
    time.sleep(0.7)
    served.engine.abort([900])
    served.engine.abort([900, 12345])
    served.engine.abort(None)
    got = poll_all(served.engine, len(requests) + 1)
    partial = {t: g for t, g in got.items() if g.finish_reason is FinishReason.abort and g.token_ids}
    assert len(partial) >= 3, "the requests ended before they were aborted"
    assert all(len(g.logprobs or []) == len(g.token_ids) == len(g.token_versions) for g in got.values())
    assert served.engine.poll(0.0) == []
    ticket = max(set(partial) - {900}, key=lambda t: len(partial[t].token_ids))
    begun = partial[ticket]
    request = replace(requests[ticket], resumed=begun)
    request.sampling = replace(request.sampling, max_new_tokens=len(begun.token_ids) + 20)
    (whole,) = served.engine.generate([request])
    assert whole.token_ids[: len(begun.token_ids)] == begun.token_ids
    assert whole.logprobs is not None and begun.logprobs is not None
    assert whole.logprobs[: len(begun.logprobs)] == begun.logprobs
    assert len(begun.token_ids) < len(whole.token_ids) <= len(begun.token_ids) + 20
    # The seed of a token depends on its position: with the same seed a resumed response is the uninterrupted one.
    (straight,) = served.engine.generate([replace(request, resumed=None)])
    assert whole.token_ids == straight.token_ids
    assert largest_gap([request], [whole], served.model, temperature=1.0) < 1e-4


def test_requests_that_were_not_sent_yet_are_aborted_too(served: Served) -> None:
    stream = served.engine._requests
    assert stream is not None
    requests = make_requests(PROMPTS, max_new_tokens=50)
    with stream.held():
        served.engine.submit(range(len(requests)), requests)
        served.engine.abort([0, 2])
        got = poll_all(served.engine, 2)
        assert {(t, g.finish_reason, *g.token_ids) for t, g in got.items()} == {
            (0, FinishReason.abort),
            (2, FinishReason.abort),
        }
    assert set(poll_all(served.engine, 4, into=got)) == {0, 1, 2, 3}


def test_weights_in_flight_are_read_anew_and_every_token_says_which_sampled_it(served: Served, tmp_path: Path) -> None:
    new = write_tiny_model(tmp_path / "new", seed=8)  # before the requests, which would end meanwhile
    requests = long_running(served.engine)
    time.sleep(0.7)
    old, old_version = served.model, served.version
    served.load(new)
    got = poll_all(served.engine, len(requests))
    mixed = 0
    for ticket, generation in got.items():
        versions = torch.tensor(generation.token_versions)
        assert set(versions.tolist()) <= {old_version, served.version}
        assert versions.tolist() == sorted(generation.token_versions)
        mixed += len(set(versions.tolist())) == 2
        prompt = requests[ticket].prompt_token_ids
        before, after = (
            reference_logprobs(model, prompt, generation.token_ids, temperature=1.0) for model in (old, served.model)
        )
        expected = torch.where(versions == old_version, before, after)
        assert (torch.tensor(generation.logprobs) - expected).abs().max() < 1e-4
    assert mixed >= 2, "no response was under way during the sync"
    assert largest_gap(requests, served.engine.generate(requests), served.model, temperature=1.0) < 1e-4


def test_in_place_keeps_what_was_computed_but_no_later_request_sees_it(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.engine._config, "pause_mode", PauseMode.in_place)
    new = write_tiny_model(tmp_path / "new", seed=9)  # before the requests, which would end meanwhile
    requests = long_running(served.engine)
    time.sleep(0.7)
    old, old_version = served.model, served.version
    served.load(new)
    fresh = make_requests(PROMPTS, num_samples=2, seed=77)
    served.engine.submit(range(500, 500 + len(fresh)), fresh)
    got = poll_all(served.engine, len(requests) + len(fresh))
    stale = 0.0
    for ticket, request in enumerate(requests):
        versions = torch.tensor(got[ticket].token_versions)
        if len(set(versions.tolist())) < 2:
            continue
        logprobs = torch.tensor(got[ticket].logprobs)
        before, after = (
            reference_logprobs(model, request.prompt_token_ids, got[ticket].token_ids, temperature=1.0)
            for model in (old, served.model)
        )
        is_old = versions == old_version
        assert (logprobs - before)[is_old].abs().max() < 1e-4
        stale = max(stale, (logprobs - after)[~is_old].abs().max().item())
    assert stale > 1e-3, "what the old weights computed was not used"
    # The same prompts: their old prefixes are still in the cache, under another key.
    gap = largest_gap(fresh, [got[500 + i] for i in range(len(fresh))], served.model, temperature=1.0)
    assert gap < 1e-4
    assert served.engine._requests is not None
    served.engine._requests.extra_key = None
    careless = make_requests(PROMPTS, num_samples=2, seed=99)
    gap = largest_gap(careless, served.engine.generate(careless), served.model, temperature=1.0)
    assert gap > 1e-3, "without the key the old prefixes would have been found"
    monkeypatch.undo()
    served.load(served.model)


def test_pause_mode_abort_returns_what_is_under_way(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.engine._config, "pause_mode", PauseMode.abort)
    new = write_tiny_model(tmp_path / "new", seed=10)  # before the requests, which would end meanwhile
    requests = long_running(served.engine)
    time.sleep(0.2)
    old_version = served.version
    served.load(new)
    got = poll_all(served.engine, len(requests))
    aborted = [g for g in got.values() if g.finish_reason is FinishReason.abort]
    assert len(aborted) >= 3
    assert {version for g in got.values() for version in g.token_versions} == {old_version}


def test_sleep_is_refused_while_requests_are_unfinished(served: Served) -> None:
    long_running(served.engine)
    with pytest.raises(EngineError, match="sleep: requests are unfinished; poll or abort them first"):
        served.engine.sleep()
    served.engine.abort(None)
    poll_all(served.engine, 32)


def test_an_older_server_without_update_sessions_is_driven_by_its_routes(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Releases before 0.5.23 have no session; they are below the security floor, but the routes decide, not the name.

    The server here has sessions and refuses an update outside of one: what is sent shows which protocol was chosen.
    """
    asked: list[str] = []
    call = SGLangClient.call

    def record(self: SGLangClient, route: str, *, timeout_s: float, body: Mapping[str, Any] | None = None) -> Any:
        asked.append(route)
        return call(self, route, timeout_s=timeout_s, body=body)

    monkeypatch.setattr(SGLangClient, "call", record)
    served.load(served.model)
    assert {"/begin_weight_update", "/end_weight_update"} <= set(asked)
    asked.clear()
    monkeypatch.setattr(served.engine._weights, "_routes", REQUIRED_ROUTES)
    with pytest.raises(WeightSyncError, match=r"must run between begin_weight_update\(\)"):
        served.load(served.model)
    assert "/begin_weight_update" not in asked and "/update_weights_from_tensor" in asked
    monkeypatch.undo()
    served.load(served.model)


# ------------------------------------------------------------------------------- servers that were there before us


@contextmanager
def external(served: Served, monkeypatch: pytest.MonkeyPatch, *, address: str = "", **options: Any) -> Iterator[Served]:
    """An engine on the server of `served`, or on a front of it, as `rollout.servers` makes it; not synced yet."""
    server = served.engine._server
    assert isinstance(server, SGLangServer)
    monkeypatch.setenv(API_KEY, server._api_key)
    monkeypatch.setenv(ADMIN_API_KEY, server._admin_api_key)
    options = {"dtype": DType.float32, "generate_timeout_s": 60, "sync_timeout_s": 60, **options}
    config = SGLangConfig(servers=[address or served.info.address], **options)
    engine = SGLangEngine(config, index=0, seed=0, device="cpu", log_dir=served.log.parent, num_threads=None)
    try:
        info = engine.start(served.log.parents[1] / "model")
        yield Served(engine=engine, info=info, model=served.model, log=served.log, version=served.version)
    finally:
        engine.stop()


@pytest.mark.parametrize("maps_memory", [True, False])
def test_an_external_server_is_synced_used_and_left_as_it_was(
    served: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, maps_memory: bool
) -> None:
    """One that has our loader maps the weights; one that Parity is not installed for is sent them."""
    if not maps_memory:
        monkeypatch.setattr("rollout.sglang.engine._maps_memory", lambda client, info: False)
    requests = make_requests(PROMPTS)
    with external(served, monkeypatch) as theirs:
        assert theirs.info.pids == () and theirs.info.address == served.info.address
        assert theirs.info.name == served.info.name
        assert theirs.engine._weights._maps_memory is maps_memory
        with pytest.raises(EngineError, match="unusable: none have been sent to this server yet; load weights"):
            theirs.engine.submit([1], requests[:1])
        theirs.load(write_tiny_model(tmp_path / "new", seed=20 + maps_memory))
        theirs.engine.verify_weights()
        assert largest_gap(requests, theirs.engine.generate(requests), theirs.model, temperature=1.0) < 1e-4
        theirs.engine.submit(range(len(requests)), requests)
    assert alive(served.info.pids) == list(served.info.pids)
    served.version = theirs.version
    served.load(theirs.model)
    assert largest_gap(requests, served.engine.generate(requests), served.model, temperature=1.0) < 1e-4


def test_an_external_server_that_does_not_fit_is_refused(
    served: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with (
        pytest.raises(EngineError, match=r"computes in float32, rollout\.dtype is bfloat16"),
        external(served, monkeypatch, dtype=DType.bfloat16),
    ):
        pass
    write_tiny_model(tmp_path / "model", seed=0, model_type="qwen3", tied=False)
    other = replace(served, log=tmp_path / "logs" / "engine-0.log")
    with pytest.raises(EngineError, match=r"start: .*model: .*q_norm"), external(other, monkeypatch):
        pass
    with monkeypatch.context() as patched:
        patched.setattr("rollout.sglang.external.ADMIN_API_KEY", "PARITY_NO_SUCH_KEY")
        with pytest.raises(EngineError, match=r"HTTP 401.*is not ours"), external(served, patched):
            pass
        patched.setattr("rollout.sglang.external.API_KEY", "PARITY_NO_SUCH_KEY")
        expected = r"start: GET /model_info: HTTP 401.*set PARITY_NO_SUCH_KEY"
        with pytest.raises(EngineError, match=expected), external(served, patched):
            pass

    def old(route: str, reply: Any) -> Any:
        return {**reply, "version": "0.5.20"} if route == "/server_info" else reply

    def poor(route: str, reply: Any) -> Any:
        if route == "/openapi.json":
            del reply["paths"]["/weights_checker"]
        return reply

    for lie, text in ((old, r"SGLang 0\.5\.20 is too old"), (poor, "lacks the routes /weights_checker")):
        with (
            lying_front(served.info.address, lie) as address,
            pytest.raises(EngineError, match=text),
            external(served, monkeypatch, address=address),
        ):
            pass


def altered(change: Callable[[dict[str, Any]], object]) -> Lie:
    """A lie about every sample."""

    def lie(route: str, reply: Any) -> Any:
        if route == "/generate":
            change(reply)
        return reply

    return lie


def relabel(reply: dict[str, Any], version: str) -> None:
    for span in reply["meta_info"]["weight_versions"]:
        span["version"] = version


def cut(reply: dict[str, Any]) -> None:
    reply["output_ids"].pop()
    reply["meta_info"]["output_token_logprobs"].pop()


def hang_up(reply: dict[str, Any]) -> None:
    raise ConnectionError


def first_logprob(reply: dict[str, Any], value: float | None) -> None:
    reply["meta_info"]["output_token_logprobs"][0][0] = value


@pytest.mark.parametrize(
    ("change", "dropped"),
    [
        (lambda reply: relabel(reply, "0"), "wrong_version"),
        (lambda reply: reply["meta_info"].pop("output_token_logprobs"), "no_logprobs"),
        (lambda reply: reply["meta_info"]["output_token_logprobs"].pop(), "wrong_length"),
        (lambda reply: first_logprob(reply, None), "bad_logprob"),
        (lambda reply: first_logprob(reply, 0.5), "bad_logprob"),
    ],
)
def test_a_reply_that_cannot_be_trained_on_is_dropped_by_name(
    served: Served, monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], object], dropped: str
) -> None:
    (request,) = make_requests(PROMPTS[:1], max_new_tokens=4)
    with (
        lying_front(served.info.address, altered(change)) as address,
        external(served, monkeypatch, address=address) as theirs,
    ):
        theirs.load(served.model)
        (generation,) = theirs.engine.generate([request])
        reason = invalid_reason(request, generation, policy_version=theirs.version)
        assert reason is not None and reason.name == dropped
    served.version = theirs.version


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda reply: relabel(reply, "99"), r"sampled by weights of version 99; the newest that was sent is \d+"),
        (lambda reply: relabel(reply, "unverified-3"), "holds weights of version 'unverified-3', which no completed"),
        (
            lambda reply: reply["meta_info"]["weight_versions"].clear(),
            "tokens came back, with the weight versions of 0",
        ),
        (cut, r"the response was cut at 3 of max_new_tokens=4 tokens"),
        (lambda reply: reply["output_ids"].__setitem__(0, 70), "the response has token ids outside 0..66"),
        (lambda reply: reply["output_ids"].reverse(), "the log-probs are those of other tokens than the response"),
        (lambda reply: reply["meta_info"].update(prompt_tokens=9), "8 prompt tokens were sent, the server read 9"),
        (lambda reply: reply.pop("output_ids"), "the reply has no output_ids"),
        (hang_up, "ServerDisconnectedError"),
    ],
)
def test_a_reply_that_contradicts_the_request_is_an_error(
    served: Served, monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], object], text: str
) -> None:
    request = make_requests(PROMPTS[:1], max_new_tokens=4, seed=4)[0]
    with (
        lying_front(served.info.address, altered(change)) as address,
        external(served, monkeypatch, address=address) as theirs,
    ):
        theirs.load(served.model)
        with pytest.raises(EngineError, match=text):
            theirs.engine.generate([request])
        assert theirs.engine.poll(0.0) == [], "after an error nothing is unfinished"
    served.version = theirs.version


def test_a_server_that_holds_other_weights_than_it_says_is_found_by_the_digests(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lie(route: str, reply: Any) -> Any:
        if route == "/weights_checker":
            checksums = reply["ranks"][0]["checksums"]
            checksums[min(checksums)] = "0" * 16
        return reply

    with (
        lying_front(served.info.address, lie) as address,
        external(served, monkeypatch, address=address) as theirs,
        pytest.raises(WeightSyncError, match=r"does not hold the weights .* that it was sent .* held 0000000000000000"),
    ):
        theirs.load(served.model)
    served.load(served.model)


def test_a_wedged_server_is_noticed_by_the_deadline(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scheduler stands still; the HTTP process goes on to accept requests and to answer some."""
    (scheduler,) = (pid for pid in served.info.pids if "scheduler" in psutil.Process(pid).name())
    with external(served, monkeypatch, generate_timeout_s=2.0) as theirs:
        theirs.load(served.model)
        served.version = theirs.version
        psutil.Process(scheduler).suspend()
        try:
            begin = time.monotonic()
            theirs.engine.submit([1, 2], make_requests(PROMPTS[:2]))
            assert theirs.engine.poll(0.5) == []
            with pytest.raises(EngineError, match=r"POST /generate: no complete answer within 2\.0 s"):
                theirs.engine.poll(30.0)
            assert 1.9 < time.monotonic() - begin < 2.0 + FAULT_TIMEOUT_S
        finally:
            psutil.Process(scheduler).resume()
    served.load(served.model)
    requests = make_requests(PROMPTS)
    assert largest_gap(requests, served.engine.generate(requests), served.model, temperature=1.0) < 1e-4


# ---------------------------------------------------------------------------------------------------------- faults


def test_killing_the_scheduler_during_generate_is_reported_at_once_and_leaves_nothing(served: Served) -> None:
    scratch = scratch_of(served)
    (scheduler,) = (pid for pid in served.info.pids if "scheduler" in psutil.Process(pid).name())
    assert scratch.segments and all(segment.exists() for segment in scratch.segments)
    killed_at: list[float] = []

    def kill() -> None:
        killed_at.append(time.monotonic())
        psutil.Process(scheduler).kill()

    timer = threading.Timer(0.7, kill)
    timer.start()
    requests = make_requests(PROMPTS, num_samples=16, max_new_tokens=400)
    with pytest.raises(EngineError) as caught:
        while True:
            served.engine.generate(requests)
    took_s = time.monotonic() - killed_at[0]
    timer.join()
    text = str(caught.value)
    assert text.startswith(f"engine 0 (sglang, policy version {served.version}) generate: POST /generate: ")
    assert f"A part of the server ended: process {scheduler}" in text
    assert f"last 20 lines of {served.log}:\n" in text
    assert 10 <= len(text.splitlines()) <= 22
    assert took_s < FAULT_TIMEOUT_S
    assert alive(served.info.pids) == []
    with pytest.raises(EngineError, match="policy_version: GET /model_info: ConnectionRefused"):
        _ = served.engine.policy_version
    served.engine.stop()
    served.engine.stop()
    assert not scratch.path.exists() and not any(segment.exists() for segment in scratch.segments)
    assert psutil.Process().children(recursive=True) == []


# -------------------------------------------------------------------- another architecture, untied, lower precision


def test_untied_qwen3_in_bfloat16_is_synced_from_either_type(untied: Served, tmp_path: Path) -> None:
    new = write_tiny_model(tmp_path / "new", seed=3, model_type="qwen3", tied=False)
    for dtype in (torch.float32, torch.bfloat16):
        report = untied.engine.load_weights(untied.buckets(new, dtype=dtype))
        untied.version += 1
        untied.model = new
        assert report.num_tensors == len(list(new.named_parameters()))
        assert untied.engine.policy_version == untied.version
    requests = make_requests(PROMPTS, num_samples=8)
    generations = untied.engine.generate(requests)
    gap = largest_gap(requests, generations, new, temperature=1.0)
    # bfloat16 against float32: rounding is visible, a wrong weight would be far larger.
    assert 1e-4 < gap < 0.3
    without_head = {name: parameter for name, parameter in new.named_parameters() if name != "lm_head.weight"}
    buckets = pack_buckets(without_head.items(), policy_version=9, bucket_bytes=1 << 20, dtype=torch.bfloat16)
    with pytest.raises(WeightSyncError, match=r"missing tensors: lm_head\.weight$"):
        untied.engine.load_weights(buckets)


def judged(served: Served, *, temperature: float, lowest: DType) -> torch.Tensor:
    """The probe before training, with transformers in the place of the trainer's ranks."""
    requests = make_requests(PROMPTS, num_samples=2, temperature=temperature, max_new_tokens=16)
    generations = served.engine.generate(requests)

    def scores(other: float) -> list[torch.Tensor]:
        return [
            reference_logprobs(served.model, request.prompt_token_ids, generation.token_ids, temperature=other)
            for request, generation in zip(requests, generations, strict=True)
        ]

    return judge(
        [torch.tensor(generation.logprobs) for generation in generations],
        scores,
        temperature=temperature,
        tolerance=rounding_tolerance(lowest, temperature),
        lowest=lowest,
    )


def test_the_probe_refuses_a_server_that_reports_log_probs_before_the_temperature(untied: Served) -> None:
    assert judged(untied, temperature=1.0, lowest=DType.bfloat16).abs().max() < 0.3
    with pytest.raises(ProbeError, match=r"log-probs at temperature 1, not 0\.7: .*SGLANG_RETURN_ORIGINAL_LOGPROB"):
        judged(untied, temperature=0.7, lowest=DType.bfloat16)
    with pytest.raises(ProbeError, match="rounding to 16 bits where both should compute in float32"):
        judged(untied, temperature=1.0, lowest=DType.float32)


def test_stop_leaves_no_process_no_segment_no_file(untied: Served) -> None:
    scratch = scratch_of(untied)
    begin = time.monotonic()
    untied.engine.stop()
    assert time.monotonic() - begin < FAULT_TIMEOUT_S
    assert alive(untied.info.pids) == []
    assert not scratch.path.exists() and not any(segment.exists() for segment in scratch.segments)
    assert psutil.Process().children(recursive=True) == []
    untied.engine.stop()
    with pytest.raises(EngineError, match=r"call start\(\) first"):
        untied.engine.generate(make_requests(PROMPTS))


# ------------------------------------------------------------------------------------------------- tensor parallel


def test_every_rank_of_a_tensor_parallel_engine_takes_its_share_and_proves_it(tmp_path: Path) -> None:
    served = start(tmp_path, model_type="qwen2", tied=True, dtype=DType.float32, tp_size=2)
    try:
        new = write_tiny_model(tmp_path / "new", seed=1)
        named = list(new.named_parameters())
        publisher, reader = publisher_of(named), WeightReader()
        with reader.opened(publisher.publish(named, policy_version=1)) as buckets:
            report = served.engine.load_weights(buckets)
        assert report.num_tensors == len(named) and served.engine.policy_version == 1
        requests = make_requests(PROMPTS)
        assert largest_gap(requests, served.engine.generate(requests), new, temperature=1.0) < 1e-4
        served.version = 1
        # A byte in the second half of the columns belongs to rank 1 alone.
        name = "model.layers.0.mlp.down_proj.weight"
        changed = dict(named)[name].detach().clone()
        changed[0, -1] += 1
        served.client.call("/begin_weight_update", body={}, timeout_s=30)
        other = publisher_of([(name, changed)])
        with WeightReader().opened(other.publish([(name, changed)], policy_version=9)) as (bucket,):
            body = {"serialized_named_tensors": [describe_bucket(bucket)] * 2, "load_format": LOADER}
            served.client.call("/update_weights_from_tensor", body=body, timeout_s=30)
        served.client.call("/end_weight_update", body={}, timeout_s=30)
        with pytest.raises(WeightSyncError, match=rf"disagree for {name} of rank 1, made of {name}: [^;]*$"):
            served.engine.verify_weights()
        served.load(new)
        served.engine.verify_weights()
    finally:
        served.engine.stop()
    assert alive(served.info.pids) == []
