"""Bundles of a step in which one thing is wrong, for benchmarks/diagnose.py: made with the engine and the trainer.

The embedded engine samples and Parity's scorer scores, in one process. The weights are two optimizer steps of AdamW on
random advantages away from the model on the disk, so that older weights exist, and none of them is a 16-bit number.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from rollout.collect.requests import make_sample
from rollout.config import DType, Quantization, Routing
from rollout.torch.decoding import Batch
from rollout.torch.kv_cache import SLOT_ATTENTION, Step
from rollout.torch.model import Decoder, Read
from rollout.types import FinishReason, GenerateRequest, Sample, SamplingParams
from rollout.weights.packed_weights import DTYPES
from rollout.weights.quantization import on_grid, round_inputs
from trainer.batch.packing import micro_batch
from trainer.batch.train_batch import MicroBatch
from trainer.policy.model import PACKED_ATTENTION
from trainer.replay.bundle import Bundle
from trainer.scoring.forward import ScoringModel

UPDATES = 2
Weights = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """A bundle, and what a diagnosis needs beside it."""

    bundle: Bundle
    models: list[Path]
    """The weights that sampled, and those before the last updates, the newest first."""
    where: str = ""
    """Layer of the fault, as "layers.3.", or empty."""


@dataclass(kw_only=True, slots=True)
class World:
    """A model with its history and prompts, on which faults are planted."""

    path: Path
    prompts: Sequence[Sequence[int]]
    rate: float
    """Learning rate of the updates."""
    longest: int
    """Response tokens at most."""
    decode: Callable[[list[int]], str]
    encode: Callable[[str], list[int]]
    stop: tuple[int, ...]
    scratch: Path
    responses: int = 24
    draw: random.Random = field(default_factory=lambda: random.Random(0))  # noqa: S311 - not for keys
    history: list[Weights] = field(default_factory=list)
    """Weights after each update, the newest last."""
    models: list[Path] = field(default_factory=list)

    def begin(self, seed: int) -> None:
        """New updates, and new draws."""
        self.draw = random.Random(seed)  # noqa: S311 - not for keys
        torch.manual_seed(seed)
        model = load(self.path, DType.float32, attention=PACKED_ATTENTION)
        self.history = [weights_of(model)]
        trainer, optimizer = ScoringModel(model, chunk_tokens=512), torch.optim.AdamW(model.parameters(), lr=self.rate)
        model.requires_grad_(True)
        for update in range(UPDATES):
            micro = self.sampled(Decoder(self.engine(self.history[-1])), seed=update)
            logprobs = trainer(micro, temperature=1.0).logprobs[micro.response_index]
            (logprobs * torch.randn(len(logprobs))).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            self.history.append(weights_of(model))
        self.models = []
        for number, weights in enumerate(reversed(self.history)):
            self.models.append(self.scratch / f"weights_{number}")
            model.load_state_dict(weights, strict=False)
            model.save_pretrained(self.models[-1])

    def engine(self, weights: Weights, dtype: DType = DType.float32) -> PreTrainedModel:
        model = load(self.path, dtype, attention=SLOT_ATTENTION)
        put(model, weights)
        return model

    def load_plain(self, weights: Weights, dtype: DType) -> PreTrainedModel:
        model = load(self.path, dtype, attention="sdpa")
        put(model, weights)
        return model

    def requests(self, *, seed: int, temperature: float = 1.0) -> list[GenerateRequest]:
        chosen = self.draw.sample(range(len(self.prompts)), min(self.responses, len(self.prompts)))
        return [
            GenerateRequest(
                prompt_id=number,
                sample_index=0,
                prompt_token_ids=list(self.prompts[place]),
                sampling=SamplingParams(
                    temperature=temperature,
                    max_new_tokens=self.longest,
                    seed=self.draw.randrange(2**30) + seed,
                    stop_token_ids=self.stop,
                ),
            )
            for number, place in enumerate(chosen)
        ]

    def samples(self, decoder: Decoder, *, seed: int, temperature: float = 1.0) -> list[Sample]:
        asked = self.requests(seed=seed, temperature=temperature)
        found: dict[int, Sample] = {}
        with torch.inference_mode():
            batch = Batch(decoder, num_slots=self.draw.choice([4, 16, 64]), policy_version=0)
            batch.add(range(len(asked)), asked)
            while batch.num_active or batch.num_waiting:
                for ticket, generation in batch.advance():
                    found[ticket] = make_sample(asked[ticket], generation)
        return [found[ticket] for ticket in sorted(found)]

    def sampled(self, decoder: Decoder, *, seed: int) -> MicroBatch:
        return micro_batch(self.samples(decoder, seed=seed))

    def scored(self, samples: Sequence[Sample], *, temperature: float, dtype: DType, weights: Weights) -> list[Tensor]:
        """The trainer's log-probs of each response."""
        model = load(self.path, dtype, attention=PACKED_ATTENTION)
        put(model, weights)
        trainer = ScoringModel(model, chunk_tokens=512)
        found = []
        with torch.inference_mode():
            for first in range(0, len(samples), 12):
                part = samples[first : first + 12]
                micro = micro_batch(part)
                scores = trainer(micro, temperature=temperature).logprobs[micro.response_index]
                found += scores.split([int(each.response_mask.sum()) for each in part])
        return found

    def made(
        self,
        samples: Sequence[Sample],
        *,
        temperature: float = 1.0,
        engine: DType = DType.float32,
        trainer: DType = DType.float32,
        weights: Weights | None = None,
        reported: Sequence[Tensor] | None = None,
        where: str = "",
    ) -> Made:
        """The bundle of samples; `reported` are the engine's log-probs if not those of the samples."""
        scores = self.scored(
            samples, temperature=temperature, dtype=trainer, weights=self.history[-1] if weights is None else weights
        )
        own = [torch.from_numpy(each.rollout_logprobs[each.response_mask]) for each in samples]
        reported = own if reported is None else reported
        bundle = bundle_of(samples, torch.cat(list(reported)), torch.cat(scores), (engine, trainer), temperature)
        return Made(bundle=bundle, models=self.models, where=where)


def bundle_of(
    samples: Sequence[Sample], rollout: Tensor, old: Tensor, dtypes: tuple[DType, DType], temperature: float
) -> Bundle:
    """`rollout` and `old` [R]: log-probs of the response tokens from the engine and from the trainer, of `dtypes`."""
    return Bundle(
        lengths=torch.tensor([each.num_response_tokens for each in samples]),
        rollout_logprobs=rollout,
        old_logprobs=old,
        token_ids=torch.cat([torch.from_numpy(each.token_ids[each.response_mask]) for each in samples]),
        prompt_lengths=torch.tensor([int((~each.response_mask).sum()) for each in samples]),
        prompt_ids=torch.cat([torch.from_numpy(each.token_ids[~each.response_mask]) for each in samples]),
        metadata={
            "producer": "benchmarks",
            "temperature": str(temperature),
            "rollout_dtype": dtypes[0].value,
            "trainer_dtype": dtypes[1].value,
        },
    )


def load(path: Path, dtype: DType, *, attention: str) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        path, dtype=DTYPES[dtype.name], attn_implementation=attention
    )
    return model.eval().requires_grad_(False)


def weights_of(model: PreTrainedModel) -> Weights:
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def put(model: PreTrainedModel, weights: Weights) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])


class _Truncated(Decoder):
    """Reports the log-probs of the distribution that it samples from: the top_p part."""

    top_p = 0.9

    def log_softmax(self, logits: Tensor) -> Tensor:  # type: ignore[override]
        logprobs = torch.log_softmax(logits, -1)
        ordered, places = logprobs.sort(-1, descending=True)
        dropped = ordered.exp().cumsum(-1) - ordered.exp() >= self.top_p
        left_out = torch.zeros_like(dropped).scatter(-1, places, dropped)
        return torch.log_softmax(logprobs.masked_fill(left_out, -torch.inf), -1)


class _Shifted(Decoder):
    """Counts the positions of the response wrongly."""

    gap = 1

    def step(self, tokens: Tensor, positions: Tensor, forward: Step, *, detail: Routing = Routing.live) -> Read:
        return super().step(tokens, positions + self.gap, forward, detail=detail)


class _HalfHead(nn.Module):
    def __init__(self, head: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(head.weight.to(torch.bfloat16), requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return linear(hidden.to(torch.bfloat16), self.weight)


def tensors_of_layers(weights: Weights, *parts: str) -> list[str]:
    return [name for name in weights if ".layers." in name and name.endswith(parts)]


def layer_of(name: str) -> str:
    return "layers." + name.split(".layers.")[1].split(".")[0] + "."


# Each plants one fault; `dtype` is the engine's.


def temperature(world: World, dtype: DType) -> Made:
    wrong = world.draw.choice([0.6, 0.7, 0.8, 1.2, 1.5])
    samples = world.samples(Decoder(world.engine(world.history[-1], dtype)), seed=1, temperature=wrong)
    return world.made(samples, engine=dtype)


def shift(world: World, dtype: DType) -> Made:
    samples = world.samples(Decoder(world.engine(world.history[-1], dtype)), seed=1)
    own = [torch.from_numpy(each.rollout_logprobs[each.response_mask]) for each in samples]
    by = world.draw.choice([1, -1])
    return world.made(samples, engine=dtype, reported=[each.roll(by) for each in own])


def truncation(world: World, dtype: DType) -> Made:
    decoder = _Truncated(world.engine(world.history[-1], dtype))
    decoder.top_p = world.draw.choice([0.5, 0.6, 0.7, 0.8])
    return world.made(world.samples(decoder, seed=1), engine=dtype)


def other_tokens(world: World, dtype: DType) -> Made:
    """The text of half of the responses is encoded again, by a tokenizer that has two tokens in the place of one."""
    samples, reported, changed = world.samples(Decoder(world.engine(world.history[-1], dtype)), seed=1), [], []
    for number, each in enumerate(samples):
        prompt, ids = each.token_ids[~each.response_mask].tolist(), each.token_ids[each.response_mask].tolist()
        own = torch.from_numpy(each.rollout_logprobs[each.response_mask])
        if number % 2 == 0 and (parted := list(_in_two(world, ids))):
            place, pieces = world.draw.choice(parted)
            ids[place : place + 1] = pieces
            own = torch.cat([own, torch.zeros(1)])  # the engine gave one log-prob less than there are ids
        reported.append(own)
        changed.append(sample_of(each.prompt_id, prompt, ids, own.tolist()))
    return world.made(changed, engine=dtype, reported=reported)


def _in_two(world: World, ids: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """Yield (place, two tokens that together have the text of the token there)."""
    for place, token in enumerate(ids):
        text = world.decode([token])
        for cut in range(1, len(text)):
            pieces = world.encode(text[:cut]) + world.encode(text[cut:])
            if len(pieces) == 2 and world.decode(pieces) == text:
                yield place, pieces


def stale(world: World, dtype: DType) -> Made:
    updates = world.draw.choice([1, 2])
    return world.made(world.samples(Decoder(world.engine(world.history[-1 - updates], dtype)), seed=1), engine=dtype)


def old_tensor(world: World, dtype: DType) -> Made:
    name = world.draw.choice(tensors_of_layers(world.history[-1], "_proj.weight"))
    return _with_weights(world, dtype, {name: world.history[0][name]})


def missing_tensor(world: World, dtype: DType) -> Made:
    name = world.draw.choice(tensors_of_layers(world.history[-1], "_proj.weight"))
    return _with_weights(world, dtype, {name: torch.zeros_like(world.history[-1][name])})


def scaled_tensor(world: World, dtype: DType) -> Made:
    names = tensors_of_layers(world.history[-1], "_proj.weight", "norm.weight")
    name = world.draw.choice(names)
    return _with_weights(world, dtype, {name: world.history[-1][name] * world.draw.choice([0.5, 0.7, 1.4, 2.0])})


def exchanged_tensors(world: World, dtype: DType) -> Made:
    weights = world.history[-1]
    kind = world.draw.choice(["q_proj.weight", "o_proj.weight", "up_proj.weight", "down_proj.weight", "v_proj.weight"])
    one, other = world.draw.sample(tensors_of_layers(weights, kind), 2)
    return _with_weights(world, dtype, {one: weights[other], other: weights[one]})


def _with_weights(world: World, dtype: DType, wrong: Weights) -> Made:
    decoder = Decoder(world.engine(world.history[-1] | wrong, dtype))
    return world.made(world.samples(decoder, seed=1), engine=dtype, where=layer_of(next(iter(wrong))))


def rounded_weights(world: World, dtype: DType) -> Made:
    """The engine holds 16-bit weights and computes in float32."""
    del dtype
    rounded = {name: each.to(torch.bfloat16).float() for name, each in world.history[-1].items()}
    return world.made(world.samples(Decoder(world.engine(rounded)), seed=1))


def arithmetic(world: World, dtype: DType) -> Made:
    """The weights are 16-bit numbers on both sides; the engine computes in bfloat16, and nobody says so."""
    del dtype
    rounded = {name: each.to(torch.bfloat16).float() for name, each in world.history[-1].items()}
    model = load(world.path, DType.float32, attention=PACKED_ATTENTION)
    put(model, rounded)
    model.save_pretrained(world.scratch / "rounded")
    made = world.made(world.samples(Decoder(world.engine(rounded, DType.bfloat16)), seed=1), weights=rounded)
    return replace(made, models=[world.scratch / "rounded", *world.models[1:]])


def head_precision(world: World, dtype: DType) -> Made:
    del dtype
    decoder = Decoder(world.engine(world.history[-1]))
    decoder._head = _HalfHead(decoder._head)
    return world.made(world.samples(decoder, seed=1))


def quantized(world: World, dtype: DType) -> Made:
    kind = world.draw.choice([Quantization.int8, Quantization.fp8, Quantization.int4])
    held = {name: on_grid(name, each, kind) for name, each in world.history[-1].items()}
    model = world.engine(held, dtype)
    round_inputs(model, kind)
    return world.made(world.samples(Decoder(model), seed=1), engine=dtype)


def positions(world: World, dtype: DType) -> Made:
    decoder = _Shifted(world.engine(world.history[-1], dtype))
    decoder.gap = world.draw.choice([1, 2, 4, 16])
    return world.made(world.samples(decoder, seed=1), engine=dtype)


def prefix_cache(world: World, dtype: DType) -> Made:
    """Prompts, but for their last token, were read before the last updates, as a radix cache keeps them."""
    old, new = (world.load_plain(world.history[number], dtype) for number in (0, -1))
    samples = []
    for request in world.requests(seed=1):
        prompt = torch.tensor([request.prompt_token_ids])
        generator = torch.Generator().manual_seed(request.sampling.seed)
        cache = DynamicCache()
        tokens: list[int] = []
        logprobs: list[float] = []
        with torch.inference_mode():
            old(prompt[:, :-1], past_key_values=cache, use_cache=True)
            token = prompt[:, -1:]
            while len(tokens) < world.longest and not (tokens and tokens[-1] in world.stop):
                logits = new(token, past_key_values=cache, use_cache=True).logits[0, -1].float()
                distribution = torch.log_softmax(logits, -1)
                drawn = int(torch.multinomial(distribution.exp(), 1, generator=generator))
                tokens.append(drawn)
                logprobs.append(float(distribution[drawn]))
                token = torch.tensor([[drawn]])
        samples.append(sample_of(request.prompt_id, request.prompt_token_ids, tokens, logprobs))
    return world.made(samples, engine=dtype)


def other_prompt(world: World, dtype: DType) -> Made:
    """The trainer reads one token less of the prompt than the engine."""
    samples = []
    for each in world.samples(Decoder(world.engine(world.history[-1], dtype)), seed=1):
        prompt, ids = each.token_ids[~each.response_mask].tolist(), each.token_ids[each.response_mask].tolist()
        logprobs = each.rollout_logprobs[each.response_mask].tolist()
        samples.append(sample_of(each.prompt_id, [prompt[0], *prompt], ids, logprobs))
    return world.made(samples, engine=dtype)


def clean(world: World, dtype: DType) -> Made:
    """Nothing is wrong; the trainer computes in the engine's type or in float32."""
    trainer = world.draw.choice([dtype, DType.float32])
    samples = world.samples(Decoder(world.engine(world.history[-1], dtype)), seed=1)
    return world.made(samples, engine=dtype, trainer=trainer)


def sample_of(number: int, prompt: Sequence[int], ids: Sequence[int], logprobs: Sequence[float]) -> Sample:
    mask = np.arange(len(prompt) + len(ids)) >= len(prompt)
    values = np.zeros(len(mask))
    values[mask] = logprobs
    return Sample(
        prompt_id=number,
        sample_index=0,
        token_ids=np.array([*prompt, *ids]),
        response_mask=mask,
        rollout_logprobs=values,
        token_versions=np.zeros(len(mask), dtype=np.int64),
        finish_reason=FinishReason.length,
        reward=0.0,
    )


FAULTS: dict[str, tuple[Callable[[World, DType], Made], tuple[str, ...]]] = {
    "temperature": (temperature, ("temperature",)),
    "shift": (shift, ("shift",)),
    "truncation": (truncation, ("truncation",)),
    "other tokens": (other_tokens, ("other tokens",)),
    "stale weights": (stale, ("stale weights",)),
    "old tensor": (old_tensor, ("old tensor",)),
    "missing tensor": (missing_tensor, ("missing tensor",)),
    "exchanged tensors": (exchanged_tensors, ("exchanged tensors",)),
    "scaled tensor": (scaled_tensor, ("scaled tensor",)),
    "rounded weights": (rounded_weights, ("rounded weights",)),
    "arithmetic": (arithmetic, ("arithmetic",)),
    "head precision": (head_precision, ("head precision",)),
    "quantization": (quantized, ("quantization",)),
    "positions": (positions, ("positions",)),
    "stale prefix cache": (prefix_cache, ("stale prefix cache",)),
    "other prompt": (other_prompt, ("other prompt",)),
}
"""Planted fault -> (how it is planted, names of a right answer)."""
