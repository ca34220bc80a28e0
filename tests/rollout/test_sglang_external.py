"""Engines on a server that was there before them, and on one that lies: what is refused, dropped or an error."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lying_server import Lie, lying_front
from sglang_cases import FAULT_TIMEOUT_S, PROMPTS, Served, alive, external, largest_gap, make_requests
from tiny_model import write_tiny_model

from rollout.collect.filters import invalid_reason
from rollout.config import DType
from rollout.engine import EngineError, WeightSyncError

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


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
        theirs.verify()
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


@pytest.mark.scenario(19)
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


@pytest.mark.scenario(19)
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


@pytest.mark.scenario(18)
@pytest.mark.parametrize("route", ["/update_weights_from_tensor", "/end_weight_update"])
def test_a_sync_whose_connection_breaks_half_way_leaves_no_engine_that_samples(
    served: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, route: str
) -> None:
    """The server may hold the new weights or a part of them: nothing is sampled before a sync is verified again."""
    new = write_tiny_model(tmp_path / "new", seed=30)
    broken: list[str] = []

    def break_once(asked: str, reply: Any) -> Any:
        if asked == route and len(broken) == 0:
            broken.append(asked)
            raise ConnectionError
        return reply

    requests = make_requests(PROMPTS)
    with (
        lying_front(served.info.address, break_once) as address,
        external(served, monkeypatch, address=address) as theirs,
    ):
        with pytest.raises(EngineError, match=f"load_weights: the new weights were not loaded: POST {route}: "):
            theirs.load(new)
        assert broken == [route]
        with pytest.raises(EngineError, match="the weights are unusable"):
            theirs.engine.generate(requests)
        theirs.load(new)
        served.version, served.model = theirs.version, new
        assert largest_gap(requests, theirs.engine.generate(requests), new, temperature=1.0) < 1e-4


@pytest.mark.scenario(15)
def test_a_wedged_server_is_noticed_by_the_deadline(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scheduler stands still; the HTTP process goes on to accept requests and to answer some."""
    with external(served, monkeypatch, generate_timeout_s=2.0) as theirs:
        theirs.load(served.model)
        served.version = theirs.version
        served.scheduler.suspend()
        try:
            begin = time.monotonic()
            theirs.engine.submit([1, 2], make_requests(PROMPTS[:2]))
            assert theirs.engine.poll(0.5) == []
            with pytest.raises(EngineError, match=r"POST /generate: no complete answer within 2\.0 s"):
                theirs.engine.poll(30.0)
            assert 1.9 < time.monotonic() - begin < 2.0 + FAULT_TIMEOUT_S
        finally:
            served.scheduler.resume()
    served.load(served.model)
    requests = make_requests(PROMPTS)
    assert largest_gap(requests, served.engine.generate(requests), served.model, temperature=1.0) < 1e-4
