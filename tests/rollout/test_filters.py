"""Filters: every reason by hand, and which one counts when several apply."""

from dataclasses import replace

import numpy as np
import pytest

from rollout.collect.filters import DropReason, invalid_reason, is_zero_variance
from rollout.config import Routing
from rollout.routes import Routes
from rollout.supports import supports_of
from rollout.types import FinishReason, GenerateRequest, Generation, Prompt, Sample, SampleGroup, SamplingParams

REQUEST = GenerateRequest(
    prompt_id=0,
    sample_index=0,
    prompt_token_ids=[3],
    sampling=SamplingParams(temperature=1.0, max_new_tokens=3, seed=0),
)
GOOD = Generation(token_ids=[4, 5], logprobs=[-0.1, -2.0], token_versions=[7, 7], finish_reason=FinishReason.stop)


def name_of(generation):
    found = invalid_reason(REQUEST, generation, policy_version=7)
    return None if found is None else found.name


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"finish_reason": FinishReason.length}, None),
        ({"logprobs": [0.0, 5e-5]}, None),
        ({"finish_reason": FinishReason.abort}, "abort"),
        ({"finish_reason": FinishReason.failed}, "failed"),
        ({"token_versions": [6, 7]}, "wrong_version"),
        ({"token_versions": [7, 8]}, "wrong_version"),
        ({"token_versions": [7]}, "wrong_length"),
        ({"token_ids": [], "logprobs": [], "token_versions": []}, "empty"),
        ({"sampled": [False, False], "logprobs": [0.0, 0.0]}, "empty"),
        ({"sampled": [False, True], "logprobs": [0.0, -0.1]}, None),
        ({"token_ids": [1] * 4, "logprobs": [-1.0] * 4}, "too_long"),
        ({"logprobs": None}, "no_logprobs"),
        ({"logprobs": [-0.1]}, "wrong_length"),
        ({"logprobs": []}, "wrong_length"),
        ({"logprobs": [-0.1, -0.2, -0.3]}, "wrong_length"),
        ({"logprobs": [-0.1, float("nan")]}, "bad_logprob"),
        ({"logprobs": [-0.1, -float("inf")]}, "bad_logprob"),
        ({"logprobs": [0.1, -0.1]}, "bad_logprob"),
    ],
)
def test_each_reason(change, reason):
    assert name_of(replace(GOOD, **change)) == reason


def test_new_tokens_may_have_any_version_since_the_request_was_submitted():
    mixed = replace(GOOD, token_versions=[5, 7])
    found = {oldest: invalid_reason(REQUEST, mixed, policy_version=7, oldest_version=oldest) for oldest in (5, 6)}
    assert found[5] is None
    assert found[6] is not None and found[6].name == "wrong_version"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"supports": supports_of([[4, 9], [5]])}, None),
        ({"supports": None}, "bad_support"),
        ({"supports": supports_of([[4, 9]])}, "bad_support"),
        ({"supports": supports_of([[4, 9], [6]])}, "bad_support"),
        ({"supports": supports_of([[4, 9], []])}, "bad_support"),
        ({"supports": supports_of([[4, 9], []]), "sampled": [True, False]}, None),
        ({"supports": supports_of([[4, 9], [5]]), "sampled": [True, False]}, "bad_support"),
    ],
)
def test_a_truncated_response_has_every_token_in_its_support(change, reason):
    request = replace(REQUEST, sampling=replace(REQUEST.sampling, top_p=0.5, with_supports=True))
    found = invalid_reason(request, replace(GOOD, **change), policy_version=7)
    assert (None if found is None else found.name) == reason


def routes_of(count):
    return Routes((np.zeros((count, 2, 2), np.uint8),))


@pytest.mark.parametrize(
    ("routes", "change", "reason"),
    [
        (routes_of(2), {}, None),  # all but the last token
        (routes_of(1), {}, "bad_routes"),
        (None, {}, "bad_routes"),
        (routes_of(1), {"sampled": [True, False]}, None),  # nobody read what was shown last
        (routes_of(0), {"sampled": [True, False]}, "bad_routes"),
    ],
)
def test_every_token_that_was_sampled_from_has_a_route(routes, change, reason):
    request = replace(REQUEST, sampling=replace(REQUEST.sampling, routes=Routing.replay))
    found = invalid_reason(request, replace(GOOD, routes=routes, **change), policy_version=7)
    assert (None if found is None else found.name) == reason
    known = replace(request, first_route=1)
    if routes is not None and reason is None:
        assert (
            invalid_reason(known, replace(GOOD, routes=routes_of(len(routes) - 1), **change), policy_version=7) is None
        )


def test_a_resumed_response_keeps_its_beginning():
    begun = Generation(token_ids=[4], logprobs=[-0.1], token_versions=[3], finish_reason=FinishReason.abort)
    request = replace(REQUEST, resumed=begun)
    whole = replace(GOOD, token_versions=[3, 7])
    assert invalid_reason(request, whole, policy_version=7) is None
    # What was resumed keeps the version of its time; what is new must have that of now.
    old = invalid_reason(request, replace(whole, token_versions=[3, 3]), policy_version=7)
    assert old is not None and old.name == "wrong_version"
    lost = invalid_reason(request, replace(whole, token_ids=[9, 5]), policy_version=7)
    assert lost is not None and lost.name == "lost_resumed"


def test_a_sample_is_counted_once_under_the_first_reason():
    aborted = replace(GOOD, finish_reason=FinishReason.abort, logprobs=None, token_ids=[], token_versions=[1])
    assert name_of(aborted) == "abort"
    assert name_of(replace(aborted, finish_reason=FinishReason.stop)) == "wrong_version"


def test_the_order_of_the_reasons_of_groups_is_that_of_the_table_in_the_docs():
    assert list(DropReason.__members__) == ["too_old", "too_small", "zero_variance", "filtered", "surplus"]


def group_of(*verdicts, rewards=None):
    samples = [
        Sample(
            prompt_id=0,
            sample_index=index,
            token_ids=[3, 4],
            response_mask=[False, True],
            rollout_logprobs=[0.0, -1.0],
            token_versions=[0, 0],
            finish_reason=FinishReason.stop,
            correct=verdict,
            reward=None if rewards is None else rewards[index],
        )
        for index, verdict in enumerate(verdicts)
    ]
    return SampleGroup(prompt=Prompt(prompt_id=0, token_ids=[3], text="", answer=""), samples=samples)


def test_zero_variance_looks_at_the_unshaped_verdict():
    assert is_zero_variance(group_of(True, True, True))
    assert is_zero_variance(group_of(False, False))
    assert not is_zero_variance(group_of(False, True))
    # A length penalty spreads the rewards of a group that is constant all the same.
    assert is_zero_variance(group_of(True, True, rewards=[1.0, 0.25]))
    with pytest.raises(ValueError, match="prompt 0: a sample has not been scored"):
        is_zero_variance(group_of(True, None))
