"""K3 of a mixture of experts on the same tokens: with the trainer's own choice of experts, with the engine's, and with
the engine's factors of their outputs too.

The demo's Qwen3-MoE (`model=arithmetic model.num_experts=16`), early in its training, where it is not sure of every
token: three models of --steps supervised steps. The engine is the embedded one in bfloat16, its weights as they are or
rounded to int8 or fp8 (of experts the weights alone, of other projections the inputs too); the trainer computes in
float32. Beside them a dense Qwen2 whose block has the width that a token of the mixture meets.

    python benchmarks/routing.py [--steps 200 220 240] [--responses 512]
"""

from __future__ import annotations

import argparse
import logging
import shutil
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from algorithms.kl import k3
from rollout.collect.requests import make_sample
from rollout.config import DType, Quantization, Routing
from rollout.data.arithmetic import arithmetic_problems
from rollout.data.tokenizer import load_tokenizer
from rollout.routes import Routes
from rollout.torch.config import TorchEngineConfig
from rollout.torch.engine import TorchEngine
from rollout.types import GenerateRequest, Sample, SamplingParams
from rollout.weights.experts import mixture_of
from rollout.weights.quantization import on_grid
from trainer.batch.packing import micro_batch
from trainer.config.training import ArithmeticModelConfig
from trainer.models.base_model import build_base_model
from trainer.policy.model import decoder_layers, load_causal_lm
from trainer.scoring.forward import ScoringModel
from trainer.scoring.routing_replay import make_replayable

FORMATS = (Quantization.none, Quantization.int8, Quantization.fp8)
NUM_EXPERTS = 16
GROUP = 8
PER_FORWARD = 64
"""Responses that are scored at a time."""

logger = logging.getLogger("benchmarks.routing")


class Found(NamedTuple):
    """What one engine and one model gave."""

    live: float
    experts: float
    weights: float
    rerouted: float
    """Share of the tokens for which the trainer would choose other experts in some layer."""


def rounded_copy(model: Path, quantization: Quantization, directory: Path) -> Path:
    """The model with its projections on the grid of a format."""
    copy = Path(shutil.copytree(model, directory / quantization.name))
    if quantization is not Quantization.none:
        weights = load_file(copy / "model.safetensors")
        held = {name: on_grid(name, tensor, quantization).contiguous() for name, tensor in weights.items()}
        save_file(held, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def sampled(model: Path, quantization: Quantization, *, count: int, seed: int) -> list[Sample]:
    """Responses of the engine, with routes if the model is a mixture."""
    tokenizer, problems = load_tokenizer(model), arithmetic_problems().train[seed * count :]
    is_mixture = "_moe" in (model / "config.json").read_text(encoding="utf-8")
    prompts = [tokenizer(problem.prompt).input_ids for problem in problems[: count // GROUP]]
    requests = [
        GenerateRequest(
            prompt_id=number,
            sample_index=index,
            prompt_token_ids=prompt,
            sampling=SamplingParams(
                temperature=1.0, max_new_tokens=24, seed=seed * 100_000 + number * GROUP + index,
                routes=Routing.weights if is_mixture else Routing.live,
                stop_token_ids=(tokenizer.eos_token_id,),
            ),
        )
        for number, prompt in enumerate(prompts)
        for index in range(GROUP)
    ]  # fmt: skip
    config = TorchEngineConfig(dtype=DType.bfloat16, quantization=quantization)
    engine = TorchEngine(config, index=0, device="cpu", num_threads=1)
    engine.start(model)
    try:
        generations = engine.generate(requests)
    finally:
        engine.stop()
    return [make_sample(*pair) for pair in zip(requests, generations, strict=True)]


def scored(model: ScoringModel, samples: list[Sample]) -> tuple[Tensor, Tensor]:
    """Log-ratio of trainer and engine for every response token, and the counts of routes."""
    deltas, counts = [], torch.zeros(4, dtype=torch.float64)
    for start in range(0, len(samples), PER_FORWARD):
        micro = micro_batch(samples[start : start + PER_FORWARD])
        with torch.no_grad():
            scores = model(micro, temperature=1.0)
        deltas.append((scores.logprobs.double() - micro.rollout_logprobs.double())[micro.response_index])
        counts += 0 if scores.route_counts is None else scores.route_counts
    return torch.cat(deltas), counts


def measure(config: ArithmeticModelConfig, quantization: Quantization, *, count: int, seed: int) -> Found:
    path = build_base_model(config)
    with tempfile.TemporaryDirectory() as scratch:
        samples = sampled(rounded_copy(path, quantization, Path(scratch)), quantization, count=count, seed=seed)
    causal_lm = load_causal_lm(path).eval()
    model = ScoringModel(causal_lm, chunk_tokens=512)
    if mixture := mixture_of(causal_lm.config.to_dict()):
        make_replayable(decoder_layers(causal_lm.get_decoder()), mixture)
        model.with_routes = True
    live, _ = scored(model, [replace(sample, routes=None) for sample in samples])
    weights, counts = scored(model, samples)
    experts, _ = scored(model, [replace(each, routes=each.routes and Routes(each.routes.parts)) for each in samples])
    return Found(
        live=k3(live).mean().item(),
        experts=k3(experts).mean().item(),
        weights=k3(weights).mean().item(),
        rerouted=float(counts[2] / counts[3].clamp(min=1)),
    )


def shown(values: list[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values):.1e} ({min(values):.1e} to {max(values):.1e})"


def ratio(values: list[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[200, 220, 240])
    parser.add_argument("--responses", type=int, default=512)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    logger.info("| engine | dense | mixture: live | replay | weights | replay/live | weights/live | tokens rerouted |")
    logger.info("|---|---|---|---|---|---|---|---|")
    for quantization in FORMATS:
        by_kind = [
            [
                measure(
                    ArithmeticModelConfig(num_experts=experts, num_steps=steps), quantization,
                    count=arguments.responses, seed=number,
                )
                for number, steps in enumerate(arguments.steps)
            ]
            for experts in (0, NUM_EXPERTS)
        ]  # fmt: skip
        dense, mixture = by_kind
        logger.info(
            "| bfloat16%s | %s | %s | %s | %s | %s | %s | %.1f to %.1f %% |",
            "" if quantization is Quantization.none else f", {quantization.name}",
            shown([each.live for each in dense]), shown([each.live for each in mixture]),
            shown([each.experts for each in mixture]), shown([each.weights for each in mixture]),
            ratio([each.experts / each.live for each in mixture]),
            ratio([each.weights / each.live for each in mixture]),
            100 * min(each.rerouted for each in mixture), 100 * max(each.rerouted for each in mixture),
        )  # fmt: skip


if __name__ == "__main__":
    main()
