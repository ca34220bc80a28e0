"""Requests to a real SGLang server that are under way: polled, aborted, resumed, and sampled on by new weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sglang_cases import (
    PROMPTS,
    Served,
    largest_gap,
    make_requests,
    poll_all,
    reference_logprobs,
    stopped_until_sync,
    tokens,
    under_way,
)
from tiny_model import write_tiny_model

from rollout.engine import EngineError
from rollout.sglang.options import PauseMode
from rollout.types import FinishReason

pytestmark = pytest.mark.sglang


def test_samples_come_back_as_they_end_and_are_those_of_a_blocking_call(served: Served) -> None:
    requests = make_requests(PROMPTS, num_samples=6, max_new_tokens=200)
    assert served.engine.poll(0.0) == []
    served.engine.submit(range(100, 100 + len(requests)), requests)
    got = poll_all(served.engine, len(requests))
    assert tokens([got[100 + i] for i in range(len(requests))]) == tokens(served.engine.generate(requests))
    for generation in got.values():
        assert generation.token_versions == [served.version] * len(generation.token_ids)


def test_an_abort_returns_the_tokens_so_far_and_a_resumed_response_is_one_response(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = under_way(served.engine, monkeypatch)
    served.engine.submit([900], [requests[0]])
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


def test_weights_in_flight_are_read_anew_and_every_token_says_which_sampled_it(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = write_tiny_model(tmp_path / "new", seed=8)  # before the requests, which would end meanwhile
    requests = under_way(served.engine, monkeypatch)
    old, old_version = served.model, served.version
    with stopped_until_sync(served.engine, monkeypatch):
        served.load(new)
    short = make_requests(PROMPTS, max_new_tokens=8)
    served.engine.submit(range(500, 500 + len(short)), short)  # beside them, all are sampled on
    got = poll_all(served.engine, len(short))
    served.engine.abort(None)
    poll_all(served.engine, len(requests) + len(short), into=got)
    mixed = 0
    for ticket in range(len(requests)):
        generation = got[ticket]
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
    assert largest_gap(short, [got[500 + i] for i in range(len(short))], served.model, temperature=1.0) < 1e-4


def test_in_place_keeps_what_was_computed_but_no_later_request_sees_it(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.engine._config, "pause_mode", PauseMode.in_place)
    new = write_tiny_model(tmp_path / "new", seed=9)  # before the requests, which would end meanwhile
    requests = under_way(served.engine, monkeypatch)
    old, old_version = served.model, served.version
    with stopped_until_sync(served.engine, monkeypatch):
        served.load(new)
    fresh = make_requests(PROMPTS, num_samples=2, seed=77)
    served.engine.submit(range(500, 500 + len(fresh)), fresh)
    got = poll_all(served.engine, len(fresh))
    served.engine.abort(None)
    poll_all(served.engine, len(requests) + len(fresh), into=got)
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


def test_pause_mode_abort_returns_what_is_under_way(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.engine._config, "pause_mode", PauseMode.abort)
    new = write_tiny_model(tmp_path / "new", seed=10)  # before the requests, which would end meanwhile
    requests = under_way(served.engine, monkeypatch)
    old_version = served.version
    served.load(new)
    got = poll_all(served.engine, len(requests))
    aborted = [g for g in got.values() if g.finish_reason is FinishReason.abort]
    assert len(aborted) >= 3
    assert {version for g in got.values() for version in g.token_versions} == {old_version}


def test_sleep_is_refused_while_requests_are_unfinished(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    under_way(served.engine, monkeypatch)
    with pytest.raises(EngineError, match="sleep: requests are unfinished; poll or abort them first"):
        served.engine.sleep()
    served.engine.abort(None)
    poll_all(served.engine, 32)
