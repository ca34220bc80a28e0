"""Quantised engines: the grid, what a real engine holds after a sync, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import write_tiny_model

from algorithms.config import ConfigError
from rollout.config import DType, EngineConfig, Quantization
from rollout.engine import WeightSyncError
from rollout.sglang.config import SGLangConfig
from rollout.torch.config import TorchEngineConfig
from rollout.torch.engine import TorchEngine
from rollout.types import GenerateRequest, SamplingParams, SharedWeights
from rollout.weights.packed_weights import DTYPES, TensorShape, unpack
from rollout.weights.quantization import (
    GRIDS,
    check_projections,
    dequantize,
    is_projection,
    per_group_fp8,
    per_token_int8,
    quantize,
    relative_error,
    round_inputs,
    stored_shapes,
    weight_publisher,
)
from rollout.weights.shared_weights import WeightReader


def make_request(prompt_id: int = 0, sample_index: int = 0) -> GenerateRequest:
    return GenerateRequest(
        prompt_id=prompt_id,
        sample_index=sample_index,
        prompt_token_ids=[3, 4, 5],
        sampling=SamplingParams(temperature=1.0, max_new_tokens=8, seed=1),
    )


FORMATS = [Quantization.int8, Quantization.fp8, Quantization.int4]
SHAPES = [(1, 1), (3, 5), (64, 96), (130, 300), (256, 128), (5, 0)]
HALF_STEP = {Quantization.int8: 0.5 / 127, Quantization.int4: 0.5 / 7}
"""Largest rounding error of an integer grid, as a share of the tile's largest magnitude."""


def weights(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Rows of very different sizes, one of them zero where there are several."""
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(shape, generator=generator) * torch.logspace(-6, 3, shape[0])[:, None]
    if shape[0] > 1:
        tensor[shape[0] // 2] = 0
    return tensor


@pytest.mark.parametrize("quantization", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_tensor_on_the_grid_stays_as_it_is(quantization: Quantization, shape: tuple[int, int]) -> None:
    grid = GRIDS[quantization]
    quantized = quantize(weights(shape), grid, name="w")
    assert quantized.values.dtype == grid.dtype and quantized.values.shape == shape
    held = dequantize(quantized, grid)
    again = quantize(held, grid, name="w")
    assert torch.equal(again.values.view(torch.int8), quantized.values.view(torch.int8))
    assert torch.equal(dequantize(again, grid), held)
    # Exact: no product of a value and its scale was rounded.
    columns = grid.columns or max(1, shape[1])
    for row in range(0, shape[0], max(1, shape[0] // 7)):
        for column in range(0, shape[1], max(1, shape[1] // 7)):
            scale = quantized.scales[row // grid.rows, column // columns].double()
            assert held[row, column].double() == quantized.values[row, column].double() * scale


@pytest.mark.parametrize("quantization", list(HALF_STEP))
@pytest.mark.parametrize("shape", [(64, 96), (130, 300)])
def test_integers_are_off_by_half_a_step_at_most(quantization: Quantization, shape: tuple[int, int]) -> None:
    grid, tensor = GRIDS[quantization], weights(shape)
    held = dequantize(quantize(tensor, grid, name="w"), grid)
    for begin in range(0, shape[1], grid.columns or shape[1]):
        part = slice(begin, begin + (grid.columns or shape[1]))
        largest = tensor[:, part].abs().amax(dim=1, keepdim=True)
        assert ((held - tensor)[:, part].abs() <= largest * HALF_STEP[quantization] * 1.0001).all()
        # Scales are not shared: each row's largest number survives nearly unchanged.
        assert torch.allclose(held[:, part].abs().amax(dim=1, keepdim=True), largest, rtol=1e-4)
    assert (held[shape[0] // 2] == 0).all()


def test_fp8_is_off_by_a_sixteenth_and_shares_scales_in_blocks() -> None:
    grid, tensor = GRIDS[Quantization.fp8], torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    tensor[:128, :128] *= 1e4
    quantized = quantize(tensor, grid, name="w")
    assert quantized.scales.shape == (2, 2) and quantized.scales[0, 0] > 1000 * quantized.scales[1, 1]
    held, smallest = dequantize(quantized, grid), 2.0**-9 * quantized.scales.max()
    assert ((held - tensor).abs() <= tensor.abs() / 16 + smallest).all()
    assert relative_error(held, tensor) < 0.03


def test_errors_grow_with_the_coarseness_of_the_grid() -> None:
    tensor = torch.randn(256, 256, generator=torch.Generator().manual_seed(1))
    errors = [
        relative_error(dequantize(quantize(tensor, GRIDS[each], name="w"), GRIDS[each]), tensor) for each in FORMATS
    ]
    assert 0.001 < errors[0] < errors[1] < errors[2] < 0.2
    assert relative_error(torch.zeros(2, 2), torch.zeros(2, 2)) == 0


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("quantization", FORMATS)
def test_what_is_not_finite_is_refused_by_name(value: float, quantization: Quantization) -> None:
    tensor = torch.ones(130, 130)
    tensor[129, 129] = value
    with pytest.raises(ValueError, match=r"layers\.7\.mlp\.up_proj\.weight cannot be quantised: it holds inf or NaN"):
        quantize(tensor, GRIDS[quantization], name="layers.7.mlp.up_proj.weight")


def test_extremes_stay_finite() -> None:
    tensor = torch.tensor([[3e38, -1e38], [1e-44, 0.0], [2e-38, -1e-38]])
    for quantization in FORMATS:
        held = dequantize(quantize(tensor, GRIDS[quantization], name="w"), GRIDS[quantization])
        assert torch.isfinite(held).all() and (held[0, 0] / 3e38 - 1).abs() < 0.01


@pytest.mark.parametrize("quantization", FORMATS)
def test_a_tile_of_zeros_is_zero_and_leaves_its_neighbours_as_they_are(quantization: Quantization) -> None:
    grid = GRIDS[quantization]
    tensor = torch.full((130, 130), float(grid.largest))
    tensor[:128, :128] = 0
    for source in (tensor, torch.zeros(130, 130)):
        quantized = quantize(source, grid, name="w")
        assert (quantized.scales > 0).all()
        assert torch.equal(dequantize(quantized, grid), source)


def test_only_projections_of_the_body_are_quantised() -> None:
    names = ["model.layers.0.self_attn.q_proj.weight", "model.layers.11.mlp.down_proj.weight"]
    others = [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_norm.weight",
    ]
    assert all(map(is_projection, names)) and not any(map(is_projection, others))
    check_projections([*names, others[0]], Quantization.int8)
    with pytest.raises(ValueError, match=r"int8 .* \(unknown: model\.layers\.0\.mlp\.c_fc\.weight\)"):
        check_projections([*names, "model.layers.0.mlp.c_fc.weight"], Quantization.int8)
    with pytest.raises(ValueError, match=r"none was found"):
        check_projections(others[:1], Quantization.int8)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_tiny_model(path)
    return path


def policy_weights(path: Path) -> list[tuple[str, torch.Tensor]]:
    """Float32 tensors that the engine has never seen."""
    return [(name, tensor.detach()) for name, tensor in write_tiny_model(path, seed=5).named_parameters()]


def publish(named: list[tuple[str, torch.Tensor]], config: EngineConfig, version: int = 1) -> SharedWeights:
    shapes = [TensorShape(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named]
    publisher = weight_publisher(shapes, config)
    PUBLISHERS.append(publisher)  # its memory must outlive the readers
    return publisher.publish(iter(named), policy_version=version)


PUBLISHERS: list[object] = []


@pytest.fixture(autouse=True)
def forget_publishers() -> Iterator[None]:
    yield
    PUBLISHERS.clear()


@pytest.mark.parametrize("quantization", FORMATS)
@pytest.mark.parametrize("dtype", [DType.float32, DType.bfloat16])
def test_an_engine_holds_exactly_the_grid(
    model_path: Path, tmp_path: Path, quantization: Quantization, dtype: DType
) -> None:
    config = TorchEngineConfig(dtype=dtype, quantization=quantization)
    named = policy_weights(tmp_path)
    engine, reader = TorchEngine(config, index=0, device="cpu", num_threads=None), WeightReader()
    engine.start(model_path)
    shared = publish(named, config)
    with reader.opened(shared) as packed:
        report = engine.load_weights(packed)
    assert (report.policy_version, report.num_tensors) == (1, len(named)) and engine._model is not None
    held = dict(engine._model.named_parameters())
    grid, changed = GRIDS[quantization], 0
    for name, tensor in named:
        expected = dequantize(quantize(tensor, grid, name=name), grid) if is_projection(name) else tensor
        assert torch.equal(held[name], expected.to(DTYPES[dtype.name])), name
        changed += not torch.equal(expected, tensor)
    assert changed == 2 * 7 and shared.quantization is not None
    assert len(shared.quantization.errors) == 2 * 7
    worst = shared.quantization.worst
    wanted = dict(named)[worst]
    assert shared.quantization.errors[worst] == pytest.approx(
        float((held[worst] - wanted).norm() / wanted.norm()), rel=1e-3
    )
    metrics = shared.quantization.metrics()
    assert metrics["sync/quantization_error_max"] == shared.quantization.errors[worst]
    assert str(shared.quantization).startswith(f"{quantization.name}: 14 tensors with relative errors of ")
    engine.stop()
    reader.close()


@pytest.mark.parametrize("in_region", [True, False])
def test_one_flipped_bit_of_a_quantised_tensor_is_named(model_path: Path, tmp_path: Path, in_region: bool) -> None:
    config = TorchEngineConfig(dtype=DType.float32, quantization=Quantization.int8)
    engine, reader = TorchEngine(config, index=0, device="cpu", num_threads=None), WeightReader()
    engine.start(model_path)
    shared = publish(policy_weights(tmp_path), config)
    with reader.opened(shared) as packed:
        [spec] = [spec for spec in packed.tensors if spec.name.endswith("0.mlp.up_proj.weight")]
        if in_region:
            packed.data[spec.offset + 5] ^= 1
        else:  # the trainer's digest is that of other bytes than the grid's
            spec.digest = f"{int(spec.digest, 16) ^ 1:016x}"
        with pytest.raises(WeightSyncError, match=r"layers\.0\.mlp\.up_proj\.weight"):
            engine.load_weights(packed)
    assert engine.policy_version == 0
    engine.stop()
    reader.close()


def test_stored_values_and_scales_travel_as_they_are_and_mean_the_same() -> None:
    name, tensor = "model.layers.0.mlp.up_proj.weight", weights((130, 300))
    named = [("model.norm.weight", torch.ones(4)), (name, tensor)]
    for quantization in (Quantization.int8, Quantization.fp8):
        config = SGLangConfig(quantization=quantization, gpus_per_engine=1)
        assert config.takes_quantized
        shared = publish(named, config)
        reader = WeightReader()
        with reader.opened(shared) as packed:
            found = {spec.name: tensor.clone() for spec, tensor in unpack(packed)}
        reader.close()
        shapes = [TensorShape(each, value.dtype, tuple(value.shape)) for each, value in named]
        assert list(found) == [shape.name for shape in stored_shapes(shapes, quantization)]
        values, scales = found[name], found[list(found)[-1]]
        wanted = quantize(tensor, GRIDS[quantization], name=name)
        assert values.dtype == GRIDS[quantization].dtype and scales.dtype == torch.float32
        assert torch.equal(values.view(torch.int8), wanted.values.view(torch.int8))
        assert torch.equal(scales, wanted.scales) and found["model.norm.weight"].dtype == torch.bfloat16


def test_activations_lie_on_the_grid_of_their_token() -> None:
    states = torch.randn(3, 5, 300, generator=torch.Generator().manual_seed(0)) * 10
    states[0, 0] = 0
    rounded = per_token_int8(states)
    steps = rounded / (states.abs().amax(dim=-1, keepdim=True) / 127)
    assert torch.allclose(steps[1:], steps[1:].round(), atol=1e-3) and (rounded[0, 0] == 0).all()
    assert ((rounded - states).abs() <= states.abs().amax(dim=-1, keepdim=True) * (0.5 / 127) * 1.001).all()
    for begin in (0, 128, 256):
        group = states[..., begin : begin + 128]
        scale = group.abs().amax(dim=-1, keepdim=True).clamp_min(1e-10) / 448
        expected = (group / scale).to(torch.float8_e4m3fn).float() * scale
        assert torch.equal(per_group_fp8(states)[..., begin : begin + 128], expected)
    half = per_group_fp8(states.to(torch.bfloat16))
    assert half.dtype == torch.bfloat16


@pytest.mark.parametrize("quantization", [Quantization.int8, Quantization.fp8])
def test_the_engine_rounds_what_goes_into_its_projections(model_path: Path, quantization: Quantization) -> None:
    """Against a forward whose linear layers round their inputs by themselves."""
    from transformers import AutoModelForCausalLM

    config = TorchEngineConfig(dtype=DType.float32, quantization=quantization)
    engine = TorchEngine(config, index=0, device="cpu", num_threads=None)
    engine.start(model_path)
    [generation] = engine.generate([make_request()])
    engine.stop()
    assert generation.logprobs is not None
    token_ids, found = generation.token_ids, torch.tensor(generation.logprobs)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    sequence = torch.tensor([[3, 4, 5, *token_ids]])

    def whole() -> torch.Tensor:
        with torch.inference_mode():
            scores = model(sequence).logits.log_softmax(-1)
        return scores[0, 2:-1].gather(1, sequence[0, 3:, None])[:, 0]

    plain = whole()
    for unrounded in (Quantization.none, Quantization.int4):
        round_inputs(model, unrounded)
        assert torch.equal(whole(), plain)
    round_inputs(model, quantization)
    assert torch.allclose(found, whole(), atol=2e-3)
    assert (found - plain).abs().max() > 5e-3


INT8, ON_GPU = {"quantization": Quantization.int8}, {"gpus_per_engine": 1.0}


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (SGLangConfig, INT8 | ON_GPU | {"dtype": DType.float32}, "dtype must be bfloat16 or float16 with"),
        (
            SGLangConfig,
            INT8 | ON_GPU | {"engine_args": {"load_format": "auto"}},
            "engine_args.load_format is set by Parity with rollout.quantization=int8",
        ),
        (
            SGLangConfig,
            {"engine_args": {"quantization": "fp8"}},
            "there are more engines (rollout.num_engines) and",
        ),
    ],
)
def test_configs_that_make_no_sense_are_refused(kind: type[EngineConfig], values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        kind(**values)
    assert message in str(raised.value)


def test_who_takes_quantised_tensors() -> None:
    assert not SGLangConfig(quantization=Quantization.int8, dtype=DType.float32).takes_quantized  # on a CPU
    assert not SGLangConfig(quantization=Quantization.int4, gpus_per_engine=1).takes_quantized
    assert not TorchEngineConfig(quantization=Quantization.int8, gpus_per_engine=1).takes_quantized
