"""The batch from the driver to the ranks: TrainBatch -> a RankMiniBatch per rank and optimizer step -> MicroBatch.

`trainer/batch/packing.py` builds the batch and `trainer/policy/step.py` consumes it; the policy's forward adds
TokenScores. T: packed tokens, N: sequences, R: response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from algorithms.tokens import Tokens
from rollout.routes import Routes


class Branch(NamedTuple):
    """Tokens of one sequence after a prompt that other sequences share. All counts are in tokens."""

    prompt_start: int
    """First token of the prompt among the inputs of the decoder."""
    prompt_length: int
    length: int


class DecoderInputs(NamedTuple):
    """The tokens that the decoder computes for a micro-batch: a prompt that several sequences share comes once.

    The roots come first, end to end: whole sequences, and shared prompts. The branches follow, end to end: the rest of
    each sequence whose prompt is shared. A token attends to its own root, or to the prompt of its branch and its own
    branch. I: tokens of roots and branches.
    """

    token_ids: Tensor
    """[I] int64."""
    position_ids: Tensor
    """[I] int64, position of each token in its sequence."""
    source: Tensor
    """[I] int64, the packed token that each of them is, of a shared prompt that of the first sequence."""
    before_response: Tensor
    """[R] int64, index into the I tokens of the token from which each response token is predicted."""
    roots: list[int]
    """Tokens of each root."""
    branches: list[Branch]

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.numel())

    def to(self, device: torch.device) -> DecoderInputs:
        """The same inputs with every tensor on `device`."""
        return self._replace(
            token_ids=self.token_ids.to(device),
            position_ids=self.position_ids.to(device),
            source=self.source.to(device),
            before_response=self.before_response.to(device),
        )


class TokenSupports(NamedTuple):
    """The supports of R tokens (`algorithms/truncation.py`), end to end. K: kept tokens of all of them."""

    sizes: Tensor
    """[R] int32, number of kept tokens; 0 for the whole vocabulary."""
    token_ids: Tensor
    """[K] int32, ids of the kept tokens, K = sum of sizes."""

    def to(self, device: torch.device) -> TokenSupports:
        return TokenSupports(self.sizes.to(device), self.token_ids.to(device))

    def taken(self, places: Tensor) -> TokenSupports:
        """The supports of the tokens at `places` [P]."""
        starts = self.sizes.cumsum(0) - self.sizes
        sizes = self.sizes[places]
        shift = starts[places] - (sizes.cumsum(0) - sizes)
        index = torch.arange(int(sizes.sum()), device=sizes.device) + shift.repeat_interleave(sizes)
        return TokenSupports(sizes, self.token_ids[index])


@dataclass(kw_only=True, slots=True)
class MicroBatch:
    """One forward of concatenated sequences. Index t of every [T] tensor describes token t."""

    token_ids: Tensor
    """[T] int64."""
    cu_seqlens: Tensor
    """[N+1] int32, first token of each sequence; the last entry is T."""
    inputs: DecoderInputs
    """What the decoder computes for these sequences."""
    response_index: Tensor
    """[R] int64, positions where response_mask is True, ascending."""
    response_mask: Tensor
    """[T] bool, True where pi_rollout sampled the token."""
    rollout_logprobs: Tensor
    """[T] float32, 0 off the mask."""
    sample_keys: list[tuple[int, int]]
    """[N] (prompt_id, sample_index) of each sequence; empty if the micro-batch holds no sample."""
    sample_numbers: Tensor
    """[N] int64, position of each sequence in `StepSamples`; 0 where the micro-batch holds no sample."""
    supports: TokenSupports | None = None
    """What truncated sampling kept beside each response token; None if all come from the whole vocabulary."""
    routes: tuple[Routes, ...] | None = None
    """[N] routes of the tokens of each sequence, on the host; None if the trainer chooses the experts."""
    advantages: Tensor | None = None
    """[T] float32, 0 off the mask, set by the worker before the first update (`trainer/policy/advantages.py`)."""
    token_lags: Tensor | None = None
    """[T] int64, optimizer steps between the weights that sampled a token and the weights at the start of the step, 0
    off the mask; None if the tokens of every response have the same lag, which `StepSamples.lags` holds."""
    old_logprobs: Tensor | None = None
    """[T] float32, log pi_old, set by the worker if a separate forward computes it."""
    ref_logprobs: Tensor | None = None
    """[T] float32, log pi_ref, set by the worker if there is a reference policy."""
    old_values: Tensor | None = None
    """[T] float32, values before the first update of the step in units of reward, set by the critic."""
    returns: Tensor | None = None
    """[T] float32, targets of the values, in units of reward, set by the critic."""

    def numbers(self) -> list[int]:
        """[N] `sample_numbers` as ints, empty where the micro-batch holds no sample; reads the device."""
        return self.sample_numbers.tolist()[: len(self.sample_keys)]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as arrays, which Ray passes on without a copy; torch would write each tensor to a file first."""
        values = [getattr(self, each.name) for each in fields(self)]
        return _received, ([_as_array(value) for value in values],)

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.numel())

    def tokens(self, trainer_logprobs: Tensor) -> Tokens:
        """The record of both engines' log-probs, with `Tokens.trainer_logprobs` [T]."""
        return Tokens(
            trainer_logprobs=trainer_logprobs,
            rollout_logprobs=self.rollout_logprobs,
            response_mask=self.response_mask,
            cu_seqlens=self.cu_seqlens,
            advantages=self.advantages,
        )

    def to(self, device: torch.device) -> MicroBatch:
        """The same micro-batch with every tensor on `device`."""
        supports = None if self.supports is None else self.supports.to(device)
        return replace(self, inputs=self.inputs.to(device), supports=supports, **_tensors_on(device, self))


def present(tensor: Tensor | None, name: str) -> Tensor:
    """A tensor of a micro-batch that the worker sets; RuntimeError with its `name` if it is read before."""
    if tensor is None:
        raise RuntimeError(f"{name} of a micro-batch must be set before the first update, and is read already")
    return tensor


def _tensors_on(device: torch.device, record: MicroBatch | StepSamples) -> dict[str, Any]:
    """The tensors of `record` on `device`, by field."""
    values = {each.name: getattr(record, each.name) for each in fields(record)}
    return {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}


def _as_array(value: Any) -> Any:
    """A tensor as an array, the fields of a record one by one; anything else as it is."""
    if isinstance(value, DecoderInputs | TokenSupports):
        return type(value)(*(_as_array(each) for each in value))
    return value.cpu().numpy() if isinstance(value, Tensor) else value


def _as_tensor(value: Any) -> Any:
    """A copy of an array as a tensor, because Ray's arrays are read-only, as `_as_array`; anything else as it is."""
    if isinstance(value, DecoderInputs | TokenSupports):
        return type(value)(*(_as_tensor(each) for each in value))
    return torch.from_numpy(np.array(value)) if isinstance(value, np.ndarray) else value


def _received(values: Sequence[Any]) -> MicroBatch:
    """A micro-batch from the values of `MicroBatch.__reduce__`."""
    known = {each.name: _as_tensor(value) for each, value in zip(fields(MicroBatch), values, strict=True)}
    return MicroBatch(**known)


class TokenScores(NamedTuple):
    """The policy's scores of a micro-batch's tokens."""

    logprobs: Tensor
    """[T] float32, log pi_theta at the sampling temperature; 0 off the response mask."""
    entropy: Tensor
    """[T] float32, nats, with a gradient only if requested; 0 off the response mask."""
    floor_delta: Tensor | None
    """[F] float64, log-prob with the engine's head arithmetic minus the exact one, on the same hidden states."""
    route_counts: Tensor | None = None
    """[4] float64, see `Replay.counts` in trainer/scoring/routing_replay.py; None without routes."""


class FewScores(NamedTuple):
    """Log-probs of some tokens of a micro-batch, scored once more in another way. P: these tokens."""

    places: Tensor
    """[P] int64, positions of the tokens among those of the micro-batch."""
    logprobs: Tensor
    """[P] float32, nats, at the sampling temperature."""


@dataclass(kw_only=True, slots=True)
class RankMiniBatch:
    """A rank's part of a mini-batch, on which every pass takes one optimizer step. The counts are those of the whole
    mini-batch: the denominators of the loss."""

    micro_batches: list[MicroBatch]
    """Every rank has the same number, so that collectives match."""
    num_response_tokens: int
    """Response tokens over all ranks, before any rejection."""
    num_sequences: int
    """Responses over all ranks."""


def pass_order(minis: Sequence[RankMiniBatch], *, number: int, seed: int, step: int) -> list[RankMiniBatch]:
    """The mini-batches in the order of pass `number` (from 0) over the rollout of `step`.

    The first pass keeps the order of `minis`, a later one shuffles them. The shuffle depends on `seed` (run.seed),
    `step` and `number` alone, so that it is the same on every rank and in a run that was resumed.
    """
    if number == 0:
        return list(minis)
    bits = np.random.PCG64(np.random.SeedSequence([seed, step, number]))
    return [minis[index] for index in np.random.Generator(bits).permutation(len(minis))]


@dataclass(kw_only=True, slots=True)
class StepSamples:
    """Per-sample facts of a rollout step, all ranks. S: samples."""

    rewards: Tensor
    """[S] float32, rewards from which advantages are computed."""
    group_ids: Tensor
    """[S] int64, equal within a group."""
    num_tokens: Tensor
    """[S] int64, response tokens."""
    lags: Tensor
    """[S] int64, optimizer steps between the weights that sampled and the weights at the start of the step."""

    def to(self, device: torch.device) -> StepSamples:
        """The same samples with every tensor on `device`."""
        return replace(self, **_tensors_on(device, self))


@dataclass(kw_only=True, slots=True)
class PackingStats:
    """Quality of the packing of a step's samples."""

    num_micro_batches: int
    """Forwards of one rank, over all mini-batches."""
    num_tokens: int
    """Tokens of all ranks that the decoder computes, prompts included."""
    num_shared: int
    """Prompt tokens of all ranks that are not computed again, because another sequence of the micro-batch has the same
    prompt."""
    fill_frac: float
    """Computed tokens / (micro-batches of all ranks x cap)."""
    imbalance: float
    """Estimated FLOPs of the most expensive rank / mean over ranks - 1, all mini-batches together: what
    `trainer/batch/planner.py` evens out, not tokens."""

    def metrics(self) -> dict[str, float | None]:
        return {
            "perf/microbatches": float(self.num_micro_batches),
            "perf/train_tokens": float(self.num_tokens),
            "perf/train_tokens_shared": float(self.num_shared),
            "perf/fill_frac": self.fill_frac,
            "perf/dp_imbalance": self.imbalance,
        }


@dataclass(kw_only=True, slots=True)
class TrainBatch:
    """A rollout step, packed for all ranks."""

    ranks: list[list[RankMiniBatch]]
    """[num_ranks][mini-batches]."""
    samples: StepSamples
    """Facts of all samples; every rank gets all of them."""
    stats: PackingStats
