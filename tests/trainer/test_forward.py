"""Packed scoring equals per-sequence scoring, in train and in eval mode; log-prob, entropy and floor by definition."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen2Config, Qwen2ForCausalLM

from algorithms.kl import k3
from rollout.types import FinishReason, Sample
from trainer.batch.packing import micro_batch
from trainer.batch.train_batch import Branch
from trainer.policy.model import checkpoint_activations
from trainer.scoring import attention
from trainer.scoring.attention import PACKED_ATTENTION, Segments, attend_by_run, packed_attention
from trainer.scoring.forward import ScoringModel, states_before

VOCAB = 40


def make_model(
    *, chunk_tokens: int = 512, attention: str = PACKED_ATTENTION, fp32_head: bool = False, num_layers: int = 2
) -> ScoringModel:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        attn_implementation=attention,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return ScoringModel(model, chunk_tokens=chunk_tokens, fp32_head=fp32_head)


def make_samples(lengths: Sequence[tuple[int, int]] = ((3, 5), (6, 2), (1, 9))) -> list[Sample]:
    generator = torch.Generator().manual_seed(1)
    return [
        Sample(
            prompt_id=index,
            sample_index=0,
            token_ids=torch.randint(VOCAB, (prompt + response,), generator=generator).tolist(),
            response_mask=[False] * prompt + [True] * response,
            rollout_logprobs=[0.0] * prompt + [-1.0] * response,
            token_versions=[0] * (prompt + response),
            finish_reason=FinishReason.stop,
        )
        for index, (prompt, response) in enumerate(lengths)
    ]


def reference_logprobs(sample: Sample, *, temperature: float) -> Tensor:
    """Log-probs [T] of one sequence from the plain transformers forward (sdpa, full logits)."""
    model = make_model(attention="sdpa").causal_lm
    with torch.no_grad():
        logits = model(torch.from_numpy(sample.token_ids)[None], use_cache=False).logits[0]
    logprobs = torch.log_softmax(logits / temperature, dim=-1)[:-1]
    chosen = logprobs.gather(-1, torch.from_numpy(sample.token_ids)[1:, None]).squeeze(-1)
    return torch.cat([torch.zeros(1), chosen]) * torch.from_numpy(sample.response_mask)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_packed_equals_per_sequence(training: bool, temperature: float) -> None:
    samples = make_samples()
    model = make_model(chunk_tokens=3).train(training)
    scores = model(micro_batch(samples), temperature=temperature)
    expected = torch.cat([reference_logprobs(sample, temperature=temperature) for sample in samples])
    torch.testing.assert_close(scores.logprobs, expected, atol=2e-5, rtol=0)
    assert expected.abs().max() > 1  # the model is not trivially uniform


def test_a_neighbour_changes_nothing() -> None:
    samples = make_samples()
    model = make_model()
    together = model(micro_batch(samples), temperature=1.0).logprobs
    alone = torch.cat([model(micro_batch([sample]), temperature=1.0).logprobs for sample in samples])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


def test_entropy_is_that_of_the_full_distribution() -> None:
    sample = make_samples()[0]
    scores = make_model(chunk_tokens=2)(micro_batch([sample]), temperature=1.0)
    with torch.no_grad():
        logits = (
            make_model(attention="sdpa").causal_lm(torch.from_numpy(sample.token_ids)[None], use_cache=False).logits[0]
        )
    expected = torch.distributions.Categorical(logits=logits).entropy()[:-1]
    mask = torch.from_numpy(sample.response_mask)
    torch.testing.assert_close(scores.entropy[mask], expected[mask[1:]], atol=1e-5, rtol=0)
    assert scores.entropy[~mask].eq(0).all()


def test_gradient_does_not_depend_on_chunks_or_packing() -> None:
    samples = make_samples()
    weights = {"whole": make_model(), "chunks": make_model(chunk_tokens=1)}

    def total(model: ScoringModel, parts: list[list[Sample]]) -> Tensor:
        model.zero_grad()
        for part in parts:
            model(micro_batch(part), temperature=1.0).logprobs.sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    reference = total(weights["whole"], [samples])
    for parts in ([[s] for s in samples], [samples[:1], [], samples[1:]]):
        other = total(weights["chunks"], parts)
        assert (other - reference).norm() <= 1e-6 * reference.norm()


def test_an_empty_microbatch_has_a_zero_gradient() -> None:
    model = make_model()
    scores = model(micro_batch([]), temperature=1.0)
    scores.logprobs.sum().backward()
    assert all(p.grad is None or p.grad.abs().max() == 0 for p in model.parameters())


def test_a_sum_that_float16_cannot_hold_spoils_no_token() -> None:
    model = make_model().half()
    with torch.no_grad():
        model.causal_lm.get_decoder().norm.weight.fill_(1e4)  # float16 holds each state: up to 1e4 sqrt(32)
        assert not torch.isfinite(states_before(model.causal_lm.get_decoder(), micro_batch(make_samples())).sum())
    micro = micro_batch(make_samples())
    logprobs = model(micro, temperature=1.0).logprobs
    assert torch.isfinite(logprobs).all() and logprobs.count_nonzero() <= len(micro.response_index)


def test_floor_is_positive_and_grows_with_rounding() -> None:
    model, micro = make_model(), micro_batch(make_samples())
    floors = {}
    for dtype in (torch.float32, torch.bfloat16):
        delta = model(micro, temperature=1.0, engine_dtype=dtype).floor_delta
        assert delta is not None
        floors[dtype] = k3(delta).mean().item()
    assert 0 < floors[torch.float32] < 1e-10
    assert 1e-8 < floors[torch.bfloat16] < 1e-2


def test_a_float32_head_takes_the_floor_away() -> None:
    micro = micro_batch(make_samples())
    plain, wide = (make_model(fp32_head=wide).bfloat16() for wide in (False, True))
    rounded = plain(micro, temperature=0.7, engine_dtype=torch.bfloat16)
    gap = (rounded.logprobs - wide(micro, temperature=0.7).logprobs)[micro.response_mask]
    assert rounded.floor_delta is not None
    assert rounded.floor_delta.abs().max() > 1e-3
    torch.testing.assert_close(gap.double(), rounded.floor_delta, atol=1e-5, rtol=0)


def attend_alone(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scale: float) -> Tensor:
    """[H, T, D] -> [T, H, D] by definition: each sequence by itself, its scores masked, softmax, values."""
    parts = zip(*(states.split(lengths, dim=1) for states in (query, key, value)), strict=True)
    outs = []
    for q, k, v in parts:
        k, v = (states.repeat_interleave(len(query) // len(key), dim=0) for states in (k, v))
        future = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
        outs.append((q @ k.mT * scale).masked_fill(future, -torch.inf).softmax(-1) @ v)
    return torch.cat(outs, dim=1).transpose(0, 1)


def random_states(tokens: int, *, kv_heads: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Query of 4 heads, key, value: [1, heads, tokens, 8]."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((1, heads, tokens, 8) for heads in (4, kv_heads, kv_heads))
    return [torch.randn(shape, generator=generator, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("lengths", [[7], [5, 5, 3, 1, 1, 4], [2, 3, 2]])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_by_run_is_that_of_each_sequence_by_itself(lengths: list[int], kv_heads: int) -> None:
    states = random_states(sum(lengths), kv_heads=kv_heads)
    alone = attend_alone(*(each.squeeze(0) for each in states), lengths, scale=0.3)
    by_run = attend_by_run(*states, Segments(lengths), scaling=0.3)
    torch.testing.assert_close(by_run, alone[None])
    upstream = torch.randn(by_run.shape, generator=torch.Generator().manual_seed(4))
    gradients = (torch.autograd.grad(out, states, upstream) for out in (by_run, alone[None]))
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected)


SHARED = Segments([3, 6, 2], [Branch(0, 3, 4), Branch(0, 3, 4), Branch(0, 3, 1), Branch(9, 2, 5)])
"""A shared prompt of 3 tokens with three branches, a whole sequence of 6, and a prompt of 2 with one branch."""


def attend_segments_alone(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
    """[H, I, D] -> [I, H, D] by definition: each sequence laid out whole, then attended to by itself."""
    outs = [attend_alone(*(states[:, : segments.root_tokens] for states in (query, key, value)), segments.roots, scale)]
    end = segments.root_tokens
    for prompt_start, prompt_length, length in segments.branches:
        own = [*range(prompt_start, prompt_start + prompt_length), *range(end, end + length)]
        whole = attend_alone(*(states[:, own] for states in (query, key, value)), [len(own)], scale)
        outs.append(whole[prompt_length:])
        end += length
    return torch.cat(outs)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_a_branch_attends_to_its_prompt_and_to_itself(kv_heads: int) -> None:
    states = random_states(25, kv_heads=kv_heads)
    alone = attend_segments_alone(*(each.squeeze(0) for each in states), SHARED, scale=0.3)
    by_run = attend_by_run(*states, SHARED, scaling=0.3)
    torch.testing.assert_close(by_run, alone[None])
    upstream = torch.randn(by_run.shape, generator=torch.Generator().manual_seed(4))
    gradients = (torch.autograd.grad(out, states, upstream) for out in (by_run, alone[None]))
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("segments", [Segments([5, 5, 3]), SHARED])
def test_a_key_per_head_as_a_gpu_wants_it_changes_no_result(
    monkeypatch: pytest.MonkeyPatch, segments: Segments
) -> None:
    states = random_states(25 if segments is SHARED else 13, kv_heads=2)
    upstream = torch.randn((1, states[0].shape[2], 4, 8), generator=torch.Generator().manual_seed(4))
    attend = attention.scaled_dot_product_attention
    seen: list[tuple[int, bool]] = []

    def spy(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
        seen.append((key.shape[1], kwargs["enable_gqa"]))
        return attend(query, key, value, **kwargs)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", spy)
    results = []
    for repeats, expected in ((False, (2, True)), (True, (4, False))):
        monkeypatch.setattr(attention, "wants_a_key_per_head", lambda query, repeats=repeats: repeats)
        out = attend_by_run(*states, segments, scaling=0.3)
        results.append([out, *torch.autograd.grad(out, states, upstream)])
        assert set(seen) == {expected}
        seen.clear()
    for shared, repeated in zip(*results, strict=True):
        torch.testing.assert_close(repeated, shared)


@pytest.mark.parametrize("segments", [Segments([5, 20]), SHARED])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_flash_attention_gets_each_token_its_boundaries_and_the_causal_window(
    monkeypatch: pytest.MonkeyPatch, kv_heads: int, segments: Segments
) -> None:
    """On a CPU: by the definition of `torch.nn.attention.varlen.varlen_attn` in the place of its kernel."""

    def varlen_attn(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float,
        window_size: tuple[int, int],
        enable_gqa: bool,
    ) -> Tensor:
        assert query.shape[1:] == (4, 8) and key.shape[1:] == value.shape[1:] == (kv_heads, 8)
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
        assert (window_size, enable_gqa) == ((-1, 0), kv_heads < 4)
        queries, keys = cu_seq_q.diff().tolist(), cu_seq_k.diff().tolist()
        assert (len(query), len(key), max_q, max_k) == (sum(queries), sum(keys), max(queries), max(keys))
        outs, q_end, k_end = [], 0, 0
        for q_length, k_length in zip(queries, keys, strict=True):
            q, k, v = query[q_end : q_end + q_length], *(states[k_end : k_end + k_length] for states in (key, value))
            q_end, k_end = q_end + q_length, k_end + k_length
            # Aligned at the end: queries before the first one are padding.
            padded = torch.cat([q.new_zeros(k_length - q_length, 4, 8), q])
            whole = attend_alone(*(each.transpose(0, 1) for each in (padded, k, v)), [k_length], scale)
            outs.append(whole[k_length - q_length :])
        return torch.cat(outs)

    arguments = set(signature(varlen_attn).parameters)
    assert arguments <= set(signature(attention.varlen_attn).parameters)
    states = random_states(25, kv_heads=kv_heads, dtype=torch.float64)
    by_run, _ = packed_attention(torch.nn.Identity(), *states, None, scaling=0.3, segments=segments)
    monkeypatch.setattr(attention, "varlen_attn", varlen_attn)
    monkeypatch.setattr(attention, "flash_runs", lambda *states: True)
    at_once, _ = packed_attention(torch.nn.Identity(), *states, None, scaling=0.3, segments=segments)
    torch.testing.assert_close(at_once, by_run)


def make_group(prompt: int, responses: Sequence[int], *, prompt_id: int = 0) -> list[Sample]:
    """Samples with the same prompt."""
    samples = make_samples([(prompt, response) for response in responses])
    for index, sample in enumerate(samples):
        sample.prompt_id, sample.sample_index = prompt_id, index
        sample.token_ids[:prompt] = torch.arange(prompt).numpy() + 3 * prompt_id
    return samples


class CopiesBetweenDevices(TorchDispatchMode):
    """Counts the operations on tensors of two devices; on a GPU each waits until the GPU has done all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        devices = {leaf.device for leaf in tree_leaves([args, kwargs, out]) if isinstance(leaf, Tensor)}
        self.count += len(devices) > 1
        return out


@pytest.mark.parametrize("responses", [[4], [4, 6, 3]])
def test_layers_after_the_first_copy_nothing_to_the_device(
    monkeypatch: pytest.MonkeyPatch, responses: list[int]
) -> None:
    """In the place of the GPU: torch's device `meta`, whose tensors have a shape and no numbers."""
    monkeypatch.setattr(attention, "flash_runs", lambda *states: True)
    micro = micro_batch(make_group(5, responses))
    assert bool(micro.inputs.branches) == (len(responses) > 1)
    counts = []
    for layers in (1, 4):
        model = make_model(num_layers=layers)
        checkpoint_activations(model.causal_lm.get_decoder(), every=1)
        model, on_device = model.to("meta"), micro.to(torch.device("meta"))
        with CopiesBetweenDevices() as copies:
            states_before(model.causal_lm.get_decoder(), on_device).sum().backward()
        counts.append(copies.count)
    assert counts[1] == counts[0] > 0


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_shared_prompts_change_neither_log_probs_nor_gradients(entropy_grad: bool) -> None:
    groups = [make_group(6, (5, 1, 9, 5)), make_group(1, (3, 8), prompt_id=1), make_group(4, (7,), prompt_id=2)]
    turn = make_group(5, (9, 9), prompt_id=3)
    for sample in turn:
        sample.response_mask[8:11] = False  # what a tool said
    samples = [sample for group in [*groups, turn] for sample in group]
    found = []
    for batches in ([samples], [[sample] for sample in samples]):
        model = make_model()
        scores = [model(micro_batch(batch), temperature=0.7, entropy_grad=entropy_grad) for batch in batches]
        logprobs = torch.cat([score.logprobs for score in scores])
        entropy = torch.cat([score.entropy for score in scores])
        weights = torch.linspace(-1, 2, len(logprobs))
        (weights * logprobs + (weights**2 * entropy if entropy_grad else 0)).sum().backward()
        found.append([logprobs, entropy, *(parameter.grad for parameter in model.parameters())])
    shared, alone = found
    assert micro_batch(samples).inputs.num_tokens < micro_batch(samples).num_tokens
    largest = max(float(gradient.abs().max()) for gradient in alone[2:])
    for index, (mine, expected) in enumerate(zip(shared, alone, strict=True)):
        torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-6 * (10 if index < 2 else largest))


def test_two_backward_passes_over_shared_prompts_are_bitwise_equal() -> None:
    # Large enough for two threads, which both add to the gradient of the last token of the prompt.
    micro, model, threads = micro_batch(make_group(6, [6] * 256)), make_model(), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        gradients = []
        for _ in range(5):
            model.zero_grad()
            model(micro, temperature=1.0).logprobs.sum().backward()
            gradients.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    finally:
        torch.set_num_threads(threads)
    for again in gradients[1:]:
        assert all(torch.equal(first, other) for first, other in zip(gradients[0], again, strict=True))


def test_a_processor_has_no_flash_attention_for_packed_sequences() -> None:
    assert not attention.flash_runs(*random_states(5, kv_heads=2, dtype=torch.bfloat16))


def test_attention_by_run_is_float32_within() -> None:
    generator = torch.Generator().manual_seed(3)
    states = [torch.randn(1, 2, 24, 8, generator=generator, dtype=torch.bfloat16) for _ in range(3)]
    out = attend_by_run(*states, Segments([16, 8]))
    exact = attend_by_run(*(state.float() for state in states), Segments([16, 8]))
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, exact.to(torch.bfloat16))


@pytest.mark.parametrize("segments", [Segments([5]), Segments([2], [Branch(0, 2, 3)])])
def test_sliding_windows_shorter_than_a_sequence_are_refused(segments: Segments) -> None:
    tensors = [torch.zeros(1, 2, 5, 4) for _ in range(3)]
    with pytest.raises(ValueError, match="5 tokens exceed the model's sliding window of 3"):
        packed_attention(
            torch.nn.Identity(),
            *tensors,
            None,
            segments=segments,
            sliding_window=3,
        )


def test_dropout_is_refused() -> None:
    states, options = random_states(5, kv_heads=4), {"segments": Segments([5])}
    with pytest.raises(ValueError, match=r"no dropout, got 0\.1: put the model into eval mode"):
        packed_attention(torch.nn.Identity(), *states, None, dropout=0.1, **options)
