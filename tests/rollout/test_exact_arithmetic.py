"""rollout/exact: a row has the same bits alone and in any company, at any place, with any number of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tiny_model import UNBIASED, write_tiny_model
from torch import nn
from torch.nn.functional import linear, scaled_dot_product_attention
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

from rollout.exact import attention, products
from rollout.exact.activations import sigmoid, silu
from rollout.exact.attention import attend, num_columns
from rollout.exact.experts import mixed
from rollout.exact.layers import exact_problems, log_softmax, make_exact
from rollout.torch.decoding import Batch
from rollout.torch.kv_cache import SLOT_ATTENTION
from rollout.torch.model import Decoder, ExactDecoder
from rollout.types import GenerateRequest, SamplingParams

SHAPES = ((576, 576), (576, 192), (576, 1536), (1536, 576), (64, 67), (96, 100), (16, 576), (64, 1))
"""(inputs, outputs): SmolLM2's, some that no vector register divides, and the gate of a shared expert."""


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_a_row_of_a_product_has_the_same_bits_in_any_company(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    rows, weight = drawn(70, inputs).to(dtype), drawn(outputs, inputs, seed=1).to(dtype)
    bias = drawn(outputs, seed=2).to(dtype)
    whole = products.product(rows, weight, bias)
    assert torch.allclose(whole.float(), linear(rows, weight, bias).float(), atol=1e-3 if dtype == torch.float32 else 1)
    generator = torch.Generator().manual_seed(3)
    shifted = torch.empty(weight.numel() + 3, dtype=dtype)[3:].view_as(weight).copy_(weight)
    for count, number in ((1, 1), (2, 2), (3, 31), (1, 32), (2, 33), (3, 70)):
        chosen = torch.randperm(70, generator=generator)[:number]
        with threads(count):
            assert torch.equal(products.product(rows[chosen], weight, bias), whole[chosen])
            assert torch.equal(products.product(rows[chosen], shifted, bias), whole[chosen]), "other addresses"
    assert products.product(rows[:0], weight).shape == (0, outputs)


def test_gradients_of_products_and_activation_are_the_usual_ones() -> None:
    states, layer = drawn(2, 5, 64).requires_grad_(), nn.Linear(64, 48)
    usual = torch.autograd.grad(
        nn.functional.silu(layer(states)).square().sum(), (states, layer.weight, layer.bias), retain_graph=True
    )
    layer.__class__ = products.Linear
    exact = torch.autograd.grad(silu(layer(states)).square().sum(), (states, layer.weight, layer.bias))
    for found, expected in zip(exact, usual, strict=True):
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("ours", "usual"), [(silu, nn.functional.silu), (sigmoid, torch.sigmoid)])
def test_an_activation_has_the_same_bits_at_every_place(
    ours: Callable[[torch.Tensor], torch.Tensor], usual: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """torch's own has others at the end of a float32 tensor: then this test would not be needed."""
    values = drawn(37) * 5
    alone = torch.cat([ours(value[None]) for value in values])
    for size in (37, 38, 100, 1001, 40_003):
        repeated = values.repeat(size // len(values) + 1)[:size]
        assert torch.equal(ours(repeated), alone.repeat(size // len(values) + 1)[:size])
    assert torch.allclose(alone, usual(values), atol=1e-6)
    ends = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4], requires_grad=True)
    assert torch.allclose(ours(ends), usual(ends), atol=1e-6)
    found, expected = (torch.autograd.grad(each(ends).sum(), ends)[0] for each in (ours, usual))
    assert torch.allclose(found, expected, atol=1e-6)
    assert ours(values.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("number", "per_token", "hidden", "inner"), [(16, 4, 128, 96), (64, 8, 576, 100), (4, 1, 64, 33)]
)
def test_a_token_of_a_mixture_has_the_same_bits_in_any_company(
    number: int, per_token: int, hidden: int, inner: int, dtype: torch.dtype
) -> None:
    states = drawn(150, hidden).to(dtype)
    gate_up, down = (
        drawn(number, 2 * inner, hidden, seed=1).to(dtype) / 8,
        drawn(number, hidden, inner, seed=2).to(dtype) / 8,
    )
    weights, chosen = drawn(150, number, seed=3).softmax(-1).topk(per_token)
    whole = mixed(states, chosen, weights, gate_up, down)
    usual = torch.zeros(150, hidden)
    for token, (experts, shares) in enumerate(zip(chosen, weights, strict=True)):
        for expert, share in zip(experts, shares, strict=True):
            gate, up = linear(states[token].float(), gate_up[expert].float()).chunk(2)
            usual[token] += share * linear(nn.functional.silu(gate) * up, down[expert].float())
    assert torch.allclose(
        whole.float(), usual, rtol=0.02, atol=(1e-5 if dtype == torch.float32 else 0.02) * float(usual.abs().max())
    )
    generator = torch.Generator().manual_seed(4)
    for count, size in ((1, 1), (2, 2), (3, 40), (1, 150)):
        some = torch.randperm(150, generator=generator)[:size]
        order = torch.randperm(per_token, generator=generator)
        with threads(count):
            found = mixed(states[some], chosen[some][:, order], weights[some][:, order], gate_up, down)
        assert torch.equal(found, whole[some])


def test_every_expert_gets_a_gradient_without_any_token() -> None:
    """Ranks with an empty micro-batch reduce their gradients with the others."""
    parts = [drawn(0, 8), drawn(4, 6, 8), drawn(4, 8, 3)]
    states, gate_up, down = (part.requires_grad_() for part in parts)
    out = mixed(states, torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2), gate_up, down)
    assert out.shape == (0, 8)
    for grad, part in zip(torch.autograd.grad(out.sum(), parts), parts, strict=True):
        assert torch.equal(grad, torch.zeros_like(part))


@pytest.mark.parametrize("vocab", [67, 49_152, 151_936])
def test_a_row_of_log_softmax_has_the_same_bits_alone(vocab: int) -> None:
    logits = drawn(20, vocab) * 3
    whole = log_softmax(logits)
    assert torch.allclose(whole, torch.log_softmax(logits, dim=-1), atol=2e-5)
    for count in (1, 2, 3):
        with threads(count):
            for first, last in ((0, 1), (7, 8), (3, 5), (0, 19)):
                assert torch.equal(log_softmax(logits[first:last].clone()), whole[first:last])


def heads(
    num_sequences: int, length: int, *, num_heads: int = 6, num_kv: int = 2, size: int = 16
) -> list[torch.Tensor]:
    """Query [M, H, L, D], key and value [M, K, C, D]: what is behind the sequence is not zero."""
    query = drawn(num_sequences, num_heads, length, size, seed=4)
    return [query, *(drawn(num_sequences, num_kv, num_columns(length), size, seed=seed) for seed in (5, 6))]


@pytest.mark.parametrize("size", [16, 20, 64])
def test_attention_is_causal_attention(size: int) -> None:
    query, key, value = heads(3, 45, size=size)
    out = attend(query, key, value, torch.arange(45).expand(3, -1), scaling=0.3)
    expected = scaled_dot_product_attention(
        query.double(), key[:, :, :45].double(), value[:, :, :45].double(), is_causal=True, scale=0.3, enable_gqa=True
    )
    assert torch.allclose(out.double(), expected.transpose(1, 2), atol=1e-5)


@pytest.mark.parametrize("size", [16, 20, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_attends_with_the_same_bits_in_prefill_decoding_and_training(size: int, dtype: torch.dtype) -> None:
    query, key, value = (states.to(dtype) for states in heads(40, 70, size=size))
    positions = torch.arange(70).expand(40, -1)
    whole = attend(query, key, value, positions, scaling=None)
    for count in (1, 2, 3):
        with threads(count):
            for place in (0, 1, 31, 32, 69):  # decoding: one query, as many columns as it needs, other sequences
                room, some = num_columns(place + 1), slice(0, 40, 7 + place)
                one = attend(
                    query[some, :, place : place + 1],
                    key[some, :, :room],
                    value[some, :, :room],
                    positions[some, place : place + 1],
                    scaling=None,
                )
                assert torch.equal(one[:, 0], whole[some, place])
            rest = attend(query[5:6, :, 50:], key[5:6], value[5:6], positions[5:6, 50:], scaling=None)
            assert torch.equal(rest[0], whole[5, 50:]), "a branch behind its prompt"
            first = attend(query[5:6, :, :33], key[5:6, :, :64], value[5:6, :, :64], positions[5:6, :33], scaling=None)
            assert torch.equal(first[0], whole[5, :33]), "a shorter prompt"


def test_long_sequences_are_computed_in_parts_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = heads(2, 300)
    positions = torch.arange(300).expand(2, -1)
    whole = attend(query, key, value, positions, scaling=None)
    queries, keys, values = (states.repeat(150, 1, 1, 1) for states in (query, key, value))
    many = attend(queries, keys, values, positions[:1].expand(300, -1), scaling=None)
    assert torch.equal(many[:2], whole), "sequence by sequence, and tile by tile"
    monkeypatch.setattr(attention, "SCORE_ELEMENTS", 8 * 320 * 3)
    assert torch.equal(attend(query, key, value, positions, scaling=None), whole)


def exact_model(path: Path, dtype: torch.dtype) -> nn.Module:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=SLOT_ATTENTION).eval()
    make_exact(model)
    return model.requires_grad_(False)


def requests(count: int, *, seed: int) -> list[GenerateRequest]:
    """Prompts of 1 to 60 tokens, some of them several times."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        length, new = (int(torch.randint(1, 60, (), generator=generator)) for _ in range(2))
        prompt = torch.randint(67, (length,), generator=generator).tolist()
        for index in range(1 + number % 3):
            sampling = SamplingParams(temperature=0.8, max_new_tokens=new, seed=97 * number + index)
            found.append(
                GenerateRequest(prompt_id=number, sample_index=index, prompt_token_ids=prompt, sampling=sampling)
            )
    return found


def sampled(
    decoder: Decoder, asked: list[GenerateRequest], *, num_slots: int, renew_after: int = 0
) -> dict[int, tuple[list[int], list[float]]]:
    """Ticket -> tokens and log-probs; after so many tokens every sequence is read again."""
    with torch.inference_mode():
        batch = Batch(decoder, num_slots=num_slots, policy_version=0)
        batch.add(range(len(asked)), asked)
        found: dict[int, tuple[list[int], list[float]]] = {}
        turns = 0
        while batch.num_active or batch.num_waiting:
            for ticket, generation in batch.advance():
                assert generation.logprobs is not None
                found[ticket] = (generation.token_ids, generation.logprobs)
            turns += 1
            if turns == renew_after:
                batch.renew(decoder, 0)
        return found


@pytest.mark.parametrize(
    ("model_type", "dtype"),
    [
        *((model_type, torch.bfloat16) for model_type in ("qwen2", "qwen3", "llama", *UNBIASED)),
        ("qwen2", torch.float32),
        ("qwen2_moe", torch.float32),
    ],
)
def test_a_response_does_not_depend_on_the_others(tmp_path: Path, model_type: str, dtype: torch.dtype) -> None:
    """One request at a time, all at once, and read again in the middle: same tokens, same log-probs."""
    write_tiny_model(tmp_path, model_type=model_type)
    decoder, asked = ExactDecoder(exact_model(tmp_path, dtype)), requests(5, seed=1)
    with threads(1):
        alone = sampled(decoder, asked, num_slots=1)
    for num_slots, renewed, count in ((3, 0, 2), (64, 20, 2), (64, 0, 3)):
        with threads(count):
            assert sampled(decoder, asked, num_slots=num_slots, renew_after=renewed) == alone


def test_without_exact_arithmetic_company_changes_bits(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation=SLOT_ATTENTION)
    decoder, asked = Decoder(model.eval()), requests(12, seed=1)
    assert sampled(decoder, asked, num_slots=1) != sampled(decoder, asked, num_slots=64)


def test_what_has_no_exact_form_is_named() -> None:
    small = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "vocab_size": 10,
    }  # fmt: skip
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with torch.device("meta"):
        gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=10))
        gelu = Qwen2ForCausalLM(Qwen2Config(**small, hidden_act="gelu"))
        dynamic = Qwen2ForCausalLM(Qwen2Config(**small, rope_parameters=rope))
    assert any("Conv1D" in problem for problem in exact_problems(gpt2))
    assert any("LayerNorm" in problem for problem in exact_problems(gpt2))
    [problem] = exact_problems(gelu)
    assert problem == "GELUActivation (model.layers.0.mlp.act_fn)"
    [problem] = exact_problems(dynamic)
    assert problem.startswith("rope_type=dynamic")
    with pytest.raises(ValueError, match=r"rollout.exact=true has no exact form of GELUActivation \(model"):
        make_exact(gelu)
