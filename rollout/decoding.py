"""Batched sampling with a key/value cache: (transformers model, GenerateRequests) -> Generations.

The arithmetic of `rollout/torch_engine.py`. The response to a request depends on its prompt, its seed and the
weights; the requests beside it only move the last bits of the logits.

B: rows of a batch, U: distinct prompts among them, P: padded prompt length, R: response tokens, V: vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from rollout.hf import PreTrainedModel
from rollout.types import FinishReason, GenerateRequest, Generation


def sample_tokens(logits: Tensor, *, temperature: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting the cumulative distribution; also its log-prob.

    logits [B, V]; temperature [B] float32, 0 for greedy; uniforms [B] float64 in [0, 1). Returns token ids [B] int64
    and log-probs [B] float32: log_softmax(logits / temperature), for greedy rows of the untempered distribution.
    A row with a NaN logit yields a NaN log-prob.
    """
    greedy = temperature == 0
    scaled = logits.float() / torch.where(greedy, 1.0, temperature)[:, None]
    logprobs = torch.log_softmax(scaled, dim=-1)
    # float64: near 1, float32 numbers are 6e-8 apart, which is more than a rare token's share.
    cumulative = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
    # A draw is at most 1 - 2^-53, so the product stays below the total also after rounding, and a token without
    # probability at the upper end is never chosen.
    target = uniforms * cumulative[:, -1]
    sampled = torch.searchsorted(cumulative, target[:, None], right=True).squeeze(-1)
    tokens = torch.where(greedy, scaled.argmax(dim=-1), sampled.clamp(max=logits.shape[-1] - 1))
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1)


def decode(
    model: PreTrainedModel, requests: Sequence[GenerateRequest], *, policy_version: int, deadline: float
) -> list[Generation]:
    """Sample all requests as one batch, each to its stop token or its limit; results in the order of the requests.

    Call under `torch.inference_mode()`. `deadline` is a time.monotonic() value, looked at before every token;
    raises TimeoutError saying how far the batch had come.
    """
    rows, cache, logits = _prefill(model, requests)
    shape = rows.uniforms.shape
    responses = _Responses(
        tokens=torch.zeros(shape, dtype=torch.int64, device=logits.device),
        logprobs=torch.zeros(shape, dtype=torch.float32, device=logits.device),
        length=rows.limit.clone(),
        stopped=torch.zeros_like(rows.ended),
    )
    for step in range(shape[1]):
        if time.monotonic() > deadline:
            unfinished = int((~rows.ended).sum())
            raise TimeoutError(f"{unfinished} of {len(requests)} responses were unfinished after {step} tokens")
        tokens, logprobs = sample_tokens(logits, temperature=rows.temperature, uniforms=rows.uniforms[:, step])
        responses.tokens[rows.row, step] = tokens
        responses.logprobs[rows.row, step] = logprobs
        stopped = (tokens[:, None] == rows.stop).any(dim=-1) & ~rows.ended
        responses.length[rows.row[stopped]] = step + 1
        responses.stopped[rows.row[stopped]] = True
        rows.ended = rows.ended | stopped | (rows.limit <= step + 1)
        num_ended = int(rows.ended.sum())
        if num_ended == len(tokens):
            break
        if 2 * num_ended >= len(tokens):
            # Half of the rows is the least that pays: the cache of the others has to be copied.
            alive = (~rows.ended).nonzero().squeeze(-1)
            rows, tokens = rows.select(alive), tokens[alive]
            cache.batch_select_indices(alive)
        logits = _next_logits(model, tokens[:, None], rows, cache, num_decoded=step + 1)
    return responses.generations(policy_version)


@dataclass(kw_only=True, slots=True)
class _Rows:
    """What the sequences still being decoded need, one row each; rows leave when their sequence has ended."""

    row: Tensor
    """[B] int64, position in the batch of requests."""
    temperature: Tensor
    """[B] float32."""
    limit: Tensor
    """[B] int64, max_new_tokens."""
    stop: Tensor
    """[B, S] int64, stop token ids, -1 where a row has fewer."""
    uniforms: Tensor
    """[B, R] float64, all draws of a sample, fixed by its seed alone."""
    prompt_length: Tensor
    """[B] int64."""
    prompt_mask: Tensor
    """[B, P] int64, 0 on the padding left of a prompt."""
    ended: Tensor
    """[B] bool."""

    def select(self, index: Tensor) -> _Rows:
        return _Rows(
            row=self.row[index],
            temperature=self.temperature[index],
            limit=self.limit[index],
            stop=self.stop[index],
            uniforms=self.uniforms[index],
            prompt_length=self.prompt_length[index],
            prompt_mask=self.prompt_mask[index],
            ended=self.ended[index],
        )


@dataclass(kw_only=True, slots=True)
class _Responses:
    """Everything sampled for a batch; entries from `length` on are meaningless."""

    tokens: Tensor
    """[B, R] int64."""
    logprobs: Tensor
    """[B, R] float32."""
    length: Tensor
    """[B] int64."""
    stopped: Tensor
    """[B] bool: ended by a stop token, not by its limit."""

    def generations(self, policy_version: int) -> list[Generation]:
        columns = (self.tokens, self.logprobs, self.length, self.stopped)
        return [
            Generation(
                token_ids=tokens[:length],
                logprobs=logprobs[:length],
                policy_version=policy_version,
                finish_reason=FinishReason.stop if stopped else FinishReason.length,
            )
            for tokens, logprobs, length, stopped in zip(*(column.tolist() for column in columns), strict=True)
        ]


def _prefill(model: PreTrainedModel, requests: Sequence[GenerateRequest]) -> tuple[_Rows, DynamicCache, Tensor]:
    """Run every distinct prompt once; returns the rows, their cache and next-token logits [B, V]."""
    distinct: dict[tuple[int, ...], int] = {}
    index = [distinct.setdefault(tuple(request.prompt_token_ids), len(distinct)) for request in requests]
    width = max(len(prompt) for prompt in distinct)
    # Padding goes left, so that the newest token of every row is in the last column. Its id does not matter.
    token_ids = [[0] * (width - len(prompt)) + list(prompt) for prompt in distinct]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in distinct]
    token_ids_U = torch.tensor(token_ids, device=model.device)
    mask_U = torch.tensor(mask, device=model.device)
    rows_B = torch.tensor(index, device=model.device)
    cache = DynamicCache(config=model.config)
    logits_U = model(
        input_ids=token_ids_U,
        attention_mask=mask_U,
        position_ids=(mask_U.cumsum(dim=-1) - 1).clamp(min=0),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits[:, -1]
    if len(distinct) < len(requests):
        cache.batch_select_indices(rows_B)
    return _make_rows(requests, prompt_mask=mask_U[rows_B]), cache, logits_U[rows_B]


def _make_rows(requests: Sequence[GenerateRequest], *, prompt_mask: Tensor) -> _Rows:
    device = prompt_mask.device
    samplings = [request.sampling for request in requests]
    uniforms = torch.zeros(len(requests), max(s.max_new_tokens for s in samplings), dtype=torch.float64)
    # On the CPU whatever the device is, so that a seed means the same draws everywhere.
    generator = torch.Generator()
    for row, sampling in enumerate(samplings):
        generator.manual_seed(sampling.seed)
        draws = torch.rand(sampling.max_new_tokens, generator=generator, dtype=torch.float64)
        uniforms[row, : sampling.max_new_tokens] = draws
    widest = max(len(s.stop_token_ids) for s in samplings)
    stop = [[*s.stop_token_ids, *([-1] * (widest - len(s.stop_token_ids)))] for s in samplings]
    return _Rows(
        row=torch.arange(len(requests), device=device),
        temperature=torch.tensor([s.temperature for s in samplings], dtype=torch.float32, device=device),
        limit=torch.tensor([s.max_new_tokens for s in samplings], device=device),
        stop=torch.tensor(stop, dtype=torch.int64, device=device).view(len(requests), widest),
        uniforms=uniforms.to(device),
        prompt_length=prompt_mask.sum(dim=-1),
        prompt_mask=prompt_mask,
        ended=torch.zeros(len(requests), dtype=torch.bool, device=device),
    )


def _next_logits(
    model: PreTrainedModel, tokens: Tensor, rows: _Rows, cache: DynamicCache, *, num_decoded: int
) -> Tensor:
    """Feed the newest token [B, 1] of every row; returns next-token logits [B, V]."""
    decoded = rows.prompt_mask.new_ones(len(tokens), num_decoded)
    logits: Tensor = model(
        input_ids=tokens,
        attention_mask=torch.cat([rows.prompt_mask, decoded], dim=-1),
        position_ids=(rows.prompt_length + num_decoded - 1)[:, None],
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits[:, -1]
    return logits
