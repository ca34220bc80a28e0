"""Quantised tensors in SGLang's own 8-bit linear layers, made on the CPU: names, shapes, layout, digests, refusals."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from rollout.config import Quantization
from rollout.engine import LayoutError
from rollout.sglang.config import SGLangConfig
from rollout.sglang.expected import ExpectedDigests, SGLangLayout
from rollout.sglang.fusing import Share
from rollout.sglang.quantized import engine_quantization, plan_quantized, quantized_server_args, sent_names
from rollout.weights.quantization import GRIDS, quantize, scale_name

FORMATS = [Quantization.int8, Quantization.fp8]
ATTENTION, MLP = "model.layers.0.self_attn.", "model.layers.0.mlp."
SHAPES = {
    f"{ATTENTION}q_proj.weight": (256, 128),
    f"{ATTENTION}k_proj.weight": (128, 128),
    f"{ATTENTION}v_proj.weight": (128, 128),
    f"{ATTENTION}o_proj.weight": (128, 256),
    f"{MLP}gate_proj.weight": (256, 128),
    f"{MLP}up_proj.weight": (256, 128),
    f"{MLP}down_proj.weight": (128, 256),
}
PLAIN = {"model.norm.weight": (128,), "model.embed_tokens.weight": (64, 128)}
HELD = [f"{ATTENTION}qkv_proj", f"{ATTENTION}o_proj", f"{MLP}gate_up_proj", f"{MLP}down_proj"]

SCRIPT = """
import json, sys, types
from rollout.sglang.cpu.platform import make_torchvision_importable
make_torchvision_importable()
import torch
from torch import nn
from torch.nn import Parameter
from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.quantization.w8a8_int8 import W8A8Int8Config
from sglang.srt.utils.weight_checker import _build_check_entries, _build_quantized_set, _hash_tensor
sys.path.insert(0, sys.argv[1])
from test_sglang_quantized import HELD, SHAPES, digests_of, tensors
from rollout.config import Quantization
from rollout.weights.quantization import SCALES
from rollout.sglang.quantized import open_layers, quantized_server_args

def check(kind):
    if kind is Quantization.fp8:
        given = json.loads(quantized_server_args(kind)["json_model_override_args"])["quantization_config"]
        config = Fp8Config.from_config(given)
    else:
        config = W8A8Int8Config({})
    options = dict(bias=False, params_dtype=torch.bfloat16, quant_config=config, parallel_group="replicated")
    model = nn.Module()
    for name, layer in {
        HELD[0]: QKVParallelLinear(128, 128, 2, 1, prefix=HELD[0], **options),
        HELD[1]: RowParallelLinear(256, 128, prefix=HELD[1], **options),
        HELD[2]: MergedColumnParallelLinear(128, [256, 256], prefix=HELD[2], **options),
        HELD[3]: RowParallelLinear(256, 128, prefix=HELD[3], **options),
    }.items():
        parent = model
        for part in name.split(".")[:-1]:
            if not hasattr(parent, part):
                parent.add_module(part, nn.Module())
            parent = getattr(parent, part)
        parent.add_module(name.split(".")[-1], layer)
    made = {name: [list(p.shape), str(p.dtype)] for name, p in model.named_parameters()}

    def served():
        '''What process_weights_after_loading of int8 does on a GPU; that of block fp8 changes nothing on Hopper.'''
        for layer in model.modules():
            if kind is Quantization.int8 and hasattr(layer, "quant_method"):
                layer.weight = Parameter(layer.weight.t(), requires_grad=False)
                layer.weight_scale = Parameter(layer.weight_scale.data, requires_grad=False)

    served()
    STACKED = [("qkv_proj", "q_proj", "q"), ("qkv_proj", "k_proj", "k"), ("qkv_proj", "v_proj", "v"),
               ("gate_up_proj", "gate_proj", 0), ("gate_up_proj", "up_proj", 1)]
    pointers = {name: p.data_ptr() for name, p in model.named_parameters()}
    result = []
    for seed in (1, 2):  # a second sync finds the layers as the first one left them
        sent = tensors(kind, seed)
        for bucket in (list(sent.items())[:5], list(sent.items())[5:]):
            open_layers(model)
            parameters = dict(model.named_parameters())
            for name, tensor in bucket:  # as SGLang's Qwen2ForCausalLM.load_weights
                for fused, part, shard in STACKED:
                    if part in name:
                        parameter = parameters[name.replace(part, fused)]
                        parameter.weight_loader(parameter, tensor, shard)
                        break
                else:
                    if name in parameters:
                        parameters[name].weight_loader(parameters[name], tensor)
        served()
        held = dict(model.named_parameters())
        digests = {
            name: _hash_tensor(entry.dequantize().data)
            for name, _, entry in _build_check_entries(held, set(), _build_quantized_set(model))
        }
        projections = {name: tensor for name, tensor in sent.items() if "_proj" in name}
        [expected] = digests_of(digests, projections, kind, device="cpu")
        result.append([digests, expected])
        assert {name: p.data_ptr() for name, p in held.items()} == pointers, "memory of the layers has moved"
    return made, result

sys.stdout.write(json.dumps([check(kind) for kind in (Quantization.int8, Quantization.fp8)]))
"""


def tensors(quantization: Quantization, seed: int = 0) -> dict[str, torch.Tensor]:
    """What the trainer sends: values and scales of projections, other tensors as they are."""
    generator = torch.Generator().manual_seed(seed)
    sent: dict[str, torch.Tensor] = {}
    for name, shape in SHAPES.items():
        tensor = torch.randn(shape, generator=generator) * torch.logspace(-3, 1, shape[0])[:, None]
        quantized = quantize(tensor, GRIDS[quantization], name=name)
        sent[name], sent[scale_name(name, quantization)] = quantized.values, quantized.scales
    for name, shape in PLAIN.items():
        sent[name] = torch.randn(shape, generator=generator)
    return sent


def digests_of(
    held: Iterable[str], sent: dict[str, torch.Tensor], kind: Quantization, *, device: str, num_ranks: int = 1
) -> list[dict[str, str]]:
    """What every rank of an engine that holds the parameters `held` must report."""
    layout = SGLangLayout(
        parameters=tuple(held),
        num_ranks=num_ranks,
        num_kv_heads=num_ranks,
        dtype="bfloat16",
        device=device,
        quantization=kind,
    )
    expected = ExpectedDigests(layout, sent=sent)
    for name, tensor in sent.items():
        expected.add(name, tensor)
    return expected.result()


def held_names(quantization: Quantization) -> list[str]:
    """What SGLang's weight checker reports: the scales of fp8 are inside the digests of their weights."""
    scales = [f"{name}.weight_scale" for name in HELD] if quantization is Quantization.int8 else []
    return [*PLAIN, *(f"{name}.weight" for name in HELD), *scales]


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")
def test_sglangs_own_layers_take_the_tensors_and_hold_what_is_expected() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    fused = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    for quantization, (made, syncs) in zip(FORMATS, json.loads(done.stdout.splitlines()[-1]), strict=True):
        sent = tensors(quantization)
        for name, (shape, dtype) in made.items():
            module = name.split(".")[-2]
            parts = [sent[name.replace(module, part)] for part in fused.get(module, (module,))]
            assert shape == [sum(len(part) for part in parts), parts[0].shape[1]], name
            assert dtype == str(parts[0].dtype), name
        assert len(made) == 2 * len(HELD)
        for digests, expected in syncs:
            assert digests == expected and len(digests) == len(held_names(quantization)) - len(PLAIN)
        assert syncs[0][0] != syncs[1][0]


@pytest.mark.parametrize("quantization", FORMATS)
def test_a_bit_of_a_value_or_a_scale_changes_the_digest(quantization: Quantization) -> None:
    sent = tensors(quantization)

    def digests() -> dict[str, str]:
        [found] = digests_of(held_names(quantization), sent, quantization, device="cuda")
        return found

    before = digests()
    assert sorted(before) == sorted(held_names(quantization))
    weight = f"{MLP}up_proj.weight"
    for name in (weight, scale_name(weight, quantization)):
        flat = sent[name].view(torch.uint8).reshape(-1)
        flat[-1] ^= 1
        changed = {key for key, digest in digests().items() if digest != before[key]}
        assert len(changed) == 1 and all("gate_up_proj" in key for key in changed)
        flat[-1] ^= 1
    assert digests() == before


@pytest.mark.parametrize("quantization", FORMATS)
def test_the_shares_of_two_ranks_make_up_the_whole(quantization: Quantization) -> None:
    sent = tensors(quantization)
    for name in (f"{ATTENTION}o_proj.weight", f"{MLP}gate_proj.weight"):
        shares = [Share(rank=rank, size=2, num_kv_heads=2) for rank in range(2)]
        dim = 1 if "o_proj" in name else 0
        scales = scale_name(name, quantization)
        values = torch.cat([share.of(name, sent[name]).view(torch.int8) for share in shares], dim=dim)
        assert torch.equal(values, sent[name].view(torch.int8))
        parts = [share.of(scales, sent[scales]) for share in shares]
        if quantization is Quantization.int8 and dim == 1:
            assert all(torch.equal(part, sent[scales]) for part in parts)  # scales of channels are whole on every rank
        else:
            assert torch.equal(torch.cat(parts, dim=dim), sent[scales])


def test_missing_scales_and_blocks_that_do_not_fit_are_refused() -> None:
    sent = tensors(Quantization.int8)
    del sent[f"{MLP}up_proj.weight_scale"]
    with pytest.raises(LayoutError, match=r"missing scales: model\.layers\.0\.mlp\.up_proj\.weight_scale"):
        plan_quantized(held_names(Quantization.int8), sent=sent, quantization=Quantization.int8)
    sent = tensors(Quantization.fp8)
    with pytest.raises(LayoutError, match=r"needs matrices whose sides are multiples of 128 on every GPU"):
        digests_of(held_names(Quantization.fp8), sent, Quantization.fp8, device="cuda", num_ranks=4)


def test_which_engines_are_started_quantised() -> None:
    config = SGLangConfig(quantization=Quantization.int8, gpus_per_engine=1)
    assert engine_quantization(config) is Quantization.int8
    assert engine_quantization(SGLangConfig(quantization=Quantization.int8)) is Quantization.none  # on a CPU
    assert quantized_server_args(Quantization.none) == {}
    assert quantized_server_args(Quantization.int8)["quantization"] == "w8a8_int8"
    names = ["model.norm.weight", f"{MLP}up_proj.weight"]
    assert sent_names(names, Quantization.none) == set(names)
    assert sent_names(names, Quantization.fp8) == {*names, f"{MLP}up_proj.weight_scale_inv"}
