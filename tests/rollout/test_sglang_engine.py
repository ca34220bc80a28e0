"""A real SGLang server on a tiny random model: how it is started and guarded, and what it samples."""

from __future__ import annotations

import stat
import time
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import psutil
import pytest
import torch
from engine_cases import start_engine
from sglang_cases import LONG, PROMPTS, Served, alive, judged, largest_gap, make_requests, tokens
from tiny_model import EOS_TOKEN_ID, VOCAB_SIZE, write_tiny_model

from rollout.config import DType
from rollout.engine import EngineError
from rollout.sglang.client import ClientError, SGLangClient
from rollout.sglang.cpu.platform import ATTENTION_BACKEND
from rollout.sglang.request_stream import KEEP_ALIVE_S
from rollout.types import FinishReason

pytestmark = pytest.mark.sglang


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
    assert "'api_key': '<redacted>'" in served.log.read_text(encoding="utf-8")
    assert stat.S_IMODE(served.log.stat().st_mode) == 0o600


def test_wrong_keys_get_401(served: Served) -> None:
    server = served.engine._server
    assert server is not None
    stranger = SGLangClient(address=server.address, api_key="guess", admin_api_key="guess")
    user = SGLangClient(address=server.address, api_key=server._api_key, admin_api_key=server._api_key)
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


def test_the_server_keeps_an_idle_connection_longer_than_the_client(served: Served) -> None:
    """SGLang by itself closes one after 5 s."""
    where = urlsplit(served.info.address)
    connection = HTTPConnection(where.hostname or "", where.port, timeout=60)
    connection.auto_open = False
    connection.connect()
    for pause_s in (0.0, 3.5 * KEEP_ALIVE_S):
        time.sleep(pause_s)
        connection.request("GET", "/model_info", headers={"Authorization": f"Bearer {served.client.api_key}"})
        response = connection.getresponse()
        assert response.status == 200 and response.read()
    connection.close()


def test_a_server_on_a_cpu_attends_in_batches(served: Served) -> None:
    assert served.client.call("/server_info", timeout_s=30)["attention_backend"] == ATTENTION_BACKEND


def test_a_prompt_is_computed_once_for_all_its_responses(served: Served) -> None:
    prompts = [[3 + (7 * number + i) % 40 for i in range(60)] for number in range(3)]
    requests = make_requests(prompts, num_samples=4, temperature=1.0, max_new_tokens=4)
    # The last token of a prompt is computed for every response: its state predicts the first token.
    assert [answer.shared_prompt_tokens for answer in served.engine.generate(requests)] == [59] * 12
    alone = make_requests([[5, *prompts[0]]], temperature=1.0, max_new_tokens=4)
    assert [answer.shared_prompt_tokens for answer in served.engine.generate(alone)] == [0]


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


def test_the_comparison_with_transformers_sees_a_wrong_weight(served: Served, tmp_path: Path) -> None:
    requests = make_requests(PROMPTS, num_samples=8, temperature=0.7)
    generations = served.engine.generate(requests)
    other = write_tiny_model(tmp_path / "other", seed=1)
    assert largest_gap(requests, generations, other, temperature=0.7) > 0.1
    nearly = write_tiny_model(tmp_path / "nearly", seed=0)
    with torch.no_grad():
        nearly.get_parameter("model.layers.1.self_attn.k_proj.bias")[0] += 0.05
    assert largest_gap(requests, generations, nearly, temperature=0.7) > 2e-4


def test_the_models_own_end_of_sequence_ends_a_response_that_names_no_stop_token(served: Served) -> None:
    requests = make_requests(PROMPTS, num_samples=24, max_new_tokens=24, seed=50)
    generations = served.engine.generate(requests)
    assert sum(generation.finish_reason is FinishReason.stop for generation in generations) >= 5
    silent = [replace(request, sampling=replace(request.sampling, stop_token_ids=())) for request in requests]
    assert tokens(served.engine.generate(silent)) == tokens(generations)


def at_most_one_rounded(responses: list[list[int]], others: list[list[int]]) -> bool:
    """Whether at most one response differs: the last bits of a logit depend on the batch, and may decide a draw."""
    return sum(one != other for one, other in zip(responses, others, strict=True)) <= 1


def test_a_response_depends_on_its_own_seed_and_on_nothing_else(served: Served) -> None:
    requests = make_requests(PROMPTS, num_samples=8)
    together = tokens(served.engine.generate(requests))
    assert at_most_one_rounded(tokens(served.engine.generate(requests)), together)
    backwards = tokens(served.engine.generate(requests[::-1]))[::-1]
    assert at_most_one_rounded(backwards, together)
    alone = [tokens(served.engine.generate([request]))[0] for request in requests[::5]]
    assert at_most_one_rounded(alone, together[::5])
    reseeded = tokens(served.engine.generate(make_requests(PROMPTS, num_samples=8, seed=7_000_000)))
    assert sum(one == other for one, other in zip(together, reseeded, strict=True)) <= 1
    group = together[:8]
    assert len({tuple(response) for response in group}) == 8


def test_the_embedded_engine_draws_the_same_tokens_from_the_same_seeds(served: Served, tmp_path: Path) -> None:
    """Engines that compute almost the same probabilities draw with the same noise."""
    served.model.save_pretrained(tmp_path)
    embedded = start_engine("torch", tmp_path, log_dir=tmp_path)
    requests = make_requests(PROMPTS, num_samples=8)
    try:
        assert at_most_one_rounded(tokens(embedded.generate(requests)), tokens(served.engine.generate(requests)))
    finally:
        embedded.stop()


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


def test_a_shared_prompt_is_read_once_with_truncated_sampling_too(served: Served) -> None:
    requests = make_requests([list(range(3, 43))], num_samples=4)
    narrow = [replace(r, sampling=replace(r.sampling, top_k=5, with_supports=True)) for r in requests]
    shared = [generation.shared_prompt_tokens for generation in served.engine.generate(narrow)]
    assert min(shared) >= 39, "the server must find the prompt in its cache"


def test_requests_that_cannot_be_served_are_refused_and_the_engine_goes_on(served: Served) -> None:
    (request,) = make_requests(PROMPTS[:1])
    room = LONG + 20 - 2
    long = replace(request, sampling=replace(request.sampling, max_new_tokens=room - 7))
    with pytest.raises(
        ValueError, match=f"prompt 0/0: 8 prompt tokens and max_new_tokens={room - 7} exceed .* {room} tokens"
    ):
        served.engine.generate([long])
    for broken, text in (
        (replace(request, prompt_token_ids=[]), "the prompt has no tokens"),
        (replace(request, prompt_token_ids=[3, VOCAB_SIZE]), f"token ids outside 0..{VOCAB_SIZE - 1}"),
        (replace(request, prompt_token_ids=[-1]), "token ids outside"),
        (replace(request, sampling=replace(request.sampling, temperature=-1.0)), "temperature must be >= 0"),
    ):
        with pytest.raises(ValueError, match=text):
            served.engine.generate([request, broken])
    # What the server itself refuses, with HTTP 400, costs its own sample, whatever is sampled beside it.
    others = make_requests(PROMPTS)
    expected = tokens(served.engine.generate(others))
    poison = replace(request, sampling=replace(request.sampling, top_p=2.0))
    generations = served.engine.generate([*others[:2], poison, *others[2:]])
    refused = generations.pop(2)
    assert (refused.token_ids, refused.finish_reason) == ([], FinishReason.failed)
    assert tokens(generations) == expected
    assert "top_p must be in" in served.log.read_text(encoding="utf-8")
    unreadable = replace(request, sampling=replace(request.sampling, seed=np.int64(3)))  # type: ignore[arg-type]
    with pytest.raises(EngineError, match=r"generate: \w+: Type is not JSON serializable"):
        served.engine.generate([unreadable])
    assert served.engine.generate([]) == []
    longest = replace(request, sampling=replace(request.sampling, max_new_tokens=room - 8, stop_token_ids=(), seed=3))
    (generation,) = served.engine.generate([longest])
    assert generation.finish_reason is FinishReason.stop or len(generation.token_ids) == room - 8


def test_the_probe_accepts_this_server_at_any_temperature(served: Served) -> None:
    for temperature in (1.0, 0.7):
        assert judged(served, temperature=temperature, lowest=DType.float32).abs().max() < 1e-4
