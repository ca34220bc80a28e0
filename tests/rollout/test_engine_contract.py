"""What every rollout engine must do: the built-in engines, and one that a user wrote (`toy_engine.py`).

What is drawn, and what is reported of it, is proven by enumeration in test_logprob_semantics.py, with the same engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest
import torch
from engine_cases import HEAD_DIMS, OWN, start_engine
from packing_cases import pack
from sglang_cases import (
    LONG,
    PROMPTS,
    Served,
    largest_gap,
    make_requests,
    poll_all,
    reference_logprobs,
    stopped_until_sync,
    tokens,
    without_end,
)
from tiny_model import EOS_TOKEN_ID, VOCAB_SIZE, write_tiny_model

from algorithms.truncation import kept_tokens
from rollout.engine import Engine, EngineError, WeightSyncError
from rollout.types import FinishReason, GenerateRequest, PackedWeights

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Case(Protocol):
    """A running engine, the model whose weights it holds, and their version."""

    engine: Engine
    model: PreTrainedModel
    version: int

    def load(self, model: PreTrainedModel) -> None:
        """Give the engine the weights of `model` as the next version."""

    def packed(self, model: PreTrainedModel) -> PackedWeights:
        """The weights of `model` as the next version."""


class Embedded:
    """An engine in this process."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.model = self._first = write_tiny_model(
            directory / "model", max_positions=LONG + 20, head_dim=HEAD_DIMS.get(kind, 16)
        )
        self.version = 0
        self.engine = start_engine(kind, directory / "model", log_dir=directory)

    def packed(self, model: PreTrainedModel) -> PackedWeights:
        return pack(model.named_parameters(), policy_version=self.version + 1, dtype=torch.float32)

    def load(self, model: PreTrainedModel) -> None:
        self.engine.load_weights(self.packed(model))
        self.version += 1
        self.model = model

    def restore(self) -> None:
        """End all requests, and give the engine its first weights."""
        self.engine.abort(None)
        self.engine.poll(0.1)
        assert self.engine.poll(0.1) == [], "a completion came after its abort, or again"
        self.load(self._first)


KINDS = ["torch", *OWN, *(pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("vllm", "sglang"))]


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Embedded]]:
    """Name -> engine in this process, made once."""
    made: dict[str, Embedded] = {}

    def get(name: str) -> Embedded:
        if name not in made:
            made[name] = Embedded(name, tmp_path_factory.mktemp(name))
        return made[name]

    threads = torch.get_num_threads()
    yield get
    for each in made.values():
        each.engine.stop()
    torch.set_num_threads(threads)


@pytest.fixture(params=KINDS)
def case(request: pytest.FixtureRequest, embedded: Callable[[str], Embedded]) -> Iterator[Case]:
    if request.param == "sglang":
        yield request.getfixturevalue("served")
        return
    yield (found := embedded(request.param))
    found.restore()


def under_way(case: Case, monkeypatch: pytest.MonkeyPatch) -> list[GenerateRequest]:
    """Requests (tickets 0, 1, ...) that have their first tokens and most of their tokens still to come."""
    without_end(monkeypatch)
    requests = make_requests(PROMPTS, num_samples=4, max_new_tokens=LONG, seed=11, stop=())
    [short] = make_requests(PROMPTS[:1], max_new_tokens=8, stop=())
    case.engine.submit(range(len(requests) + 1), [*requests, short])
    [first] = poll_all(case.engine, 1)
    assert first == len(requests), "a short response waited for the long ones"
    return requests


def another(case: Case, directory: Path, *, seed: int) -> PreTrainedModel:
    """A model of the same shape, with other weights."""
    return write_tiny_model(directory, seed=seed, head_dim=case.model.config.head_dim)


def paused(case: Case, monkeypatch: pytest.MonkeyPatch) -> AbstractContextManager[None]:
    """No request ends while a sync is prepared: the other engines are as fast as this process."""
    return stopped_until_sync(case.engine, monkeypatch) if isinstance(case, Served) else nullcontext()


def test_responses_come_as_they_end_each_once_and_are_those_of_a_blocking_call(case: Case) -> None:
    requests = make_requests(PROMPTS, num_samples=6, max_new_tokens=60)
    assert case.engine.poll(0.0) == []
    case.engine.submit(range(100, 100 + len(requests)), requests)
    got = poll_all(case.engine, len(requests))
    assert case.engine.poll(0.0) == []
    assert tokens([got[100 + i] for i in range(len(requests))]) == tokens(case.engine.generate(requests))
    assert case.engine.sampling_s > 0
    for generation in got.values():
        assert generation.logprobs is not None
        assert len(generation.logprobs) == len(generation.token_ids)
        assert generation.token_versions == [case.version] * len(generation.token_ids)


def test_a_response_ends_with_a_stop_token_or_at_its_bound(case: Case) -> None:
    generations = case.engine.generate(make_requests(PROMPTS, num_samples=12, max_new_tokens=24, seed=50))
    assert {generation.finish_reason for generation in generations} == {FinishReason.stop, FinishReason.length}
    for generation in generations:
        is_full = len(generation.token_ids) == 24
        ends = [token == EOS_TOKEN_ID for token in generation.token_ids]
        assert not any(ends[:-1])
        assert ends[-1] is (generation.finish_reason is FinishReason.stop)
        assert ends[-1] or is_full
    [request] = make_requests(PROMPTS[:1], temperature=0.0, max_new_tokens=8)
    [free] = case.engine.generate([request])
    stop = free.token_ids[2]
    [bounded] = case.engine.generate([replace(request, sampling=replace(request.sampling, stop_token_ids=(stop,)))])
    assert bounded.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert bounded.finish_reason is FinishReason.stop


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_log_probs_are_those_of_transformers_at_the_temperature(case: Case, temperature: float) -> None:
    """Of a greedy token that at temperature 1."""
    requests = make_requests(PROMPTS, num_samples=8 if temperature else 1, temperature=temperature)
    generations = case.engine.generate(requests)
    assert largest_gap(requests, generations, case.model, temperature=temperature or 1.0) < 1e-4
    if temperature != 0.7:
        return
    assert largest_gap(requests, generations, case.model, temperature=1.0) > 0.1, "another one would not be seen"
    assert largest_gap(requests, generations, case.model, temperature=0.7, shift=1) > 0.1


@pytest.mark.parametrize("cut", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2}], ids=" ".join)
def test_truncated_sampling_returns_the_tokens_that_it_kept(case: Case, cut: dict[str, float]) -> None:
    requests = make_requests(PROMPTS, num_samples=2, max_new_tokens=8)
    limits = {"top_k": 60, "top_p": 1.0, "min_p": 0.0} | cut
    for request in requests:
        request.sampling = replace(request.sampling, **limits, with_supports=True)
    params = {name: torch.tensor([value]) for name, value in limits.items()}
    for request, generation in zip(requests, case.engine.generate(requests), strict=True):
        supports = generation.supports
        assert supports is not None and len(supports) == len(generation.token_ids)
        begun, context = 0, list(request.prompt_token_ids)
        for token, size, logprob in zip(generation.token_ids, supports.sizes, generation.logprobs or [], strict=True):
            with torch.inference_mode():
                logits = case.model(input_ids=torch.tensor([context]), use_cache=False).logits[0, -1]
            probs = torch.softmax(logits, -1)
            kept = kept_tokens(probs[None], **params)[0].nonzero().flatten()
            assert sorted(supports.token_ids[begun : begun + size].tolist()) == kept.tolist()
            assert logprob == pytest.approx(float((probs[token] / probs[kept].sum()).log()), abs=1e-4)
            begun += int(size)
            context.append(token)
        assert begun < 30 * len(generation.token_ids), "hardly anything was cut"


def test_requests_that_cannot_be_served_are_refused_and_none_of_their_call_is_queued(case: Case) -> None:
    [request] = make_requests(PROMPTS[:1], max_new_tokens=4)
    [done] = case.engine.generate([replace(request, sampling=replace(request.sampling, stop_token_ids=()))])
    for broken, text in (
        (replace(request, prompt_token_ids=[]), "the prompt has no tokens"),
        (replace(request, prompt_token_ids=[VOCAB_SIZE]), "token ids outside"),
        (replace(request, sampling=replace(request.sampling, max_new_tokens=LONG + 20)), "exceed the engine's context"),
        (replace(request, resumed=done), f"{len(done.token_ids)} resumed tokens leave none of max_new_tokens=4"),
    ):
        with pytest.raises(ValueError, match=text):
            case.engine.submit([0, 1], [request, broken])
    assert case.engine.poll(0.2) == []


def test_an_aborted_response_has_its_tokens_so_far_and_goes_on_as_if_it_had_not_ended(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = under_way(case, monkeypatch)
    case.engine.submit([900], [requests[0]])
    case.engine.abort([900])
    case.engine.abort([900, 12345])
    got = poll_all(case.engine, 1)
    assert got.keys() == {900}, "others were aborted with it"
    case.engine.abort(None)
    poll_all(case.engine, len(requests) + 1, into=got)
    partial = {ticket: g for ticket, g in got.items() if g.finish_reason is FinishReason.abort and g.token_ids}
    assert len(partial) >= 3, "the requests ended before they were aborted"
    assert all(len(g.logprobs or []) == len(g.token_ids) == len(g.token_versions) for g in got.values())
    assert case.engine.poll(0.0) == []
    ticket = max(set(partial) - {900}, key=lambda ticket: len(partial[ticket].token_ids))
    begun = partial[ticket]
    request = replace(requests[ticket], resumed=begun)
    request.sampling = replace(request.sampling, max_new_tokens=len(begun.token_ids) + 20)
    case.load(case.model)
    [whole] = case.engine.generate([request])
    assert whole.logprobs is not None and begun.logprobs is not None
    assert whole.token_ids[: len(begun.token_ids)] == begun.token_ids
    assert whole.logprobs[: len(begun.logprobs)] == begun.logprobs
    assert whole.token_versions == [case.version - 1] * len(begun.token_ids) + [case.version] * 20
    assert whole.finish_reason is FinishReason.length
    # The draw of a token belongs to its place: with the same seed a resumed response is the uninterrupted one.
    [straight] = case.engine.generate([replace(request, resumed=None)])
    assert whole.token_ids == straight.token_ids
    assert largest_gap([request], [whole], case.model, temperature=1.0) < 1e-4


def test_requests_that_are_given_back_do_not_come_by_poll(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = under_way(case, monkeypatch)
    given = case.engine.give_back(2)
    assert len(given) <= 2 and set(given) <= set(range(len(requests)))
    case.engine.abort(None)
    assert poll_all(case.engine, len(requests) - len(given)).keys() == set(range(len(requests))) - set(given)
    assert case.engine.poll(0.2) == []


def test_weights_change_under_way_and_every_token_says_which_sampled_it(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = another(case, tmp_path / "new", seed=8)  # before the requests, which would end meanwhile
    requests = under_way(case, monkeypatch)
    old, old_version = case.model, case.version
    with paused(case, monkeypatch):
        case.load(new)
    assert case.engine.policy_version == case.version == old_version + 1
    short = make_requests(PROMPTS, max_new_tokens=8)
    case.engine.submit(range(500, 500 + len(short)), short)  # beside them, all are sampled on
    got = poll_all(case.engine, len(short))
    case.engine.abort(None)
    poll_all(case.engine, len(requests) + len(short), into=got)
    mixed = 0
    for ticket, request in enumerate(requests):
        generation = got[ticket]
        versions = torch.tensor(generation.token_versions)
        assert set(versions.tolist()) <= {old_version, case.version}
        assert versions.tolist() == sorted(generation.token_versions)
        mixed += len(set(versions.tolist())) == 2
        before, after = (
            reference_logprobs(model, request.prompt_token_ids, generation.token_ids, temperature=1.0)
            for model in (old, new)
        )
        expected = torch.where(versions == old_version, before, after)
        assert (torch.tensor(generation.logprobs) - expected).abs().max() < 1e-4
    assert mixed >= 2, "no response was under way during the sync"
    assert largest_gap(short, [got[500 + i] for i in range(len(short))], new, temperature=1.0) < 1e-4


@pytest.mark.parametrize("damage", ["a byte", "a missing tensor", "an unknown tensor", "an older version"])
def test_wrong_weights_are_refused_by_the_name_of_their_tensor_and_change_nothing(
    case: Case, tmp_path: Path, damage: str
) -> None:
    requests = make_requests(PROMPTS, num_samples=2, temperature=0.0)
    before = case.engine.generate(requests)
    packed = case.packed(another(case, tmp_path, seed=2))
    spec = packed.tensors[3]
    named = spec.name
    if damage == "a byte":
        packed.data[spec.offset] ^= 1
    elif damage == "a missing tensor":
        packed.tensors.remove(spec)
    elif damage == "an unknown tensor":
        spec.name = named = "model.layers.9.mlp.up_proj.weight"
    else:
        case.load(case.model)
        packed.policy_version, named = case.version - 1, f"version {case.version - 1}"
    with pytest.raises(WeightSyncError) as caught:
        case.engine.load_weights(packed)
    assert named in str(caught.value)
    assert case.engine.policy_version == case.version
    assert tokens(case.engine.generate(requests)) == tokens(before)


def test_an_engine_sleeps_only_if_nothing_is_under_way_and_wakes_for_new_weights(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = make_requests(PROMPTS, temperature=0.0)
    before = case.engine.generate(requests)
    with monkeypatch.context() as patched:
        unfinished = under_way(case, patched)
        with pytest.raises(EngineError, match="requests are unfinished"):
            case.engine.sleep()
        case.engine.abort(None)
        poll_all(case.engine, len(unfinished))
    for call in (case.engine.sleep, case.engine.sleep, case.engine.wake, case.engine.wake):
        call()
    case.load(case.model)
    assert case.engine.policy_version == case.version
    assert tokens(case.engine.generate(requests)) == tokens(before)
