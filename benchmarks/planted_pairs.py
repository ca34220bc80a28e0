"""Bundles of a step with two causes of one size, and the share of K3 that each has, for benchmarks/diagnose.py.

The embedded engine reads the same responses with both causes, with either, and with none. The share of a cause is that
of Shapley (A Value for n-Person Games, 1953): the mean of what it adds to K3 first and what it adds last. So the truth
comes from the engine, and knows nothing of the diagnosis. Where a cause has a strength, it is set so that both have the
same K3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from planted_faults import Made, Weights, World, load, put
from torch import Tensor

from rollout.config import DType, Quantization
from rollout.torch.kv_cache import KVSlots
from rollout.torch.model import Decoder
from rollout.types import Sample
from rollout.weights.quantization import on_grid, round_inputs
from trainer.diagnose.evidence import k3_between


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Engine:
    """What an engine does."""

    weights: Weights
    dtype: DType = DType.float32
    quantization: Quantization = Quantization.none
    temperature: float = 1.0

    def decoder(self, world: World) -> Decoder:
        held = {name: on_grid(name, each, self.quantization) for name, each in self.weights.items()}
        model = world.engine(held, self.dtype)
        round_inputs(model, self.quantization)
        return Decoder(model)

    def samples(self, world: World) -> list[Sample]:
        return world.samples(self.decoder(world), seed=1, temperature=self.temperature)

    @torch.inference_mode()
    def logprobs(self, world: World, samples: Sequence[Sample]) -> Tensor:
        """[R] float64: of the responses of `samples`, read token by token as the engine decodes."""
        decoder, slots = self.decoder(world), KVSlots(num_slots=0, max_columns=0)
        prompts, responses = (
            [torch.from_numpy(each.token_ids[each.response_mask == is_response]) for each in samples]
            for is_response in (False, True)
        )
        lengths = torch.tensor([len(each) for each in prompts])
        width, longest = int(lengths.max()), max(map(len, responses))
        slots.resize(num_slots=len(samples), most_slots=len(samples), max_columns=width + longest)
        tokens = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
        following = torch.nn.utils.rnn.pad_sequence(responses, batch_first=True)
        reading = decoder.reading(slots, first_slot=0, prompt_of_slot=torch.arange(len(samples)), longest=width)
        logits, found = decoder.prefill(tokens, lengths, reading).logits, []
        for place in range(longest):
            scores = torch.log_softmax(logits.float() / self.temperature, -1)
            found.append(scores.gather(-1, following[:, place : place + 1])[:, 0])
            stepping = decoder.stepping(slots, positions=lengths + place, longest=width + place + 1)
            logits = decoder.step(following[:, place], lengths + place, stepping).logits
        rows = torch.stack(found, dim=1)
        return torch.cat([row[: len(each)] for row, each in zip(rows, responses, strict=True)]).double()


Change = Callable[[Engine], Engine]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A planted pair."""

    made: Made
    shares: dict[str, float]
    """Name of the cause in a diagnosis -> its share of K3."""


def planted(world: World, engine: Engine, changes: dict[str, Change], models: list[Path], **declared: str) -> Pair:
    """An engine with both changes, beside a trainer with the weights of `engine`."""
    (one, first), (other, second) = changes.items()
    both = second(first(engine))
    samples = both.samples(world)
    trainer = torch.cat(world.scored(samples, temperature=1.0, dtype=DType.float32, weights=engine.weights)).double()
    reported = both.logprobs(world, samples)
    everything = torch.ones(len(trainer), dtype=torch.bool)
    none, alone, alone_other, whole = (
        k3_between(each, trainer, everything)
        for each in (*(each.logprobs(world, samples) for each in (engine, first(engine), second(engine))), reported)
    )
    share = (alone - none + whole - alone_other) / 2 / whole
    parts = [int(each.response_mask.sum()) for each in samples]
    made = world.made(samples, weights=engine.weights, reported=list(reported.float().split(parts)))
    bundle = replace(made.bundle, metadata={**made.bundle.metadata, **declared})
    return Pair(made=Made(bundle=bundle, models=models), shares={one: share, other: 1 - share})


def strength(world: World, engine: Engine, make: Callable[[float], Change], wanted: Change, guess: float) -> float:
    """The strength at which a change has the K3 of `wanted`: K3 grows with the square of a small change."""
    samples = engine.samples(world)
    plain, target = (each.logprobs(world, samples) for each in (engine, wanted(engine)))
    everything = torch.ones(len(plain), dtype=torch.bool)
    size = k3_between(target, plain, everything)
    for _ in range(2):
        own = k3_between(make(guess)(engine).logprobs(world, samples), plain, everything)
        guess *= (size / own) ** 0.5
    return guess


def bfloat16(engine: Engine) -> Engine:
    return replace(engine, dtype=DType.bfloat16)


def in_format(kind: Quantization) -> Change:
    return lambda engine: replace(engine, quantization=kind)


def heated(logarithm: float) -> Change:
    return lambda engine: replace(engine, temperature=2.718281828**logarithm)


def moved(steps: Weights) -> Callable[[float], Change]:
    """Weights that lie `steps` times a strength away."""

    def make(strength: float) -> Change:
        return lambda engine: replace(
            engine, weights={name: each + strength * steps[name] for name, each in engine.weights.items()}
        )

    return make


def rounded(engine: Engine) -> Engine:
    return replace(engine, weights={name: each.bfloat16().float() for name, each in engine.weights.items()})


def saved(world: World, *engines: Engine) -> list[Path]:
    paths = []
    model = load(world.path, DType.float32, attention="sdpa")
    for number, engine in enumerate(engines):
        put(model, engine.weights)
        paths.append(world.scratch / f"of_pair_{number}")
        model.save_pretrained(paths[-1])
    return paths


def int8_and_bfloat16(world: World) -> Pair:
    engine = rounded(Engine(weights=world.history[-1]))
    changes = {"quantization": in_format(Quantization.int8), "arithmetic": bfloat16}
    return planted(world, engine, changes, saved(world, engine), quantization="int8", rollout_dtype="bfloat16")


def fp8_and_stale_weights(world: World) -> Pair:
    engine, fp8 = Engine(weights=world.history[-1]), in_format(Quantization.fp8)
    make = moved({name: each - world.history[-1][name] for name, each in world.history[0].items()})
    old = make(strength(world, engine, make, fp8, 1.0))
    changes = {"stale weights": old, "quantization": fp8}
    return planted(world, engine, changes, saved(world, engine, old(engine)), quantization="fp8")


def adapter_and_rounding(world: World) -> Pair:
    """The engine has not got an adapter of rank 4, and rounds its weights."""
    torch.manual_seed(world.draw.randrange(2**30))
    base = world.history[-1]
    steps = {
        name: torch.randn(len(each), 4) @ torch.randn(4, each.shape[1]) * float(each.std()) / 2
        if name.endswith(("q_proj.weight", "v_proj.weight"))
        else torch.zeros_like(each)
        for name, each in base.items()
    }
    make = moved(steps)
    size = strength(world, Engine(weights=base), make, rounded, 0.01)
    engine = make(size)(Engine(weights=base))
    changes = {"stale weights": make(-size), "rounded weights": rounded}
    return planted(world, engine, changes, saved(world, engine, Engine(weights=base)))


def temperature_and_bfloat16(world: World) -> Pair:
    engine = rounded(Engine(weights=world.history[-1]))
    changes = {"temperature": heated(strength(world, engine, heated, bfloat16, 0.01)), "arithmetic": bfloat16}
    return planted(world, engine, changes, saved(world, engine), rollout_dtype="bfloat16")


PAIRS: dict[str, Callable[[World], Pair]] = {
    "int8 + bfloat16": int8_and_bfloat16,
    "fp8 + stale weights": fp8_and_stale_weights,
    "adapter + rounding": adapter_and_rounding,
    "temperature + bfloat16": temperature_and_bfloat16,
}
