"""Configuration of quantised engines for `rollout/config.py`: the formats and the rules of their keys. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from enum import Enum

from algorithms.config import Problem

QUANTIZED_SGLANG_ARGS = ("json_model_override_args", "load_format")
"""SGLang options that Parity sets for engines that load quantised weights."""


class Quantization(Enum):
    """Format of the weights of an engine's attention and MLP projections."""

    none = "none"
    fp8 = "fp8"
    """8-bit floating point (e4m3), one scale per block of 128 x 128."""
    int8 = "int8"
    """8-bit integers, one scale per output channel."""
    int4 = "int4"
    """4-bit integers, one scale per 128 inputs of an output channel: a stress test of the correction."""


def eight_bit_problems(
    quantization: Quantization, engine_args: Collection[str], *, is_float32: bool
) -> Iterator[Problem]:
    """Yield broken rules about SGLang engines that compute with 8-bit values."""
    if is_float32:
        yield Problem(
            key="dtype",
            rule=f"must be bfloat16 or float16 with rollout.quantization={quantization.name}: SGLang's 8-bit layers "
            "have no float32 output",
            value="float32",
        )
    for key in QUANTIZED_SGLANG_ARGS:
        if key in engine_args:
            yield Problem(
                key=f"engine_args.{key}",
                rule=f"is set by Parity with rollout.quantization={quantization.name}",
                value=key,
                remedy="Remove it, or use rollout.quantization=none.",
            )
