"""Model directories that take no disk: config.json, and safetensors files whose weights are holes.

The header of a safetensors file says where each tensor lies; the rest is made by `truncate`, reads as zeros and takes
no block on the disk. So a rank of a 32B model can load its rows where 65 GB would not fit. Checks that need weights
other than zero draw them on the device after loading (`gpu_check/ranks.py`).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM, Qwen2Config

FILE_BYTES = 4 * 2**30
"""Size of one file: a system refuses to map a file that is larger than its memory."""
ITEM_BYTES = 2
"""Bytes of a number in the files, which are bfloat16 as on the hub."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """Widths of a Qwen2 model, as in its config.json on the hub."""

    name: str
    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool
    context: int = 32768


TINY = Size(name="tiny", hidden=64, mlp=128, layers=2, heads=4, kv_heads=2, vocab=512, tied=True, context=512)
"""For a CPU, and for checks of bits, which need no size."""
QWEN_05B = Size(name="0.5B", hidden=896, mlp=4864, layers=24, heads=14, kv_heads=2, vocab=151936, tied=True)
QWEN_15B = Size(name="1.5B", hidden=1536, mlp=8960, layers=28, heads=12, kv_heads=2, vocab=151936, tied=True)
QWEN_7B = Size(name="7B", hidden=3584, mlp=18944, layers=28, heads=28, kv_heads=4, vocab=152064, tied=False)
QWEN_32B = Size(name="32B", hidden=5120, mlp=27648, layers=64, heads=40, kv_heads=8, vocab=152064, tied=False)


def hf_config(size: Size) -> Qwen2Config:
    """The config of transformers for a size."""
    return Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.mlp,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=size.context,
        tie_word_embeddings=size.tied,
        dtype="bfloat16",
    )


def sparse_model(directory: Path, size: Size) -> Path:
    """Write a model of zeros that takes a few kB of the disk; returns its directory, made if it is not there."""
    path = directory / f"qwen2-{size.name}"
    index = path / "model.safetensors.index.json"
    if index.is_file():
        return path
    path.mkdir(parents=True, exist_ok=True)
    config = hf_config(size)
    config.save_pretrained(path)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.tie_weights()
    parts: list[dict[str, list[int]]] = [{}]
    filled = 0
    for name, parameter in model.named_parameters():
        if filled and filled + parameter.numel() * ITEM_BYTES > FILE_BYTES:
            parts.append({})
            filled = 0
        parts[-1][name] = list(parameter.shape)
        filled += parameter.numel() * ITEM_BYTES
    places: dict[str, str] = {}
    for number, shapes in enumerate(parts, start=1):
        file = path / f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        _write_hole(file, shapes)
        places |= dict.fromkeys(shapes, file.name)
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}), encoding="utf-8")
    return path


def _write_hole(file: Path, shapes: Mapping[str, list[int]]) -> None:
    """A safetensors file of tensors of these shapes, without their bytes."""
    entries, end = {}, 0
    for name, shape in shapes.items():
        stop = end + math.prod(shape) * ITEM_BYTES
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, stop]}
        end = stop
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    header += b" " * (-len(header) % 8)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(header)) + header)
        out.truncate(8 + len(header) + end)
