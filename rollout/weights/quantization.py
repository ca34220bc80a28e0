"""Quantisation of weights: tensor <-> (values on a grid, scales), without loss beyond the rounding to the grid.

`trainer/policy/worker.py` publishes the weights for quantised engines with a `QuantizedPublisher`. The published
weights are then exactly the weights that the engine has to hold, and their digests prove quantised weights as they
prove plain weights. Published are either dequantised values in the engine's own type, or values and scales for an
engine that loads both (SGLang on a GPU).

A scale holds 16 bits of mantissa, rounded up: every product value * scale is exact in float32. So quantising a tensor
that already lies on the grid gives the same values and scales again, and dequantising rounds nothing. A later change of
type (rollout.dtype=bfloat16) rounds once more; the reported error includes that rounding.

Of experts the matrices are rounded one by one, and their inputs are not. Engines round the inputs of int8 and fp8
projections too: SGLang scales every token anew ("dynamic"), so there is no
calibration. `round_inputs` computes the same as those layers, to float rounding. int4 is a format of weights only.

O: output features, I: input features of a projection [O, I].
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from rollout.config import EngineConfig, Quantization
from rollout.types import QuantizationReport, SharedWeights
from rollout.weights.adapter import BASE_LAYER
from rollout.weights.experts import ROUTERS, is_experts, matrices_of
from rollout.weights.packed_weights import DTYPES, TensorShape, Watcher
from rollout.weights.shared_weights import WeightPublisher

PROJECTION = re.compile(r"\.layers\.\d+\..*_proj\.weight$")
"""Names of the weights that an engine quantises: attention and MLP projections. Not embeddings, head, norms, biases."""
IN_LAYER = re.compile(r"\.layers\.\d+\.")
UNQUANTISED = (*(f"{router}.weight" for router in ROUTERS), "shared_expert_gate.weight")
"""Ends of the names of matrices in the layers that engines do not quantise: those that choose and weigh experts."""
SCALE_BITS_DROPPED = 8
"""Number of low bits that a scale drops from the 24 bits of a float32 mantissa."""
FP8_GROUP = 128
"""Neighbouring features of a token that share one fp8 scale."""
SMALLEST_INPUT = 1e-10
"""Largest magnitude of the input below which SGLang's kernels do not scale."""
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """The numbers that a format can hold, and the tiles that share a scale."""

    rows: int
    """Number of output features that share a scale."""
    columns: int | None
    """Number of input features that share a scale; None: all input features share a scale."""
    largest: float
    """Largest value before scaling; the smallest value is -largest."""
    dtype: torch.dtype
    """dtype of the values."""


SCALES = {Quantization.int8: "weight_scale", Quantization.fp8: "weight_scale_inv"}
"""Format -> suffix of the name of a scale where an engine loads quantised tensors; both scales multiply the values."""

GRIDS = {
    Quantization.int8: Grid(rows=1, columns=None, largest=127.0, dtype=torch.int8),
    Quantization.fp8: Grid(rows=128, columns=128, largest=448.0, dtype=torch.float8_e4m3fn),
    Quantization.int4: Grid(rows=1, columns=128, largest=7.0, dtype=torch.int8),
}
"""Formats of SGLang 0.5.23 (w8a8_int8; fp8 with weight_block_size=[128, 128]) and of weight-only int4 checkpoints."""


class Quantized(NamedTuple):
    """A projection as a quantised engine stores it."""

    values: Tensor
    """[O, I] int8 or float8_e4m3fn."""
    scales: Tensor
    """[ceil(O / rows), ceil(I / columns)] float32: factor of the values of each tile."""


def is_projection(name: str) -> bool:
    """True if engines quantise the parameter of this Hugging Face name."""
    return PROJECTION.search(name) is not None or is_experts(name)


def quantize(tensor: Tensor, grid: Grid, *, name: str) -> Quantized:
    """Round `tensor` [O, I] to the nearest values on the grid, symmetric; a tile's largest magnitude maps to `largest`.

    A tile of zeros has scale 1. Raises ValueError naming the tensor if it is not a matrix or not finite.
    """
    if tensor.dim() != 2:
        raise ValueError(f"tensor {name} of shape {tuple(tensor.shape)} cannot be quantised: it is not a matrix")
    source = tensor.detach().to(torch.float32)
    magnitudes = _tiles(source, grid).abs().amax(dim=(1, 3))
    if not bool(torch.isfinite(magnitudes).all()):
        raise ValueError(f"tensor {name} cannot be quantised: it holds inf or NaN")
    scales = _short(torch.where(magnitudes == 0, 1.0, (magnitudes / grid.largest).clamp_min(SMALLEST_SCALE)))
    scaled = (source / spread(scales, grid, source.shape)).clamp_(-grid.largest, grid.largest)
    return Quantized((scaled if grid.dtype.is_floating_point else scaled.round_()).to(grid.dtype), scales)


def dequantize(quantized: Quantized, grid: Grid) -> Tensor:
    """[O, I] float32: the exact weights with which the engine multiplies activations."""
    values = quantized.values.to(torch.float32)
    return values.mul_(spread(quantized.scales, grid, values.shape))


def spread(scales: Tensor, grid: Grid, shape: torch.Size) -> Tensor:
    """The scale of every element of `shape` [O, I], or a tensor that broadcasts to `shape`."""
    if grid.rows > 1:
        scales = scales.repeat_interleave(grid.rows, dim=0)[: shape[0]]
    if grid.columns is not None:
        scales = scales.repeat_interleave(grid.columns, dim=1)[:, : shape[1]]
    return scales


def on_grid(name: str, tensor: Tensor, quantization: Quantization) -> Tensor:
    """`tensor` as the format holds it, float32 of the same shape, if it is a projection, or holds the matrices of
    experts; unchanged otherwise.

    Raises ValueError like `quantize`.
    """
    grid = GRIDS.get(quantization)
    if grid is None or not is_projection(name):
        return tensor
    # No scale covers rows of two matrices.
    matrices = tensor.view(-1, *tensor.shape[-2:]) if tensor.dim() == 2 else matrices_of(name, tensor)
    if matrices.shape[1] % grid.rows == 0:
        matrices = matrices.flatten(0, 1)[None]
    return torch.stack([dequantize(quantize(each, grid, name=name), grid) for each in matrices]).view(tensor.shape)


def held_weight(name: str, tensor: Tensor, config: EngineConfig) -> Tensor:
    """The numbers that an engine computes with in the place of `tensor`, float32 of the same shape.

    Raises ValueError like `quantize`.
    """
    held = on_grid(name, tensor, config.quantization)
    if held is not tensor and config.takes_quantized:  # values and scales: nothing rounds their product
        return held
    return held.to(DTYPES[config.dtype.name]).to(torch.float32)


def relative_error(held: Tensor, wanted: Tensor) -> float:
    """Frobenius norm of the difference / Frobenius norm of `wanted`; 0 if both tensors are zero."""
    wanted = wanted.to(torch.float32)
    difference, norm = torch.linalg.vector_norm(held.to(torch.float32) - wanted), torch.linalg.vector_norm(wanted)
    return float(difference / norm) if float(norm) else float(difference)


def scale_name(weight: str, quantization: Quantization) -> str:
    """Name of the scales of the projection `weight` (..._proj.weight) in a quantised checkpoint of SGLang."""
    return f"{weight.removesuffix('weight')}{SCALES[quantization]}"


def stored_shapes(shapes: Iterable[TensorShape], quantization: Quantization) -> Iterator[TensorShape]:
    """Names, dtypes and shapes of the values and scales that an engine loads for `shapes`."""
    grid = GRIDS[quantization]
    for shape in shapes:
        if not is_projection(shape.name):
            yield shape
            continue
        columns = grid.columns or max(1, shape.shape[1])
        tiles = (-(-shape.shape[0] // grid.rows), -(-shape.shape[1] // columns))
        yield TensorShape(shape.name, grid.dtype, shape.shape, kept=True)
        yield TensorShape(scale_name(shape.name, quantization), torch.float32, tiles, kept=True)


class QuantizedPublisher(WeightPublisher):
    """Publishes quantised weights and the errors of the quantisation."""

    def __init__(
        self, shapes: Sequence[TensorShape], quantization: Quantization, *, dtype: torch.dtype, as_stored: bool
    ) -> None:
        """`as_stored`: the engine loads values and scales, otherwise dequantised values in its `dtype`.

        Raises ValueError if it is unclear which of `shapes` an engine quantises, and as WeightPublisher does.
        """
        check_projections([shape.name for shape in shapes if len(shape.shape) > 1], quantization)
        super().__init__(stored_shapes(shapes, quantization) if as_stored else shapes, dtype=dtype)
        # A value that was rounded before could take another place on the grid.
        self.input_dtypes |= {shape.name: shape.dtype for shape in shapes if is_projection(shape.name)}
        self._quantization = quantization
        self._dtype = dtype
        self._as_stored = as_stored

    def publish(
        self,
        named_tensors: Iterable[tuple[str, Tensor]],
        *,
        policy_version: int,
        watchers: Sequence[Watcher] = (),
    ) -> SharedWeights:
        """Publish as `WeightPublisher.publish` does, and add the quantisation error to the announcement."""
        errors: dict[str, float] = {}
        quantized = self._quantized(named_tensors, errors)
        shared = super().publish(quantized, policy_version=policy_version, watchers=watchers)
        return replace(shared, quantization=QuantizationReport(quantization=self._quantization, errors=errors))

    def _quantized(
        self, named_tensors: Iterable[tuple[str, Tensor]], errors: dict[str, float]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors in order, projections quantised, other tensors unchanged; fills in the `errors`."""
        grid = GRIDS[self._quantization]
        for name, tensor in named_tensors:
            if not is_projection(name):
                yield name, tensor
                continue
            if self._as_stored:
                quantized = quantize(tensor, grid, name=name)
                errors[name] = relative_error(dequantize(quantized, grid), tensor)
                yield name, quantized.values
                yield scale_name(name, self._quantization), quantized.scales
            else:
                held = on_grid(name, tensor, self._quantization)
                errors[name] = relative_error(held.to(self._dtype), tensor)
                yield name, held


def check_projections(matrices: Sequence[str], quantization: Quantization) -> None:
    """Raise ValueError if it is unclear which parameters, of these names, an engine quantises."""
    unclear = [
        name
        for name in matrices
        if IN_LAYER.search(name) and not is_projection(name) and not name.endswith(UNQUANTISED)
    ]
    if unclear or not any(map(is_projection, matrices)):
        found = f"unknown: {', '.join(unclear[:5])}" if unclear else "none was found"
        raise ValueError(
            f"rollout.quantization={quantization.name} knows models whose layers multiply with *_proj.weight "
            f"alone ({found}); use rollout.quantization=none"
        )


def weight_publisher(shapes: Sequence[TensorShape], config: EngineConfig) -> WeightPublisher:
    """Make the publisher of weights for the engines of `config`. Raises ValueError as both publisher classes do."""
    dtype = DTYPES[config.dtype.name]
    if config.quantization is Quantization.none:
        return WeightPublisher(shapes, dtype=dtype)
    return QuantizedPublisher(shapes, config.quantization, dtype=dtype, as_stored=config.takes_quantized)


def _tiles(matrix: Tensor, grid: Grid) -> Tensor:
    """Tiles of a matrix: [tiles down, rows, tiles across, columns], padded with zeros at the end of the matrix."""
    columns = grid.columns or max(1, matrix.shape[1])
    down, across = -(-matrix.shape[0] // grid.rows), -(-matrix.shape[1] // columns)
    missing = (0, across * columns - matrix.shape[1], 0, down * grid.rows - matrix.shape[0])
    return (pad(matrix, missing) if any(missing) else matrix).reshape(down, grid.rows, across, columns)


def _short(scales: Tensor) -> Tensor:
    """Positive float32 `scales`, rounded up to 16 bits of mantissa."""
    mask = (1 << SCALE_BITS_DROPPED) - 1
    bits = scales.contiguous().view(torch.int32)
    return ((bits + mask) & ~mask).view(torch.float32)


def per_token_int8(states: Tensor) -> Tensor:
    """Round to multiples of max|x| / 127 of the token."""
    scale = states.float().abs().amax(dim=-1, keepdim=True).clamp_min_(SMALLEST_INPUT).div_(127)
    return (states / scale).round_().mul_(scale).to(states.dtype)


def per_group_fp8(states: Tensor) -> Tensor:
    """Round to e4m3 numbers times max|x| / 448 of the group of 128 features; the last group may be shorter."""
    rounded = [_fp8(group) for group in states.float().split(FP8_GROUP, dim=-1)]
    return torch.cat(rounded, dim=-1).to(states.dtype)


INPUT_ROUNDINGS = {Quantization.int8: per_token_int8, Quantization.fp8: per_group_fp8}
"""Format that rounds activations too -> how."""


def round_inputs(model: nn.Module, quantization: Quantization) -> None:
    """Round the inputs of the model's projections, the modules named *_proj, from now on, if the format rounds them.

    An adapter beside a projection gets the inputs as they are, as in SGLang.
    """
    rounding = INPUT_ROUNDINGS.get(quantization)
    if rounding is None:
        return

    def before(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (rounding(inputs[0]), *inputs[1:])

    for name, module in model.named_modules():
        if name.removesuffix(BASE_LAYER).endswith("_proj") and not hasattr(module, "base_layer"):
            module.register_forward_pre_hook(before)


def _fp8(group: Tensor) -> Tensor:
    scale = group.abs().amax(dim=-1, keepdim=True).clamp_min_(SMALLEST_INPUT).div_(448)
    # A step above 448 would round to NaN, because e4m3 has no infinity.
    return (group / scale).clamp_(-448, 448).to(torch.float8_e4m3fn).float().mul_(scale)
