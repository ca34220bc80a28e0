"""Truncated sampling in the trainer: the head among kept tokens, gradients by enumeration, bits, packing, configs."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from compose_cases import config_of, messages
from test_exact_bits import TEMPERATURE, load
from test_logprob_head import gradients, inputs, loss_of, options, relative
from tiny_model import write_tiny_model
from torch import Tensor
from torch.nn.functional import linear

from algorithms.truncation import kept_tokens
from rollout.collect.requests import make_sample
from rollout.supports import no_supports, supports_of
from rollout.torch.decoding import Batch
from rollout.torch.kv_cache import SLOT_ATTENTION
from rollout.torch.model import Decoder, ExactDecoder
from rollout.types import GenerateRequest, Sample, SamplingParams
from trainer.batch.packing import chosen_sequences, micro_batch
from trainer.batch.train_batch import TokenSupports, _received
from trainer.scoring.attention import PACKED_ATTENTION
from trainer.scoring.exact_attention import EXACT_ATTENTION
from trainer.scoring.forward import ScoringModel, head_floor
from trainer.scoring.logprob_head import token_logprobs


def as_supports(mask: Tensor) -> TokenSupports:
    """The supports of rows [N, V] bool."""
    return TokenSupports(mask.sum(-1).to(torch.int32), mask.nonzero()[:, 1].to(torch.int32))


def random_supports(targets: Tensor, vocab: int) -> Tensor:
    """[N, V] bool with the targets: of one token, of a few, and of all."""
    generator = torch.Generator().manual_seed(5)
    mask = (
        torch.rand(len(targets), vocab, generator=generator)
        < torch.tensor([0.02, 0.2, 0.7, 1.1])[torch.arange(len(targets)) % 4, None]
    )
    return mask.scatter(1, targets[:, None], True)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)
def test_values_and_gradients_are_those_of_a_softmax_over_the_kept_tokens(
    dtype: torch.dtype, tolerance: float, temperature: float, chunk_tokens: int
) -> None:
    hidden, targets, weight, bias = inputs(dtype=dtype)
    assert bias is not None
    mask = random_supports(targets, len(weight))
    found = token_logprobs(
        hidden,
        targets,
        weight,
        bias,
        options(temperature=temperature, chunk_tokens=chunk_tokens, entropy_grad=True),
        as_supports(mask),
    )
    exact = [each.detach().double().requires_grad_() for each in (hidden, weight, bias)]
    logits = linear(*exact) / temperature
    logprobs = torch.log_softmax(logits.masked_fill(~mask, -math.inf), -1)
    entropy = -(logprobs.exp() * logprobs.masked_fill(~mask, 0)).sum(-1)
    wanted = (logprobs.gather(-1, targets[:, None])[:, 0], entropy)
    for value, want in zip(found, wanted, strict=True):
        assert relative(value, want) < tolerance
    of_head = gradients(loss_of(*found, with_entropy=True), hidden, weight, bias)
    of_plain = gradients(loss_of(*wanted, with_entropy=True), *exact)
    for grad, want in zip(of_head, of_plain, strict=True):
        assert relative(grad, want) < tolerance


def test_a_token_without_a_support_has_the_whole_vocabulary() -> None:
    hidden, targets, weight, bias = inputs()
    nothing = TokenSupports(torch.zeros(len(targets), dtype=torch.int32), torch.zeros(0, dtype=torch.int32))
    whole = token_logprobs(hidden, targets, weight, bias, options())
    assert all(map(torch.equal, whole, token_logprobs(hidden, targets, weight, bias, options(), nothing)))


class Enumerated:
    """All responses of a tabular policy over a small vocabulary, scored by the real head in float64."""

    vocabulary, length = 5, 3

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        prefixes = [p for n in range(self.length) for p in product(range(self.vocabulary), repeat=n)]
        number = {prefix: n for n, prefix in enumerate(prefixes)}
        self.responses = list(product(range(self.vocabulary), repeat=self.length))
        self.states = torch.tensor([number[y[:t]] for y in self.responses for t in range(self.length)])
        self.tokens = torch.tensor(self.responses).flatten()
        self.logits, self.noise = (
            torch.randn(self.vocabulary, len(prefixes), generator=generator, dtype=torch.float64) for _ in range(2)
        )
        self.logits.requires_grad_()
        self.advantages = torch.randn(len(self.responses), generator=generator, dtype=torch.float64)

    def kept(self, logits: Tensor, top_p: float) -> Tensor:
        """[prefixes, V] bool."""
        rows = logits.detach().T.softmax(-1)
        limits = {"top_k": torch.tensor([4]), "top_p": torch.tensor([top_p]), "min_p": torch.tensor([0.05])}
        return kept_tokens(rows, **{name: value.expand(len(rows)) for name, value in limits.items()})

    def scores(self, logits: Tensor, kept: Tensor | None) -> Tensor:
        """[S, L] log-prob of every token; of a token outside the kept ones it means nothing."""
        hidden = torch.eye(logits.shape[1], dtype=torch.float64)[self.states]
        supports = None if kept is None else as_supports(kept[self.states])
        logprobs, _ = token_logprobs(hidden, self.tokens, logits, None, options(chunk_tokens=64), supports)
        return logprobs.view(len(self.responses), self.length)

    def probabilities(self, logits: Tensor, kept: Tensor) -> Tensor:
        """[S] of each response under truncated sampling, with plain torch."""
        law = logits.T.masked_fill(~kept, -math.inf).log_softmax(-1)
        return law[self.states, self.tokens].view(len(self.responses), self.length).sum(-1).exp()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("top_p", [0.7, 0.9, 1.0])
def test_the_gradient_is_that_of_the_expected_reward_of_what_was_sampled(seed: int, top_p: float) -> None:
    """On-policy to 1e-12; scored on the whole vocabulary instead, which is what refusing or ignoring the supports
    means, it is another direction."""
    case = Enumerated(seed)
    kept = case.kept(case.logits, top_p)
    (true,) = gradients((case.probabilities(case.logits, kept) * case.advantages).sum(), case.logits)
    mu = case.probabilities(case.logits, kept).detach()
    on_policy = (mu * case.advantages)[:, None] * case.scores(case.logits, kept)
    (found,) = gradients(on_policy[mu > 0].sum(), case.logits)
    assert (found - true).abs().max() < 1e-12
    whole = (mu * case.advantages)[:, None] * case.scores(case.logits, None)
    (biased,) = gradients(whole[mu > 0].sum(), case.logits)
    assert relative(biased, true) > 0.05


@pytest.mark.parametrize("seed", range(4))
def test_importance_weights_among_the_kept_tokens_correct_a_mismatch_to_rounding(seed: int) -> None:
    """mu has other logits, and its own kept tokens: the policy that is scored on these is the one that learns."""
    case = Enumerated(seed)
    engine = case.logits.detach() + 0.3 * case.noise
    kept = case.kept(engine, 0.9)
    (true,) = gradients((case.probabilities(case.logits, kept) * case.advantages).sum(), case.logits)
    mu, scores = case.probabilities(engine, kept), case.scores(case.logits, kept)
    drawn = mu > 0
    rho = (scores.detach().sum(-1)[drawn] - mu[drawn].log()).exp()
    (found,) = gradients(((mu[drawn] * rho * case.advantages[drawn])[:, None] * scores[drawn]).sum(), case.logits)
    assert (found - true).abs().max() < 1e-12
    again = case.scores(case.logits, kept)
    (uncorrected,) = gradients(((mu * case.advantages)[drawn, None] * again[drawn]).sum(), case.logits)
    assert relative(uncorrected, true) > 0.05


def truncated_samples(decoder: Decoder, **limits: float) -> list[Sample]:
    """Responses to a few prompts, two of them to one, of a batch that is larger than its slots."""
    requests = []
    for index in range(10):
        sampling = SamplingParams(
            temperature=TEMPERATURE,
            max_new_tokens=5 + 3 * index,
            seed=index,
            with_supports=True,
            **limits,  # type: ignore[arg-type]
        )
        prompt = [7, 8, 9, 10] if index < 2 else list(range(index, 3 * index))
        requests.append(
            GenerateRequest(prompt_id=max(1, index), sample_index=index, prompt_token_ids=prompt, sampling=sampling)
        )
    found: dict[int, Sample] = {}
    with torch.inference_mode():
        batch = Batch(decoder, num_slots=6, policy_version=0)
        batch.add(range(len(requests)), requests)
        while batch.num_active or batch.num_waiting:
            found |= {ticket: make_sample(requests[ticket], each) for ticket, each in batch.advance()}
    return [found[ticket] for ticket in sorted(found)]


TOKENS = "batch.max_tokens_per_microbatch=16384"
LIMITS = [{"top_p": 0.8}, {"top_k": 7, "min_p": 0.1}]


@pytest.mark.parametrize("limits", LIMITS, ids=["top_p", "top_k and min_p"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_arithmetic_has_the_same_bits_with_truncation(
    tmp_path: Path, dtype: torch.dtype, limits: dict[str, float]
) -> None:
    write_tiny_model(tmp_path)
    samples = truncated_samples(ExactDecoder(load(tmp_path, dtype, SLOT_ATTENTION, exact=True)), **limits)
    model = ScoringModel(load(tmp_path, dtype, EXACT_ATTENTION, exact=True), chunk_tokens=50, exact=True)
    with torch.inference_mode():
        for part in (samples, samples[:1], samples[3:7]):
            micro = micro_batch(part)
            scores = model(micro, temperature=TEMPERATURE).logprobs
            assert torch.equal(scores[micro.response_index], micro.rollout_logprobs[micro.response_index])


def test_what_is_packed_sent_and_chosen_keeps_the_supports_of_its_tokens(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    model = load(tmp_path, torch.float32, SLOT_ATTENTION, exact=False)
    samples = truncated_samples(Decoder(model), **LIMITS[0])
    whole = replace(samples[3], supports=None)  # one that was drawn from the whole vocabulary
    parts = [samples[0], samples[1], whole, samples[5]]
    micro = micro_batch(parts)
    scorer = ScoringModel(load(tmp_path, torch.float32, PACKED_ATTENTION, exact=False), chunk_tokens=9)

    def scores(of: list[Sample]) -> Tensor:
        return torch.cat([scorer(micro_batch([each]), temperature=TEMPERATURE).logprobs for each in of])

    with torch.inference_mode():
        packed = scorer(micro, temperature=TEMPERATURE, engine_dtype=torch.float32)
        torch.testing.assert_close(packed.logprobs, scores(parts), atol=1e-5, rtol=0)
        gap = (packed.logprobs - micro.rollout_logprobs)[: -len(samples[5].token_ids) - len(whole.token_ids)]
        assert gap.abs().max() < 1e-5
        assert packed.floor_delta is not None and packed.floor_delta.abs().max() < 1e-5
        chosen = chosen_sequences(micro, [3, 2, 0])
        picked = [samples[5], whole, samples[0]]
        torch.testing.assert_close(scorer(chosen, temperature=TEMPERATURE).logprobs, scores(picked), atol=1e-5, rtol=0)
    function, arguments = micro.__reduce__()
    assert function is _received
    again = _received(*arguments).supports
    assert again is not None and micro.supports is not None
    assert all(map(torch.equal, again, micro.supports))
    untruncated = micro_batch([replace(each, supports=None) for each in parts])
    assert untruncated.supports is None
    assert (scorer(untruncated, temperature=TEMPERATURE).logprobs - packed.logprobs).abs().max() > 0.05


def test_the_floor_is_measured_among_the_kept_tokens() -> None:
    hidden, targets, weight, bias = inputs()
    head = torch.nn.Linear(weight.shape[1], len(weight))
    head.weight.data, head.bias.data = weight.detach(), bias.detach()  # type: ignore[union-attr]
    one = as_supports(torch.nn.functional.one_hot(targets, len(weight)).bool())
    arguments = {"engine_dtype": torch.bfloat16, "temperature": 1.0}
    assert head_floor(hidden, targets, head, **arguments).abs().max() > 1e-3  # type: ignore[arg-type]
    assert torch.equal(head_floor(hidden, targets, head, supports=one, **arguments), torch.zeros(len(targets)).double())  # type: ignore[arg-type]


def test_a_sample_with_a_token_outside_its_support_is_refused() -> None:
    sample = {
        "prompt_id": 0, "sample_index": 0, "token_ids": [3, 4, 5], "response_mask": [False, True, True],
        "rollout_logprobs": [0.0, -0.1, -0.2], "token_versions": [0, 0, 0], "finish_reason": None,
    }  # fmt: skip
    good = supports_of([[], [4, 9], [5]])
    assert Sample(**sample, supports=good).supports == good  # type: ignore[arg-type]
    for rows, text in (
        ([[], [4, 9]], "2 supports of 3 tokens"),
        ([[3], [4, 9], [5]], "not sampled has a support"),
        ([[], [9], [5]], "not in its own support"),
        ([[], [4], []], "not in its own support"),
    ):
        with pytest.raises(ValueError, match=text):
            Sample(**sample, supports=supports_of(rows))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="add up to the 1 kept tokens"):
        replace(no_supports(2), token_ids=np.zeros(1, np.int32))


def test_configs_of_truncation() -> None:
    assert config_of("rollout=torch", "sampling.top_p=0.9").sampling.truncation == [0.9, -1, 0.0]
    assert config_of("rollout=sglang", "sampling.top_p=0.9", "sampling.top_k=50").sampling.is_truncated
    text = " ".join(messages("rollout=sglang", "sampling.min_p=0.1"))
    assert "sampling.top_k must be 2 to 2048 with truncated sampling (sampling.top_p, sampling.min_p) and roll" in text
    text = " ".join(messages("rollout=sglang", "sampling.top_k=2000", "sampling.max_new_tokens=8192", TOKENS))
    assert "sampling.top_k must be 2 to 1170 with truncated sampling" in text and "Set sampling.top_k=256" in text
    assert "sampling.top_k must be >= 2, or -1" in " ".join(messages("rollout=torch", "sampling.top_k=1"))
    assert "sampling.top_p must lie in (0, 1]" in " ".join(messages("rollout=torch", "sampling.top_p=0"))
    assert "sampling.min_p must lie in [0, 1)" in " ".join(messages("rollout=torch", "sampling.min_p=1"))
    # An evaluation asks for no supports, so that SGLang needs no limit.
    evaluation = config_of("rollout=sglang", "eval.top_p=0.7", "eval.temperature=0.9").eval_sampling
    assert (evaluation.top_p, evaluation.top_k, evaluation.temperature) == (0.7, -1, 0.9)
    inherited = config_of("rollout=torch", "sampling.top_k=9", "eval.min_p=0.1").eval_sampling
    assert inherited.truncation == [1.0, 9, 0.1]
