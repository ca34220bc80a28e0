"""What SGLang must hold after a sync: names, fused bytes, padding, digests. Numbers are worked out by hand."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterable

import numpy as np
import pytest
import torch

from rollout.config import Quantization
from rollout.engine import LayoutError, WeightSyncError
from rollout.sglang.expected import ExpectedDigests, SGLangLayout
from rollout.sglang.fusing import Share, tile_digest
from rollout.sglang.loader import _views
from rollout.weights.fusion import plan_fusion
from rollout.weights.packed_weights import dtype_name

LAYER = "model.layers.0."
HF_NAMES = [
    "model.embed_tokens.weight",
    *(f"{LAYER}self_attn.{part}_proj.weight" for part in "qkvo"),
    *(f"{LAYER}self_attn.{part}_proj.bias" for part in "qkv"),
    *(f"{LAYER}mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    f"{LAYER}input_layernorm.weight",
    "model.norm.weight",
]
ENGINE_NAMES = [
    "model.embed_tokens.weight",
    f"{LAYER}self_attn.qkv_proj.weight",
    f"{LAYER}self_attn.qkv_proj.bias",
    f"{LAYER}self_attn.o_proj.weight",
    f"{LAYER}mlp.gate_up_proj.weight",
    f"{LAYER}mlp.down_proj.weight",
    f"{LAYER}input_layernorm.weight",
    "model.norm.weight",
]


def expected_digests(
    held: Iterable[str],
    tensors: dict[str, torch.Tensor],
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    num_ranks: int = 1,
) -> list[dict[str, str]]:
    """The digests of every rank of an engine that holds the parameters `held`."""
    layout = SGLangLayout(
        parameters=tuple(held),
        num_ranks=num_ranks,
        num_kv_heads=1,
        dtype=dtype_name(dtype),
        device=device,
        quantization=Quantization.none,
    )
    expected = ExpectedDigests(layout, sent=tensors)
    for name, tensor in tensors.items():
        expected.add(name, tensor)
    return expected.result()


def sha(*pieces: bytes) -> str:
    return hashlib.sha256(b"".join(pieces)).hexdigest()[:16]


def test_dense_model_is_fused_in_the_order_of_the_engine() -> None:
    fusion = plan_fusion(ENGINE_NAMES, sent=HF_NAMES)
    assert fusion.sources[f"{LAYER}self_attn.qkv_proj.weight"] == tuple(
        f"{LAYER}self_attn.{part}_proj.weight" for part in "qkv"
    )
    assert fusion.sources[f"{LAYER}self_attn.qkv_proj.bias"] == tuple(
        f"{LAYER}self_attn.{part}_proj.bias" for part in "qkv"
    )
    assert fusion.sources[f"{LAYER}mlp.gate_up_proj.weight"] == (
        f"{LAYER}mlp.gate_proj.weight",
        f"{LAYER}mlp.up_proj.weight",
    )
    assert fusion.sources["model.norm.weight"] == ("model.norm.weight",)
    assert set(fusion.sources) == set(ENGINE_NAMES)
    assert not fusion.tied


def test_a_name_that_both_sides_know_is_not_taken_apart() -> None:
    name = "model.layers.0.self_attn.qkv_proj.weight"
    assert plan_fusion([name], sent=[name]).sources == {name: (name,)}


def test_lm_head_of_a_tied_model_is_allowed_and_noted() -> None:
    assert plan_fusion(ENGINE_NAMES, sent=[*HF_NAMES, "lm_head.weight"]).tied
    untied = plan_fusion([*ENGINE_NAMES, "lm_head.weight"], sent=[*HF_NAMES, "lm_head.weight"])
    assert not untied.tied
    assert untied.sources["lm_head.weight"] == ("lm_head.weight",)


@pytest.mark.parametrize(
    "lost",
    [f"{LAYER}self_attn.k_proj.weight", "model.norm.weight", "model.embed_tokens.weight", f"{LAYER}mlp.up_proj.weight"],
)
def test_missing_tensor_is_named(lost: str) -> None:
    with pytest.raises(LayoutError, match=f"missing tensors: {lost}$"):
        plan_fusion(ENGINE_NAMES, sent=[name for name in HF_NAMES if name != lost])


def test_unknown_tensor_is_named() -> None:
    with pytest.raises(LayoutError, match=r"tensors that the engine does not have: value_head\.weight$"):
        plan_fusion(ENGINE_NAMES, sent=[*HF_NAMES, "value_head.weight"])


def test_unknown_fusing_is_an_error_of_its_own() -> None:
    unknown = "model.layers.0.self_attn.w_kc"
    with pytest.raises(LayoutError, match=f"no rule makes up from HF tensors: {unknown} .*cannot be verified"):
        plan_fusion([*ENGINE_NAMES, unknown], sent=HF_NAMES)


def test_digest_of_a_stacked_parameter_is_that_of_the_stacked_bytes() -> None:
    parts = {
        f"a.{part}_proj.weight": torch.full((rows, 2), value)
        for part, rows, value in (("q", 2, 1.0), ("k", 1, 2.0), ("v", 1, 3.0))
    }
    stacked = np.array([[1, 1], [1, 1], [2, 2], [3, 3]], dtype=np.float32)
    assert expected_digests(["a.qkv_proj.weight"], parts) == [{"a.qkv_proj.weight": sha(stacked.tobytes())}]
    # The order in which they come does not matter, nor does a tensor that the engine does not hold.
    turned = dict(reversed(parts.items()))
    assert expected_digests(["a.qkv_proj.weight"], turned) == [{"a.qkv_proj.weight": sha(stacked.tobytes())}]


def test_a_tensor_that_does_not_come_is_missed() -> None:
    layout = SGLangLayout(
        parameters=("a.gate_up_proj.weight", "model.norm.weight"),
        num_ranks=1,
        num_kv_heads=1,
        dtype="float32",
        device="cpu",
        quantization=Quantization.none,
    )
    expected = ExpectedDigests(layout, sent=["a.gate_proj.weight", "a.up_proj.weight", "model.norm.weight"])
    expected.add("model.norm.weight", torch.ones(2))
    expected.add("a.up_proj.weight", torch.ones(2, 2))
    with pytest.raises(WeightSyncError, match=r"not all tensors of these .* came: a\.gate_up_proj\.weight$"):
        expected.result()


def test_digests_of_a_gpu_are_those_of_the_rows_columns_and_vocabulary_of_each_rank() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "model.embed_tokens.weight": (67, 6),
        **{f"a.{part}_proj.weight": (rows, 6) for part, rows in (("q", 4), ("k", 2), ("v", 2))},
        "a.o_proj.weight": (6, 4),
        "model.norm.weight": (5,),
    }
    for dtype in (torch.bfloat16, torch.float32, torch.int8):
        tensors = {name: torch.randint(-99, 99, shape, generator=generator).to(dtype) for name, shape in shapes.items()}
        held = ["model.embed_tokens.weight", "a.qkv_proj.weight", "a.o_proj.weight", "model.norm.weight"]
        ranks = expected_digests(held, tensors, dtype=dtype, device="cuda", num_ranks=2)
        padded = torch.cat([tensors["model.embed_tokens.weight"], torch.zeros(61, 6, dtype=dtype)])
        for rank, digests in enumerate(ranks):
            q = tensors["a.q_proj.weight"][2 * rank : 2 * rank + 2]
            whole = {
                "model.embed_tokens.weight": padded[64 * rank : 64 * rank + 64],
                # One key/value head for two ranks: both hold it.
                "a.qkv_proj.weight": torch.cat([q, tensors["a.k_proj.weight"], tensors["a.v_proj.weight"]]),
                "a.o_proj.weight": tensors["a.o_proj.weight"][:, 2 * rank : 2 * rank + 2],
                "model.norm.weight": tensors["model.norm.weight"],
            }
            wanted = {name: tile_digest([raw(tensor)]) for name, tensor in whole.items()}
            assert digests == wanted


def raw(tensor: torch.Tensor) -> np.ndarray:
    found: np.ndarray = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return found


def test_digest_is_taken_after_the_cast_to_the_engines_type() -> None:
    # bfloat16 keeps the upper half of a float32; 1.00390625 lies between 1.0 and 1.0078125 and rounds to even.
    tensors = {"model.norm.weight": torch.tensor([1.0, -2.0, 1.00390625])}
    [digests] = expected_digests(tensors, tensors, dtype=torch.bfloat16)
    assert digests["model.norm.weight"] == sha(bytes([0x80, 0x3F, 0x00, 0xC0, 0x80, 0x3F]))


def test_vocabulary_is_padded_with_zero_rows_to_a_multiple_of_64() -> None:
    rows = torch.arange(67 * 2, dtype=torch.float32).view(67, 2)
    tensors = {"model.embed_tokens.weight": rows, "model.norm.weight": rows}
    [digests] = expected_digests(tensors, tensors)
    raw = rows.numpy().tobytes()
    assert digests["model.embed_tokens.weight"] == sha(raw, bytes(4 * 2 * (128 - 67)))
    assert digests["model.norm.weight"] == sha(raw)
    full = {"model.embed_tokens.weight": rows[:64].contiguous()}
    [digests] = expected_digests(full, full)
    assert digests["model.embed_tokens.weight"] == sha(raw[: 64 * 2 * 4])


GPU_DIGEST_SCRIPT = """
import importlib.util, json, pathlib, sys
import numpy as np, torch
root = pathlib.Path(importlib.util.find_spec("sglang").origin).parent
spec = importlib.util.spec_from_file_location("real", root / "kernels/ops/memory/gpu_tensor_hash.py")
real = importlib.util.module_from_spec(spec)
spec.loader.exec_module(real)
for size in json.loads(sys.argv[1]):
    raw = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    words = torch.from_numpy(np.concatenate([raw, np.zeros(-size % 4, np.uint8)])).view(torch.uint32)
    tiles = -(-words.numel() // 8192)
    partial = torch.empty(tiles, dtype=torch.uint64)
    seed = 0x243F6A88
    real.hash_tiles32_kernel_blocked[(tiles,)](
        words, partial, words.numel(), seed1=seed, seed2=((seed * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF,
        FM_C1=real.FMIX32_C1, FM_C2=real.FMIX32_C2, POS_A=real.POS_C1, POS_B=real.POS_C2,
        TILE=8192, BLOCK=256, USE_CG=False,
    )
    total = sum(int(value) for value in partial.numpy()) & ((1 << 64) - 1)
    sys.stdout.write(f"{real._final_splitmix64(total):016x}\\n")
"""


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")
def test_gpu_digest_is_that_of_sglangs_own_kernel() -> None:
    """SGLang's Triton kernel, run on the CPU by Triton's interpreter, agrees on sizes around the tile boundaries."""
    sizes = [4, 7, 8192 * 4, 8192 * 4 + 8]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", GPU_DIGEST_SCRIPT, str(sizes)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    raws = [np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8) for size in sizes]
    assert [tile_digest([raw]) for raw in raws] == done.stdout.split()
    assert tile_digest([raws[2][:9000], raws[2][9000:]]) == tile_digest([raws[2]])
    raws[3][8192 * 4 + 7] ^= 1
    assert tile_digest([raws[3]]) != done.stdout.split()[3]


KERNEL_SCRIPT = """
import importlib.util, sys
import torch
from rollout.sglang.fusing import finished, tile_digest
from rollout.sglang.hash_kernel import tile_sum

def numpy_bytes(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()

cases = 0
for dtype in (torch.bfloat16, torch.float32, torch.int8):
    for rows, columns in ((1, 1), (3, 3), (41, 200), (8192, 1), (16385, 3)):
        whole = torch.randint(-128, 128, (rows, columns)).to(dtype)
        middle = whole[:, columns // 3 :]
        for pieces in ([whole], list(whole.split(max(1, rows // 3))), [middle], [whole[1:]], [whole, middle]):
            found = finished(int(tile_sum(pieces)))
            wanted = tile_digest([numpy_bytes(piece) for piece in pieces])
            assert found == wanted, (dtype, rows, columns, found, wanted)
            cases += 1
sys.stdout.write(str(cases))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernel_gives_the_numbers_of_the_reference() -> None:
    """Run by Triton's interpreter: types, odd sizes, stacked pieces, columns, pieces off the grid of words."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KERNEL_SCRIPT],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "75"


COMPILE_SCRIPT = """
import sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from rollout.sglang.hash_kernel import _tile_kernel
for capability in (80, 90):
    source = ASTSource(fn=_tile_kernel, signature={"words": "*i32", "sums": "*i64", "count": "i32"}, constexprs={})
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    sys.stdout.write(f"{capability} {len(compiled.asm['cubin']) > 0} ")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernel_compiles_for_gpus_that_are_not_here() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILE_SCRIPT], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["80", "True", "90", "True"]


def test_gpu_digest_of_more_than_one_chunk_depends_on_every_position() -> None:
    raw = np.zeros(8192 * 4 * 40, dtype=np.uint8)
    digests = {tile_digest([raw])}
    for at in (0, 8192 * 4 * 16, raw.size - 1):
        changed = raw.copy()
        changed[at] = 1
        digests.add(tile_digest([changed]))
    assert len(digests) == 4


@pytest.mark.parametrize(
    ("name", "size", "num_kv_heads", "expected"),
    [
        ("a.q_proj.weight", 2, 1, [slice(0, 4), slice(4, 8)]),
        ("a.k_proj.bias", 4, 2, [slice(0, 4), slice(0, 4), slice(4, 8), slice(4, 8)]),
        ("a.v_proj.weight", 2, 4, [slice(0, 4), slice(4, 8)]),
        ("a.gate_proj.weight", 4, 2, [slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 8)]),
        ("a.norm.weight", 2, 1, [slice(0, 8), slice(0, 8)]),
        ("a.o_proj.bias", 2, 1, [slice(0, 8), slice(0, 8)]),
    ],
)
def test_ranks_divide_rows_and_share_heads_that_are_too_few(
    name: str, size: int, num_kv_heads: int, expected: list[slice]
) -> None:
    tensor = torch.arange(16.0).view(8, 2)
    for rank, rows in enumerate(expected):
        assert torch.equal(Share(rank=rank, size=size, num_kv_heads=num_kv_heads).of(name, tensor), tensor[rows])


def test_ranks_divide_columns_and_the_padded_vocabulary() -> None:
    tensor = torch.arange(67 * 6.0).view(67, 6)
    assert torch.equal(Share(rank=1, size=3).of("a.o_proj.weight", tensor), tensor[:, 2:4])
    # 67 rows are padded to 128 for two ranks; three ranks cannot share 128, so it is 192 for them.
    second = Share(rank=1, size=2).of("lm_head.weight", tensor)
    assert torch.equal(second[:3], tensor[64:]) and not second[3:].any() and len(second) == 64
    assert [len(Share(rank=rank, size=3).of("model.embed_tokens.weight", tensor)) for rank in range(3)] == [64] * 3


def test_matrices_whose_columns_ranks_take_go_to_the_gpu_whole() -> None:
    """With device meta in place of a GPU: what is moved has no memory there, what is not moved is a view."""
    flat = torch.arange(2 * 8, dtype=torch.uint8)
    names = ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight")
    tensors = [
        {"name": name, "dtype": "float32", "shape": [1, 2], "offset": 8 * number} for number, name in enumerate(names)
    ]
    for device, kind in ((torch.device("meta"), "meta"), (None, "cpu")):
        (_, rows), (_, columns) = _views(flat, tensors, columns_on=device)
        assert rows.data_ptr() == flat.data_ptr()
        assert columns.device.type == kind and columns.shape == (1, 2)
