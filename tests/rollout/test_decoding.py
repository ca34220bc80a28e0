"""The sampling law, and the order in which requests get their slots."""

from dataclasses import replace

import pytest
import torch

from rollout.embedded.drawing import Drawn, Truncation, sample_tokens
from rollout.torch.decoding import Batch, chunks
from rollout.torch.model import Decoder, Read
from rollout.types import FinishReason, GenerateRequest, SamplingParams


def sampled(logits: torch.Tensor, temperature: float = 1.0, truncation: Truncation | None = None) -> Drawn:
    """A token per row of logits, with another seed for every row."""
    count = len(logits)
    temperatures, seeds = torch.full((count,), temperature), torch.arange(count)
    return sample_tokens(
        logits, temperature=temperatures, seeds=seeds, positions=torch.full((count,), 9), truncation=truncation
    )


def test_sampling_follows_the_distribution_at_any_temperature():
    """Counts lie within five standard deviations; a token without probability is never drawn."""
    count = 20_000
    logits = torch.tensor([0.5, -1.0, 2.0, -float("inf"), 1.5, -9.0])
    for temperature in (1.0, 0.5, 2.0):
        tokens, logprobs, _ = sampled(logits.expand(count, -1), temperature)
        probs = torch.softmax(logits.double() / temperature, dim=-1)
        off = torch.bincount(tokens, minlength=6) - probs * count
        assert (off.abs() <= 5 * (probs * (1 - probs) * count).sqrt()).all()
        assert torch.allclose(logprobs.double(), probs.log()[tokens], atol=1e-6)


def test_greedy_and_sampled_rows_share_a_batch():
    logits = torch.tensor([[0.0, 2.0, 1.0]]).expand(3, -1)
    tokens, logprobs, _ = sample_tokens(
        logits, temperature=torch.tensor([0.0, 1.0, 0.5]), seeds=torch.tensor([0, 1, 2]), positions=torch.arange(3)
    )
    assert tokens[0] == 1
    # -log(e^-2 + 1 + e^-1) for the greedy row.
    assert logprobs[0].item() == pytest.approx(-0.407606, abs=1e-5)
    for row, temperature in ((1, 1.0), (2, 0.5)):
        expected = torch.log_softmax(logits[row] / temperature, dim=-1)[tokens[row]]
        assert logprobs[row].item() == pytest.approx(expected.item(), abs=1e-6)


def test_a_broken_row_is_visible_and_stays_in_the_vocabulary():
    logits = torch.tensor([[0.0, float("nan"), 1.0], [0.0, 1.0, 2.0]])
    tokens, logprobs, _ = sampled(logits)
    assert 0 <= tokens[0] < 3
    assert logprobs.isnan().tolist() == [True, False]


def test_truncated_rows_draw_from_the_kept_tokens_alone():
    """Probabilities 0.5, 0.3, 0.15, 0.05; a greedy row beside them keeps the whole vocabulary."""
    count = 20_000
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(count, -1)
    cases = {(2, 1.0, 0.0): [0.625, 0.375], (4, 0.6, 0.0): [0.625, 0.375], (4, 1.0, 0.25): [10 / 19, 6 / 19, 3 / 19]}
    for limits, expected in cases.items():
        truncation = Truncation(*(torch.tensor([limit]).expand(count) for limit in limits))
        drawn = sampled(logits, truncation=truncation)
        counts = torch.bincount(drawn.tokens, minlength=4) / count
        assert counts.tolist() == pytest.approx([*expected, *[0] * (4 - len(expected))], abs=5 * 0.5 / count**0.5)
        assert int(drawn.tokens.max()) < len(expected)
        assert torch.allclose(drawn.logprobs.exp(), torch.tensor(expected)[drawn.tokens], atol=1e-6)
        assert drawn.kept is not None and drawn.kept[0].sum() == len(expected)
    greedy = sampled(logits[:1], 0.0, Truncation(torch.tensor([1]), torch.tensor([0.5]), torch.tensor([0.9])))
    assert greedy.tokens.tolist() == [0] and greedy.logprobs.exp().tolist() == pytest.approx([0.5])


def test_a_broken_row_is_visible_with_truncation_too():
    logits = torch.tensor([[0.0, float("nan"), 1.0], [0.0, 1.0, 2.0]])
    truncation = Truncation(torch.tensor([2, 2]), torch.tensor([0.9, 0.9]), torch.tensor([0.0, 0.0]))
    drawn = sampled(logits, truncation=truncation)
    assert 0 <= drawn.tokens[0] < 3
    assert drawn.logprobs.isnan().tolist() == [True, False]


class CountingDecoder(Decoder):
    """Next token = last token + 1, whatever came before; remembers what it was asked."""

    def __init__(self) -> None:
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.prompts: list[int] = []
        """Distinct prompts of every prefill."""
        self.widths: list[int] = []
        """Tokens of the longest prompt of every prefill."""
        self.rows: list[int] = []
        """Sequences of every step."""

    def prefill(self, token_ids, lengths, forward, *, detail):
        self.prompts.append(len(token_ids))
        self.widths.append(token_ids.shape[1])
        return self._logits(token_ids[torch.arange(len(token_ids)), lengths - 1])

    def step(self, tokens, positions, forward, *, detail):
        self.rows.append(len(tokens))
        return self._logits(tokens)

    def _logits(self, tokens):
        return Read(torch.nn.functional.one_hot(tokens + 1, 100).float() * 1000, None)


def counting_requests(lengths, *, group_size):
    """Request i starts after token 10 * (i // group_size) and has lengths[i] tokens."""
    return [
        GenerateRequest(
            prompt_id=index // group_size,
            sample_index=index % group_size,
            prompt_token_ids=[0] * (index // group_size) + [10 * (index // group_size)],
            sampling=SamplingParams(temperature=1.0, max_new_tokens=length, seed=index),
        )
        for index, length in enumerate(lengths)
    ]


def finish(batch):
    """Generations by ticket, until nothing is left."""
    found = {}
    while batch.num_active or batch.num_waiting:
        found |= dict(batch.advance())
    return found


def test_freed_slots_are_filled_at_once_and_every_response_stays_its_own():
    lengths = [3, 30, 4, 5, 30, 6, 7, 30, 8, 9, 30, 10]
    requests, decoder = counting_requests(lengths, group_size=2), CountingDecoder()
    batch = Batch(decoder, num_slots=4, policy_version=3)
    batch.add(range(len(requests)), requests)
    generations = finish(batch)
    for ticket, (request, length) in enumerate(zip(requests, lengths, strict=True)):
        generation = generations[ticket]
        first = request.prompt_token_ids[-1] + 1
        assert generation.token_ids == list(range(first, first + length))
        assert (generation.finish_reason, generation.token_versions) == (FinishReason.length, [3] * length)
    # Three full batches of four would take 30 + 30 + 30 tokens.
    assert len(decoder.rows) < 60
    assert max(decoder.rows) <= 4
    assert sum(decoder.prompts) <= len(lengths)


def test_a_group_reads_its_prompt_once_and_ended_sequences_leave_the_batch():
    requests, decoder = counting_requests([1, 1, 2, 9], group_size=4), CountingDecoder()
    batch = Batch(decoder, num_slots=64, policy_version=0)
    batch.add(range(len(requests)), requests)
    finish(batch)
    assert decoder.prompts == [1]
    assert decoder.rows == [2] + [1] * 7


def expected(request):
    """What the counting decoder answers."""
    first = request.prompt_token_ids[-1] + 1
    return list(range(first, first + request.sampling.max_new_tokens))


def test_requests_that_come_later_take_free_slots_at_once():
    decoder = CountingDecoder()
    batch = Batch(decoder, num_slots=16, policy_version=0)
    first, later = counting_requests([20, 20], group_size=1), counting_requests([5, 9, 3], group_size=1)
    batch.add([10, 11], first)
    for _ in range(4):
        assert batch.advance() == []
    batch.add([7, 8, 9], later)
    assert (batch.num_active, batch.num_waiting) == (2, 3)
    batch.advance()
    assert (batch.num_active, batch.num_waiting) == (5, 0)
    found = finish(batch)
    assert {ticket: found[ticket].token_ids for ticket in found} == {
        **dict(zip([10, 11], map(expected, first), strict=True)),
        **dict(zip([7, 8, 9], map(expected, later), strict=True)),
    }
    assert len(decoder.rows) == 19


def test_an_aborted_request_keeps_its_tokens_and_the_others_go_on():
    decoder = CountingDecoder()
    batch = Batch(decoder, num_slots=3, policy_version=4)
    requests = counting_requests([20, 9, 12, 5], group_size=1)
    batch.add(range(4), requests)
    for _ in range(4):
        batch.advance()
    aborted = dict(batch.abort({0, 3, 99}))
    assert batch.abort({0, 3, 99}) == []
    assert sorted(aborted) == [0, 3]
    assert all(generation.finish_reason is FinishReason.abort for generation in aborted.values())
    assert aborted[0].token_ids == expected(requests[0])[:4]
    assert (aborted[0].token_versions, len(aborted[0].logprobs)) == ([4] * 4, 4)
    assert (aborted[3].token_ids, aborted[3].logprobs, aborted[3].token_versions) == ([], [], [])
    rest = finish(batch)
    assert {ticket: rest[ticket].token_ids for ticket in rest} == {
        1: expected(requests[1]), 2: expected(requests[2])
    }  # fmt: skip
    assert batch.abort(None) == []


def test_aborting_all_leaves_nothing():
    batch = Batch(CountingDecoder(), num_slots=2, policy_version=0)
    batch.add(range(4), counting_requests([9, 9, 9, 9], group_size=1))
    batch.advance()
    assert sorted(completion.ticket for completion in batch.abort(None)) == [0, 1, 2, 3]
    assert (batch.num_active, batch.num_waiting, batch.oldest) == (0, 0, None)
    assert batch.advance() == []


def test_a_response_can_be_resumed_and_renewed_in_the_middle():
    """An aborted response goes on where it was; later its weights change. Every token says under which it was drawn."""
    [request] = counting_requests([9], group_size=1)
    batch = Batch(CountingDecoder(), num_slots=2, policy_version=1)
    batch.add([0], [request])
    for _ in range(3):
        batch.advance()
    [(_, begun)] = batch.abort([0])
    later = Batch(CountingDecoder(), num_slots=2, policy_version=2)
    later.add([0, 1], [replace(request, resumed=begun), request])
    for _ in range(2):
        later.advance()
    decoder = CountingDecoder()
    later.renew(decoder, 5)
    # Both texts are read again, each as far as it is.
    assert (decoder.prompts, decoder.widths) == ([2], [6])
    found = finish(later)
    assert found[0].token_ids == found[1].token_ids == expected(request)
    assert found[0].token_versions == [1, 1, 1, 2, 2, 5, 5, 5, 5]
    assert found[1].token_versions == [2, 2, 5, 5, 5, 5, 5, 5, 5]
    assert len(found[0].logprobs) == 9
    assert found[0].logprobs[:3] == begun.logprobs


def test_long_texts_are_read_in_several_forwards():
    def parts(lengths):
        texts = [list(range(length)) for length in lengths]
        return [(part.start, part.stop) for part in chunks(texts, max_tokens=10)]

    assert parts([3, 3, 3, 3]) == [(0, 4)]
    assert parts([2, 3, 4, 5]) == [(0, 2), (2, 4)]
    assert parts([30, 1, 1]) == [(0, 1), (1, 3)]
    assert parts([5, 5, 5, 11, 11]) == [(0, 3), (3, 5)]
