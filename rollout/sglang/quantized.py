"""Weights on SGLang's 8-bit linear layers: server options, layout of values and scales, what SGLang digests.

int8 is SGLang's `w8a8_int8`, fp8 its `fp8` with blocks of 128 x 128; both round activations anew for every token. The
trainer sends each projection as `*.weight` with its scales (`rollout/weights/quantization.py`);
`rollout/sglang/loader.py` loads them like other tensors, `rollout/sglang/weight_update.py` verifies them. Read against
SGLang 0.5.23: layers/quantization/{w8a8_int8,fp8}.py, utils/weight_checker*.py. Not yet run on a GPU.

Parameters that SGLang holds, and digests, after a load:
    int8    weight [I, O], a view of the [O, I] that was loaded; weight_scale [O, 1] float32
    fp8     weight [O, I]; weight_scale_inv [ceil(O / 128), ceil(I / 128)] float32. Its digest is that of the product of
            both in bfloat16, and that of the scales alone is not reported.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollout.config import EngineConfig, Quantization
from rollout.engine import LayoutError
from rollout.sglang.fusing import Share
from rollout.weights.experts import ROUTER_BIAS
from rollout.weights.fusion import Fusion, plan_fusion
from rollout.weights.packed_weights import DTYPES
from rollout.weights.quantization import GRIDS, SCALES, Quantized, dequantize, is_projection, scale_name

if TYPE_CHECKING:
    from rollout.sglang.expected import SGLangLayout

BLOCK = 128


def engine_quantization(config: EngineConfig) -> Quantization:
    """The format in which SGLang itself holds the weights; Quantization.none for plain tensors."""
    return config.quantization if config.takes_quantized else Quantization.none


def quantized_server_args(quantization: Quantization) -> dict[str, Any]:
    """SGLang options; the server starts with random weights, and the first sync brings the policy's weights."""
    if quantization is Quantization.int8:
        return {"quantization": "w8a8_int8", "load_format": "dummy"}
    if quantization is Quantization.fp8:
        # SGLang accepts blocks only for checkpoints that state them in config.json; this checkpoint does not.
        checkpoint = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
        overrides = json.dumps({"quantization_config": checkpoint})
        return {"quantization": "fp8", "load_format": "dummy", "json_model_override_args": overrides}
    return {}


def sent_names(names: Iterable[str], quantization: Quantization) -> set[str]:
    """Names of the tensors that the trainer sends for a checkpoint with `names`."""
    known = set(names)
    if quantization is Quantization.none:
        return known
    return known | {scale_name(name, quantization) for name in known if is_projection(name)}


def plan_quantized(held: Iterable[str], *, sent: Iterable[str], quantization: Quantization) -> Fusion:
    """`plan_fusion` for an engine that holds quantised weights; raises LayoutError if a scale is missing."""
    names = set(sent)
    scales = {scale_name(name, quantization) for name in names if is_projection(name)}
    if missing := sorted(scales - names):
        raise LayoutError(f"missing scales: {', '.join(missing[:5])}")
    # SGLang digests the scales of fp8 with their weights, under the names of the weights.
    return plan_fusion(held, sent=names - scales if quantization is Quantization.fp8 else names)


def parts_of(sources: Sequence[str], layout: SGLangLayout) -> tuple[str, ...]:
    """The tensors on which the digest of a parameter made of `sources` depends: these, for fp8 with their scales."""
    if layout.quantization is Quantization.fp8 and is_projection(sources[0]):
        return (*sources, *(scale_name(source, layout.quantization) for source in sources))
    return tuple(sources)


def held_pieces(
    sources: Sequence[str], tensors: Mapping[str, Tensor], *, layout: SGLangLayout, share: Share
) -> list[Tensor]:
    """The parameter that one rank makes of `sources`, as SGLang digests it: tensors whose bytes follow one another.

    `tensors` holds what `parts_of` names. Raises LayoutError for a block format whose blocks do not fit the matrices:
    SGLang would digest other bytes.
    """
    quantization = layout.quantization
    if quantization is not Quantization.none:
        if is_projection(sources[0]):
            return [_held(sources, tensors, quantization, share)]
        if sources[0].endswith(SCALES[quantization]):
            return [_stacked(sources, tensors, share)]
    router = sources[0].rpartition(".")[0]
    # SGLang holds a router with a bias in float32.
    dtype = "float32" if f"{router}.{ROUTER_BIAS}" in layout.parameters else layout.dtype
    return [share.of(source, tensors[source]).to(DTYPES[dtype]) for source in sources]


def open_layers(model: Any) -> None:
    """Restore the loaders and the checkpoint layout [O, I] of a served model's int8 layers, in place.

    SGLang's layer transposes its weight after a load and forgets the loaders. The memory stays in place, as CUDA graphs
    require; SGLang transposes the weights again when the update session is closed. Safe to call before every load.
    """
    from sglang.srt.layers.parameter import ChannelQuantScaleParameter, ModelWeightParameter

    for layer in model.modules():
        if type(getattr(layer, "quant_method", None)).__name__ != "W8A8Int8LinearMethod":
            continue
        if isinstance(layer.weight, ModelWeightParameter):
            continue
        loader = layer.weight_loader
        turned = layer.weight.data.t()
        if not turned.is_contiguous():
            raise ValueError(f"an int8 weight of shape {tuple(turned.shape)} does not lie as SGLang 0.5.23 lays it")
        layer.weight = ModelWeightParameter(data=turned, input_dim=1, output_dim=0, weight_loader=loader)
        scale = layer.weight_scale.data
        layer.weight_scale = ChannelQuantScaleParameter(data=scale, output_dim=0, weight_loader=loader)


def _held(sources: Sequence[str], tensors: Mapping[str, Tensor], quantization: Quantization, share: Share) -> Tensor:
    """The fused weight of one rank as SGLang digests it."""
    values = _stacked(sources, tensors, share)
    if quantization is Quantization.int8:
        return values.t()
    if values.shape[1] % BLOCK or any(len(share.of(source, tensors[source])) % BLOCK for source in sources[:-1]):
        raise LayoutError(
            f"rollout.quantization=fp8 needs matrices whose sides are multiples of {BLOCK} on every GPU; "
            f"{', '.join(sources)} make {tuple(values.shape)}"
        )
    scales = _stacked([scale_name(source, quantization) for source in sources], tensors, share)
    return dequantize(Quantized(values, scales), GRIDS[quantization]).to(torch.bfloat16)


def _stacked(sources: Sequence[str], tensors: Mapping[str, Tensor], share: Share) -> Tensor:
    parts = [share.of(source, tensors[source]) for source in sources]
    if parts[0].dtype is torch.float8_e4m3fn:
        return torch.cat([part.view(torch.int8) for part in parts]).view(torch.float8_e4m3fn)
    return torch.cat(parts)
