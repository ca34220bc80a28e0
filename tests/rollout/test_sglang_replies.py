"""Bodies and replies of SGLang without a server, and which addresses `rollout.servers` may name."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from algorithms.config.rules import ConfigError
from rollout.collect.filters import invalid_reason
from rollout.sglang.config import SGLangConfig
from rollout.sglang.replies import ReplyError, body_of, generation_of
from rollout.supports import supports_of
from rollout.types import FinishReason, GenerateRequest, Generation, SamplingParams

REQUEST = GenerateRequest(
    prompt_id=3,
    sample_index=1,
    prompt_token_ids=[5, 6],
    sampling=SamplingParams(temperature=0.5, max_new_tokens=4, seed=9, stop_token_ids=(1,)),
)


def reply_of(token_ids: list[int], **meta: Any) -> dict[str, Any]:
    meta = {
        "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
        "weight_version": "2",
        "output_token_logprobs": [[-0.5, token, None] for token in token_ids],
        **meta,
    }
    return {"output_ids": token_ids, "meta_info": meta}


def read(reply: dict[str, Any], *, sent_version: int = 2, newest_version: int = 3) -> Generation:
    return generation_of(REQUEST, reply, vocab_size=67, sent_version=sent_version, newest_version=newest_version)


def test_every_sample_has_a_seed_of_its_own_in_the_body() -> None:
    body = body_of(REQUEST)
    assert body["input_ids"] == [5, 6] and body["return_logprob"] is True
    assert body["sampling_params"]["sampling_seed"] == 9 and body["sampling_params"]["temperature"] == 0.5
    assert body["sampling_params"]["stop_token_ids"] == [1]


def test_of_truncated_sampling_the_supports_and_the_log_probs_among_them_are_read() -> None:
    request = replace(REQUEST, sampling=replace(REQUEST.sampling, top_k=3, top_p=0.9, with_supports=True))
    assert body_of(request)["return_sampling_mask"] is True and "return_sampling_mask" not in body_of(REQUEST)
    reply = reply_of([4, 5], output_token_sampling_mask=[[9, 4], [5]], output_token_sampling_logprobs=[-0.25, None])
    generation = generation_of(request, reply, vocab_size=67, sent_version=2, newest_version=3)
    assert generation.supports == supports_of([[9, 4], [5]])
    assert generation.logprobs is not None and generation.logprobs[0] == -0.25 and math.isnan(generation.logprobs[1])
    # SGLang leaves them out for a request that it aborts in its queue: such tokens cannot be resumed.
    aborted = generation_of(request, reply_of([4]), vocab_size=67, sent_version=2, newest_version=3)
    assert (aborted.token_ids, aborted.finish_reason) == ([], FinishReason.abort)
    ended = reply_of([4], finish_reason={"type": "stop"})
    without = generation_of(request, ended, vocab_size=67, sent_version=2, newest_version=3)
    reason = invalid_reason(request, without, policy_version=2)
    assert reason is not None and reason.name == "bad_support"


def test_versions_come_from_the_spans_token_by_token() -> None:
    spans = [{"version": "1", "start": 0, "end": 2}, {"version": "3", "start": 2, "end": 3}]
    generation = read(reply_of([4, 5, 6], weight_versions=spans))
    assert generation.token_versions == [1, 1, 3] and generation.policy_version == 1


def test_without_spans_a_change_in_between_cannot_be_placed() -> None:
    """Releases before the spans: one version per response, which must then be the one it was sent under."""
    assert read(reply_of([4, 5])).token_versions == [2, 2]
    assert read(reply_of([4, 5], weight_version="1")).token_versions == [1, 1]
    with pytest.raises(ReplyError, match=r"changed from version 2 to 3 .* use rollout\.pause_mode=abort"):
        read(reply_of([4, 5], weight_version="3"))


def test_an_abort_before_the_first_token_is_empty_whatever_the_version_is_called() -> None:
    spans = [{"version": "unverified-3", "start": 0, "end": 0}]
    reply = reply_of([], weight_versions=spans, weight_version="unverified-3")
    del reply["meta_info"]["output_token_logprobs"]
    assert read(reply) == Generation(token_ids=[], logprobs=[], token_versions=[], finish_reason=FinishReason.abort)


def test_what_is_missing_is_told_apart_from_what_is_no_number() -> None:
    assert read(reply_of([4, 5], output_token_logprobs=None)).logprobs is None
    logprobs = read(reply_of([4, 5], output_token_logprobs=[[None, 4, None], [-1.0, 5, None]])).logprobs
    assert logprobs is not None and math.isnan(logprobs[0]) and logprobs[1] == -1.0
    with pytest.raises(ReplyError, match="unknown finish reason"):
        read(reply_of([4], finish_reason={"type": "error"}))


def problems_of(**options: Any) -> list[str]:
    """Key and rule of each problem."""
    try:
        SGLangConfig(**options)
    except ConfigError as error:
        return [f"{problem.key}: {problem.rule}" for problem in error.problems]
    return []


@pytest.mark.parametrize("server", ["http://127.0.0.1:30000", "http://localhost:30000", "https://[::1]:30000/"])
def test_servers_of_this_machine_need_no_permission(server: str) -> None:
    assert problems_of(servers=[server]) == []


@pytest.mark.parametrize("server", ["http://10.0.0.7:30000", "https://engine.example:443"])
def test_servers_elsewhere_need_permission(server: str) -> None:
    (problem,) = problems_of(servers=[server])
    assert problem.startswith("servers: must be on this machine")
    assert problems_of(servers=[server], allow_remote=True) == []


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"servers": ["127.0.0.1:30000"]}, "servers: must be scheme, host and port, nothing else"),
        ({"servers": ["http://127.0.0.1"]}, "servers: must be scheme, host and port, nothing else"),
        ({"servers": ["http://127.0.0.1:99999"]}, "servers: must be scheme, host and port: Port out of range"),
        ({"servers": ["http://127.0.0.1:30000/v1"]}, "servers: must be scheme, host and port, nothing else"),
        ({"servers": ["http://me:key@127.0.0.1:30000"]}, "servers: must hold no key"),
        ({"servers": ["http://127.0.0.1:1", "http://127.0.0.1:2"]}, "num_engines: must be the number of rollout.se"),
        (
            {"servers": ["http://127.0.0.1:1", "http://127.0.0.1:1"], "num_engines": 2},
            "servers: must name every server once",
        ),
        (
            {"servers": ["http://127.0.0.1:1"], "engine_args": {"page_size": 1}},
            "servers: must be empty with engine_arg",
        ),
        ({"servers": ["http://127.0.0.1:1"], "gpus_per_engine": 1}, "servers: must be empty with engine_args or gpus"),
        ({"probe_tolerance": 0}, "probe_tolerance: must be > 0 nats or null"),
    ],
)
def test_what_servers_must_not_be(options: dict[str, Any], text: str) -> None:
    assert any(problem.startswith(text) for problem in problems_of(**options)), problems_of(**options)
