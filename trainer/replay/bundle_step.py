"""A bundle -> the step that `trainer/replay/score.py` scores, and a dump -> a bundle.

One rank, one optimizer step. A response stands behind one token that takes the place of its prompt, because a packed
sequence begins with a token that nobody sampled. T: packed tokens, R: response tokens, N: responses.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rollout.routes import Routes
from trainer.batch.route_tensors import route_tensors
from trainer.batch.train_batch import DecoderInputs, MicroBatch, RankMiniBatch, StepSamples, TokenScores
from trainer.config.train import TrainConfig
from trainer.replay.bundle import Bundle
from trainer.replay.recorded import RecordedMini, RecordedStep
from trainer.rundir.dump import DumpDescription

MICRO_TOKENS = 1 << 17
"""Tokens that are scored at a time; a longer response comes alone."""
_NO_INPUTS = DecoderInputs(
    token_ids=torch.empty(0, dtype=torch.int64),
    position_ids=torch.empty(0, dtype=torch.int64),
    source=torch.empty(0, dtype=torch.int64),
    before_response=torch.empty(0, dtype=torch.int64),
    roots=[],
    branches=[],
)
"""Nothing is computed from the tokens of a bundle: it holds their log-probs."""


def step_of(bundle: Bundle) -> RecordedStep:
    """The step, on the host. Advantages are 0 where the bundle has none."""
    lengths = bundle.lengths.to(torch.int64)
    mask = torch.ones(int(lengths.sum()), dtype=torch.bool) if bundle.mask is None else bundle.mask.bool()
    lags = bundle.lags()
    if lags is None:  # nobody knows
        lags = torch.zeros(len(mask), dtype=torch.int64)
    owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    samples = StepSamples(
        rewards=torch.zeros(len(lengths)) if bundle.rewards is None else bundle.rewards.float(),
        group_ids=torch.arange(len(lengths)) if bundle.groups is None else bundle.groups.to(torch.int64),
        num_tokens=torch.zeros(len(lengths), dtype=torch.int64).index_add(0, owner, mask.long()),
        # Its oldest token, as a run counts it.
        lags=torch.zeros(len(lengths), dtype=torch.int64).scatter_reduce(0, owner, lags * mask, "amax"),
    )
    micros: list[MicroBatch] = []
    scores: list[TokenScores] = []
    for first, last in _parts(lengths.tolist()):
        micro, score = _micro(bundle, lengths, mask, lags, samples, first, last)
        micros.append(micro)
        scores.append(score)
    mini = RankMiniBatch(
        micro_batches=micros, num_response_tokens=int(samples.num_tokens.sum()), num_sequences=len(lengths)
    )
    return RecordedStep(ranks=[[RecordedMini(mini=mini, scores=scores)]], samples=samples)


def bundle_of(
    step: RecordedStep, description: DumpDescription, config: TrainConfig, *, with_routes: bool = True
) -> Bundle:
    """The first optimizer step of a dump on every rank, as a bundle: later ones have no log-probs of the start."""
    parts: dict[str, list[Tensor]] = defaultdict(list)
    routes: list[Routes] = []
    firsts = [rank[0] for rank in step.ranks]
    pairs = [pair for each in firsts for pair in zip(each.mini.micro_batches, each.scores, strict=True)]
    for micro, scores in pairs:
        if not micro.sample_keys:
            continue
        old = scores.logprobs if micro.old_logprobs is None else micro.old_logprobs
        lags = step.samples.lags[micro.sample_numbers].repeat_interleave(micro.cu_seqlens.diff().long())
        wide = {
            "rollout_logprobs": micro.rollout_logprobs,
            "old_logprobs": old,
            "logprobs": scores.logprobs,
            "token_ids": micro.token_ids,
            "mask": micro.response_mask,
            "versions": description.policy_version - (lags if micro.token_lags is None else micro.token_lags),
            "advantages": micro.advantages,
        }
        prompts, responses = _spans(micro)
        places = torch.cat([torch.arange(begin, end) for begin, end in responses])
        if micro.supports is not None:
            sizes = torch.zeros(micro.num_tokens, dtype=torch.int32)
            sizes[micro.response_index] = micro.supports.sizes
            wide["support_sizes"] = sizes
            parts["support_ids"].append(micro.supports.token_ids)
        for name, value in wide.items():
            if value is not None:
                parts[name].append(value[places])
        if with_routes:
            ends = zip(micro.routes or [Routes(())] * len(prompts), prompts, responses, strict=True)
            routes += [each.first(end - begin) for each, (begin, _), (_, end) in ends]
        parts["lengths"].append(torch.tensor([end - begin for begin, end in responses]))
        parts["prompt_lengths"].append(torch.tensor([end - begin for begin, end in prompts]))
        parts["prompt_ids"] += [micro.token_ids[begin:end] for begin, end in prompts]
        parts["groups"].append(step.samples.group_ids[micro.sample_numbers])
        parts["rewards"].append(step.samples.rewards[micro.sample_numbers])
    tensors = {name: torch.cat(values) for name, values in parts.items()}
    if torch.equal(tensors["logprobs"], tensors["old_logprobs"]):
        del tensors["logprobs"]
    if bool(tensors["mask"].all()):
        del tensors["mask"]
    return Bundle(**tensors, **route_tensors(routes), metadata=_metadata(description, config))


def _spans(micro: MicroBatch) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(prompt, response) of each sequence as (first, last + 1) in the packed tokens.

    A response goes from the first to the last token that the model sampled; tokens of tools can lie between.
    """
    prompts, responses = [], []
    bounds = micro.cu_seqlens.tolist()
    for begin, end in itertools.pairwise(bounds):
        sampled = micro.response_mask[begin:end].nonzero().flatten()
        first, last = (begin + int(sampled[0]), begin + int(sampled[-1]) + 1) if len(sampled) else (end, end)
        prompts.append((begin, first))
        responses.append((first, last))
    return prompts, responses


def _metadata(description: DumpDescription, config: TrainConfig) -> dict[str, str]:
    return {
        "producer": "parity",
        "step": str(description.step),
        "version": str(description.policy_version),
        "temperature": str(config.sampling.temperature),
        "trainer_dtype": config.policy.dtype.value,
        "rollout_dtype": config.rollout.dtype.value,
        "quantization": config.rollout.quantization.value,
        # A dense model has the key too, and no routes.
        **(
            {"routing": config.policy.routing.value}
            if description.metrics.get("mismatch/routes_changed") is not None
            else {}
        ),
    }


def _parts(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, last + 1) of the responses that are scored together."""
    first, tokens = 0, 0
    for number, length in enumerate(lengths):
        if number > first and tokens + length + 1 > MICRO_TOKENS:
            yield first, number
            first, tokens = number, 0
        tokens += length + 1
    yield first, len(lengths)


def _micro(
    bundle: Bundle, lengths: Tensor, mask: Tensor, lags: Tensor, samples: StepSamples, first: int, last: int
) -> tuple[MicroBatch, TokenScores]:
    """The responses `first` to `last` as a micro-batch, and the policy's scores of it."""
    begin, own = int(lengths[:first].sum()), lengths[first:last]
    tokens = slice(begin, begin + int(own.sum()))
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), (own + 1).cumsum(0)]).to(torch.int32)
    places = torch.ones(int(cu_seqlens[-1]), dtype=torch.bool)
    places[cu_seqlens[:-1].long()] = False

    def wide(values: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        found = torch.zeros(len(places), dtype=dtype)
        own = values[tokens].to(dtype)
        found[places] = torch.where(mask[tokens], own, torch.zeros_like(own))
        return found

    response_mask = wide(torch.ones(len(mask)), torch.bool)
    old = wide(bundle.old_logprobs)
    current = old if bundle.logprobs is None else wide(bundle.logprobs)
    numbers = torch.arange(first, last)
    micro = MicroBatch(
        token_ids=torch.zeros(len(places), dtype=torch.int64),
        cu_seqlens=cu_seqlens,
        inputs=_NO_INPUTS,
        response_index=response_mask.nonzero().flatten(),
        response_mask=response_mask,
        rollout_logprobs=wide(bundle.rollout_logprobs),
        sample_keys=[(int(group), number) for number, group in enumerate(samples.group_ids[first:last].tolist())],
        sample_numbers=numbers,
        advantages=torch.zeros(len(places)) if bundle.advantages is None else wide(bundle.advantages),
        token_lags=None if bundle.versions is None else wide(lags, torch.int64),
        old_logprobs=None if bundle.logprobs is None else old,
    )
    return micro, TokenScores(logprobs=current, entropy=torch.zeros(len(places)), floor_delta=None)
