"""Which engine gets which request, and the keys of the care for engines."""

from dataclasses import replace

import pytest

from algorithms.config import ConfigError
from rollout.group.balance import load_of, split_by_load
from rollout.torch.config import TorchEngineConfig
from rollout.types import FinishReason, GenerateRequest, Generation, SamplingParams


def request_of(prompt_id, *, tokens=10, begun=0):
    request = GenerateRequest(
        prompt_id=prompt_id,
        sample_index=0,
        prompt_token_ids=[3, 4],
        sampling=SamplingParams(temperature=1.0, max_new_tokens=tokens, seed=prompt_id),
    )
    part = Generation(
        token_ids=[5] * begun, logprobs=[-1.0] * begun, token_versions=[0] * begun, finish_reason=FinishReason.abort
    )
    return replace(request, resumed=part) if begun else request


def test_what_is_still_to_come_counts():
    assert [load_of(request_of(0)), load_of(request_of(0, begun=4))] == [10, 6]


def test_groups_stay_together_and_engines_have_the_same_to_do():
    requests = [request_of(index // 2) for index in range(8)]
    assert split_by_load(requests, [0, 0]) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    # The second engine has 100 tokens to sample already.
    assert split_by_load(requests, [0, 100]) == [[0, 1, 2, 3, 4, 5, 6, 7], []]
    # Two long responses, one of which is nearly done.
    mixed = [request_of(0, tokens=100), request_of(1, tokens=100, begun=90), request_of(2), request_of(3)]
    assert split_by_load(mixed, [0, 0]) == [[0], [1, 2, 3]]


def test_the_keys_of_engine_care_have_bounds():
    with pytest.raises(ConfigError, match=r"(?s)answer_timeout_s must be > 0 seconds.*max_restarts must be >= 0"):
        TorchEngineConfig(max_restarts=-1, answer_timeout_s=0.0)
    assert TorchEngineConfig(max_restarts=0).max_restarts == 0
