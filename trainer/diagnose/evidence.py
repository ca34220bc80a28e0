"""A bundle -> some of its responses with their prompts, and both log-probs of their tokens.

A diagnosis scores the same tokens many times, so it takes whole responses up to a number of tokens. R: their response
tokens, one response after the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from algorithms.kl import k3
from rollout.routes import Routes
from trainer.batch.route_tensors import routes_of
from trainer.batch.train_batch import TokenSupports
from trainer.replay.bundle import Bundle, BundleError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Evidence:
    """What was sampled, and what both sides said of it."""

    prompts: list[Tensor]
    """Token ids [P] int64 of the prompt of each response; all are empty without ids in the bundle."""
    responses: list[Tensor]
    """Token ids [L] int64 of each response; all are empty without ids in the bundle."""
    lengths: list[int]
    """Number of tokens of each response."""
    steps: list[int]
    """Number of the step that each response is of, from 0: ascending."""
    engine: Tensor
    """[R] float64: log-probs from the engine, nats."""
    trainer: Tensor
    """[R] float64: log-probs from the trainer with the weights that sampled, nats."""
    mask: Tensor
    """[R] bool: sampled by the model, and with a finite log-prob on both sides."""
    lags: Tensor | None
    """[R] int64: optimizer steps since the weights that sampled the token; None where nobody wrote it down."""
    supports: TokenSupports | None = None
    """[R]: what truncated sampling kept beside each token; None if nothing was truncated, or nobody wrote it down."""
    routes: Sequence[Routes] | None = None
    """The experts that the engine chose for the tokens of each prompt and response; None if nobody wrote them down."""
    num_tokens: int
    """Sampled tokens of the whole bundle."""
    k3: float
    """K3 of the whole bundle, nats per token."""

    @property
    def can_be_read(self) -> bool:
        """True if the bundle has the token ids of prompts and responses."""
        return all(map(len, self.prompts)) and all(map(len, self.responses))

    @property
    def has_old(self) -> bool:
        """True if it is written down that older weights sampled some of the tokens."""
        return self.lags is not None and bool((self.mask & (self.lags > 0)).any())

    def of_responses(self, numbers: Sequence[int], *, most: int) -> Evidence:
        """Some of the responses, in the order of `numbers`, cut to `most` tokens: what comes later changes nothing."""

        def of(values: Tensor) -> Tensor:
            parts = values.split(self.lengths)
            return torch.cat([parts[number][:most] for number in numbers])

        return replace(
            self,
            prompts=[self.prompts[number] for number in numbers],
            responses=[self.responses[number][:most] for number in numbers],
            lengths=[min(most, self.lengths[number]) for number in numbers],
            steps=[self.steps[number] for number in numbers],
            engine=of(self.engine),
            trainer=of(self.trainer),
            mask=of(self.mask),
            lags=None if self.lags is None else of(self.lags),
            supports=None if self.supports is None else self.supports.taken(of(torch.arange(len(self.engine)))),
            routes=self.routes and [self.routes[number] for number in numbers],
        )


def k3_between(engine: Tensor, other: Tensor, mask: Tensor) -> float:
    """K3 of log-probs [R] against the engine's, nats per token, over the tokens of the mask [R] that have both."""
    deltas = (other - engine)[mask]
    deltas = deltas[~deltas.isnan()]
    return float(k3(deltas).mean()) if len(deltas) else 0.0


def evidence_of(bundle: Bundle, *, max_tokens: int) -> Evidence:
    """Responses of `bundle`, evenly chosen among those with a token that counts, with about `max_tokens` such tokens.

    A response is whole unless it alone has more tokens. Raises BundleError if no token has a finite log-prob on both
    sides.
    """
    lengths = bundle.lengths.to(torch.int64)
    engine, trainer = bundle.rollout_logprobs.double(), bundle.old_logprobs.double()
    sampled = torch.ones(len(engine), dtype=torch.bool) if bundle.mask is None else bundle.mask.bool()
    mask = sampled & engine.isfinite() & trainer.isfinite()
    if not bool(mask.any()):
        raise BundleError("no token of the bundle has a finite log-prob on both sides: there is nothing to explain")
    prompts: list[Tensor] = []
    responses: list[Tensor] = []
    if bundle.token_ids is not None and bundle.prompt_ids is not None and bundle.prompt_lengths is not None:
        prompts = list(bundle.prompt_ids.to(torch.int64).split(bundle.prompt_lengths.tolist()))
        responses = list(bundle.token_ids.to(torch.int64).split(lengths.tolist()))
    supports = None
    if bundle.support_sizes is not None and bundle.support_ids is not None:
        supports = TokenSupports(bundle.support_sizes, bundle.support_ids)
    whole = Evidence(
        prompts=prompts or [torch.empty(0, dtype=torch.int64)] * len(lengths),
        responses=responses or [torch.empty(0, dtype=torch.int64)] * len(lengths),
        lengths=lengths.tolist(),
        steps=[0] * len(lengths),
        engine=engine,
        trainer=trainer,
        mask=mask,
        lags=bundle.lags(),
        supports=supports,
        routes=routes_of(dict(bundle.tensors())),
        num_tokens=int(mask.sum()),
        k3=k3_between(engine, trainer, mask),
    )
    counted = torch.stack([each.sum() for each in mask.split(lengths.tolist())])
    return whole.of_responses(_chosen(counted, max_tokens=max_tokens), most=max_tokens)


def pooled(steps: Sequence[Evidence]) -> Evidence:
    """The evidence of several steps as one."""
    if len(steps) == 1:
        return steps[0]

    def joined(name: str) -> Any:
        return list(itertools.chain.from_iterable(getattr(each, name) for each in steps))

    tokens = sum(each.num_tokens for each in steps)
    lags = [each.lags for each in steps if each.lags is not None]
    supports = [each.supports or _whole(len(each.engine)) for each in steps]
    is_cut = any(each.supports is not None for each in steps)
    return Evidence(
        prompts=joined("prompts"),
        responses=joined("responses"),
        lengths=joined("lengths"),
        steps=[number for number, each in enumerate(steps) for _ in each.lengths],
        engine=torch.cat([each.engine for each in steps]),
        trainer=torch.cat([each.trainer for each in steps]),
        mask=torch.cat([each.mask for each in steps]),
        lags=torch.cat(lags) if len(lags) == len(steps) else None,
        supports=TokenSupports(*map(torch.cat, zip(*supports, strict=True))) if is_cut else None,
        routes=joined("routes") if all(each.routes is not None for each in steps) else None,
        num_tokens=tokens,
        k3=sum(each.k3 * each.num_tokens for each in steps) / tokens,
    )


def _whole(count: int) -> TokenSupports:
    """Of tokens that were drawn from the whole vocabulary."""
    return TokenSupports(torch.zeros(count, dtype=torch.int32), torch.zeros(0, dtype=torch.int32))


def _chosen(counted: Tensor, *, max_tokens: int) -> list[int]:
    """Numbers of evenly spaced responses, in order; `counted` [N] are their tokens that count."""
    there = [number for number, tokens in enumerate(counted.tolist()) if tokens]
    total = int(counted.sum())
    count = len(there) if total <= max_tokens else max(1, round(len(there) * max_tokens / total))
    return [there[place * len(there) // count] for place in range(count)]
