"""Requests to a real SGLang server that are under way: polled, aborted, resumed, and sampled on by new weights."""

from __future__ import annotations

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
    under_way,
)
from tiny_model import write_tiny_model

from rollout.config import PauseMode
from rollout.types import FinishReason

pytestmark = pytest.mark.sglang


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
