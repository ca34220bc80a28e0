"""What every sample must satisfy, and the versions of a response that was sampled in parts."""

import pytest

from rollout.engine import continuation, whole_response
from rollout.types import FinishReason, GenerateRequest, Generation, Sample, SamplingParams

GOOD = {
    "prompt_id": 3,
    "sample_index": 1,
    "token_ids": [7, 8, 9],
    "response_mask": [False, True, True],
    "rollout_logprobs": [0.0, -1.0, -0.5],
    "token_versions": [0, 4, 3],
    "finish_reason": FinishReason.stop,
}


def test_the_version_of_a_sample_is_its_oldest():
    assert Sample(**GOOD).policy_version == 3
    assert Sample(**{**GOOD, "token_versions": [0, 5, 5]}).policy_version == 5


def test_samples_are_equal_number_by_number():
    assert Sample(**GOOD) == Sample(**GOOD) != Sample(**{**GOOD, "rollout_logprobs": [0.0, -1.0, -0.25]})
    assert Sample(**GOOD) != Sample(**GOOD, text="else")
    assert Sample(**GOOD) != GOOD


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_versions": [0, 4]}, "token_versions differ in length: 3, 3, 3, 2"),
        ({"rollout_logprobs": [0.0]}, "token_versions differ in length: 3, 3, 1, 3"),
        ({"response_mask": [False] * 3}, "no response token"),
        ({"response_mask": [True] * 3}, "the first token cannot be a response"),
        ({"rollout_logprobs": [0.0, float("nan"), -0.5]}, "log-prob nan of token 1 is not a log-probability"),
    ],
)
def test_what_is_no_sample(change, message):
    with pytest.raises(ValueError, match=f"sample 3/1: .*{message}"):
        Sample(**{**GOOD, **change})


def test_a_resumed_response_is_one_response():
    begun = Generation(token_ids=[5, 6], logprobs=[-1.0, -2.0], token_versions=[1, 2], finish_reason=FinishReason.abort)
    request = GenerateRequest(
        prompt_id=0,
        sample_index=0,
        prompt_token_ids=[3, 4],
        sampling=SamplingParams(temperature=1.0, max_new_tokens=5, seed=8),
        resumed=begun,
    )
    asked = continuation(request)
    assert (asked.prompt_token_ids, asked.sampling.max_new_tokens, asked.resumed) == ([3, 4, 5, 6], 3, None)
    assert asked.sampling.seed == 8
    rest = Generation(token_ids=[7], logprobs=[-0.5], token_versions=[4], finish_reason=FinishReason.stop)
    whole = whole_response(request, rest)
    assert whole.token_ids == [5, 6, 7]
    assert whole.logprobs == [-1.0, -2.0, -0.5]
    assert (whole.token_versions, whole.policy_version) == ([1, 2, 4], 1)
    assert whole.finish_reason is FinishReason.stop
    rest.logprobs = None
    assert whole_response(request, rest).logprobs is None
