"""What a log-prob means, proven against exact enumeration: every response of a 5-token vocabulary and its probability.

A real tiny model, on every kind of engine (`engine_cases.py`): temperature, shift, seeds, and truncated sampling.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from engine_cases import start_engine
from tiny_model import EOS_TOKEN_ID, write_tiny_model

from algorithms.truncation import kept_tokens
from rollout.collect.filters import invalid_reason
from rollout.collect.requests import SeedSource
from rollout.engine import Engine
from rollout.types import GenerateRequest, Generation, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCAB_SIZE = 5
MAX_TOKENS = 3
PROMPT = [3, 4, 2]
TEMPERATURE = 0.7
NUM_SAMPLES = 800

Law = dict[tuple[int, ...], float]
"""Response -> its log-probability."""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("five")


@pytest.fixture(scope="module")
def model(model_path: Path) -> PreTrainedModel:
    return write_tiny_model(model_path, seed=3, vocab_size=VOCAB_SIZE, tied=False, head_dim=32)


@pytest.fixture(
    scope="module",
    params=[
        "torch",
        "toy",
        pytest.param("vllm", marks=pytest.mark.vllm),
        pytest.param("sglang", marks=[pytest.mark.sglang, pytest.mark.slow]),
    ],
)
def engine(
    request: pytest.FixtureRequest, model: PreTrainedModel, model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    made = start_engine(request.param, model_path, log_dir=tmp_path_factory.mktemp("logs"))
    yield made
    made.stop()


@pytest.fixture(scope="module")
def samples(engine: Engine) -> list[Generation]:
    """One group of NUM_SAMPLES, seeded as the collection seeds it."""
    return engine.generate(group(NUM_SAMPLES))


def group(size: int, *, temperature: float = TEMPERATURE, top_p: float = 1.0) -> list[GenerateRequest]:
    seeds = SeedSource(17, step=1)
    return [
        GenerateRequest(
            prompt_id=0,
            sample_index=index,
            prompt_token_ids=PROMPT,
            sampling=SamplingParams(
                temperature=temperature,
                max_new_tokens=MAX_TOKENS,
                seed=seeds.draw(0, index),
                top_p=top_p,
                stop_token_ids=(EOS_TOKEN_ID,),
            ),
        )
        for index in range(size)
    ]


def all_token_logprobs(
    model: PreTrainedModel, responses: list[tuple[int, ...]], temperature: float
) -> list[list[float]]:
    """Of each token given those before it, in float64 from the model's float32 logits."""
    # A token does not depend on those after it: whatever fills the rows up.
    rows = [[*PROMPT, *response, *([0] * (MAX_TOKENS - len(response)))] for response in responses]
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor(rows), use_cache=False).logits.double()
    law = torch.log_softmax(logits / temperature, dim=-1)
    return [
        [float(law[row, len(PROMPT) - 1 + t, token]) for t, token in enumerate(response)]
        for row, response in enumerate(responses)
    ]


def token_logprobs(model: PreTrainedModel, response: tuple[int, ...], temperature: float) -> list[float]:
    """The same of one response."""
    return all_token_logprobs(model, [response], temperature)[0]


def enumerate_law(model: PreTrainedModel, temperature: float) -> Law:
    """Every response that can end: with the end-of-sequence token, or at MAX_TOKENS."""
    others = [token for token in range(VOCAB_SIZE) if token != EOS_TOKEN_ID]
    ended = [
        (*begin, EOS_TOKEN_ID) for length in range(MAX_TOKENS) for begin in itertools.product(others, repeat=length)
    ]
    every = ended + list(itertools.product(others, repeat=MAX_TOKENS))
    return dict(zip(every, map(sum, all_token_logprobs(model, every, temperature)), strict=True))


def chi_square_excess(counts: Counter[tuple[int, ...]], law: Law) -> float:
    """How many standard deviations the chi-square statistic is above its mean; cells with less than 5 are joined."""
    total = sum(counts.values())
    cells: list[tuple[float, float]] = []
    rest_expected = rest_observed = 0.0
    for response, logprob in law.items():
        expected, observed = total * math.exp(logprob), counts[response]
        if expected < 5:
            rest_expected, rest_observed = rest_expected + expected, rest_observed + observed
        else:
            cells.append((expected, observed))
    if rest_expected > 0:
        cells.append((rest_expected, rest_observed))
    statistic = sum((observed - expected) ** 2 / expected for expected, observed in cells)
    freedom = len(cells) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


def responses(generations: list[Generation]) -> Counter[tuple[int, ...]]:
    return Counter(tuple(generation.token_ids) for generation in generations)


def test_the_enumeration_is_a_law(model: PreTrainedModel) -> None:
    law = enumerate_law(model, TEMPERATURE)
    assert len(law) == 1 + 4 + 16 + 64
    assert sum(map(math.exp, law.values())) == pytest.approx(1.0, abs=1e-6)


def test_reported_log_probs_are_those_of_the_enumeration(model: PreTrainedModel, samples: list[Generation]) -> None:
    gap = shifted = hot = 0.0
    for response in responses(samples):
        reported = next(g.logprobs for g in samples if tuple(g.token_ids) == response)
        assert reported is not None and len(reported) == len(response)
        exact = token_logprobs(model, response, TEMPERATURE)
        gap = max([gap, *(abs(a - b) for a, b in zip(reported, exact, strict=True))])
        shifted = max([shifted, *(abs(a - b) for a, b in zip(reported[:-1], exact[1:], strict=True))])
        at_one = token_logprobs(model, response, 1.0)
        hot = max([hot, *(abs(a - b) for a, b in zip(reported, at_one, strict=True))])
    assert gap < 1e-4
    assert shifted > 0.1 and hot > 0.1, "the comparison would not see a shift or another temperature"


def test_responses_come_as_often_as_the_enumeration_says(model: PreTrainedModel, samples: list[Generation]) -> None:
    counts = responses(samples)
    assert set(counts) <= set(enumerate_law(model, TEMPERATURE))
    assert chi_square_excess(counts, enumerate_law(model, TEMPERATURE)) < 4
    assert chi_square_excess(counts, enumerate_law(model, 1.0)) > 8, "another temperature would not be seen"


def test_no_two_samples_of_a_group_share_a_seed_and_neighbours_are_independent(
    model: PreTrainedModel, samples: list[Generation]
) -> None:
    seeds = [request.sampling.seed for request in group(NUM_SAMPLES)]
    assert len(set(seeds)) == NUM_SAMPLES
    first = {response[:1]: 0.0 for response in enumerate_law(model, TEMPERATURE)}
    for token in first:
        first[token] = token_logprobs(model, token, TEMPERATURE)[0]
    pairs = Counter(
        (one.token_ids[0], other.token_ids[0]) for one, other in zip(samples[::2], samples[1::2], strict=True)
    )
    law = {(*one, *other): first[one] + first[other] for one in first for other in first}
    assert chi_square_excess(pairs, law) < 4
    # One seed for all would make every member of the group the same.
    assert pairs.total() - sum(count for (one, other), count in pairs.items() if one == other) > NUM_SAMPLES / 10


def test_an_engine_gives_one_seed_one_response(engine: Engine, samples: list[Generation]) -> None:
    again = engine.generate(group(NUM_SAMPLES)[:20])
    assert [g.token_ids for g in again] == [g.token_ids for g in samples[:20]]
    shared = group(20)
    for request in shared:
        request.sampling.seed = 5
    assert len(responses(engine.generate(shared))) == 1, "the seed decides: a shared one would be a group of copies"


@pytest.mark.parametrize(
    "limits", [{"top_k": 3, "top_p": 0.7}, {"top_k": 2}, {"top_k": 4, "min_p": 0.3}], ids=["top_p", "top_k", "min_p"]
)
def test_truncated_sampling_draws_and_reports_the_law_among_the_kept_tokens(
    engine: Engine, model: PreTrainedModel, limits: dict[str, float]
) -> None:
    requests = group(NUM_SAMPLES // 4)
    for request in requests:
        request.sampling = replace(request.sampling, **limits, with_supports=True)  # type: ignore[arg-type]
    truncated = engine.generate(requests)
    counts = responses(truncated)
    law = truncated_law(model, limits)
    assert set(counts) <= set(law)
    assert chi_square_excess(counts, law) < 4
    assert chi_square_excess(counts, enumerate_law(model, TEMPERATURE)) > 20, "the untruncated law would not be seen"
    cut = 0
    for request, generation in zip(requests, truncated, strict=True):
        assert invalid_reason(request, generation, policy_version=0) is None
        assert generation.logprobs is not None and generation.supports is not None
        assert sum(generation.logprobs) == pytest.approx(law[tuple(generation.token_ids)], abs=1e-4)
        cut += int((generation.supports.sizes < VOCAB_SIZE).sum())
    assert cut > len(truncated), "hardly anything was cut"


def test_without_supports_truncated_sampling_is_that_of_an_evaluation(engine: Engine, model: PreTrainedModel) -> None:
    """SGLang returns supports only up to a top_k; an evaluation asks for none, and may set top_p alone."""
    requests = group(NUM_SAMPLES // 4, top_p=0.8)
    truncated = engine.generate(requests)
    assert chi_square_excess(responses(truncated), truncated_law(model, {"top_p": 0.8})) < 4
    assert all(generation.supports is None for generation in truncated)


def truncated_law(model: PreTrainedModel, limits: dict[str, float]) -> Law:
    """Every response that truncated sampling can draw -> its log-prob, by renormalising each step."""
    whole: dict[str, float] = {"top_k": VOCAB_SIZE, "top_p": 1.0, "min_p": 0.0}
    params = {name: torch.tensor([value]) for name, value in (whole | limits).items()}
    found: Law = {}
    begun: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    while begun:
        response, logprob = begun.pop()
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([[*PROMPT, *response]]), use_cache=False).logits[0, -1]
        probs = torch.softmax(logits.float() / TEMPERATURE, -1)
        kept = kept_tokens(probs[None], **params)[0].nonzero().flatten().tolist()
        mass = float(probs[kept].sum())
        for token in kept:
            longer = ((*response, token), logprob + math.log(float(probs[token]) / mass))
            if token == EOS_TOKEN_ID or len(longer[0]) == MAX_TOKENS:
                found[longer[0]] = longer[1]
            else:
                begun.append(longer)
    return found
