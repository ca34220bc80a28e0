"""Models of which only the config.json is there: the sizes of published ones."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig

SIZES: dict[str, tuple[str, tuple[int, int, int, int, int, int]]] = {
    "Qwen/Qwen2.5-0.5B-Instruct": ("qwen2", (896, 4864, 24, 14, 2, 151936)),
    "Qwen/Qwen2.5-Math-1.5B": ("qwen2", (1536, 8960, 28, 12, 2, 151936)),
    "Qwen/Qwen3-4B-Base": ("qwen3", (2560, 9728, 36, 32, 8, 151936)),
    "Qwen/Qwen2.5-7B-Instruct": ("qwen2", (3584, 18944, 28, 28, 4, 152064)),
    "Qwen/Qwen2.5-32B": ("qwen2", (5120, 27648, 64, 40, 8, 152064)),
    "Qwen/Qwen3-30B-A3B-Base": ("qwen3_moe", (2048, 6144, 48, 32, 4, 151936)),
}
"""Model of a recipe -> its type and sizes: hidden, MLP, layers, heads, heads of keys and values, vocabulary."""


def write_config(name: str, directory: Path) -> Path:
    """A directory with the config.json of a model of these sizes; SGLang reads no more before it starts."""
    kind, (hidden, mlp, layers, heads, kv_heads, words) = SIZES[name]
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "head_dim": 128}
    config = AutoConfig.for_model(
        kind, **(experts if kind == "qwen3_moe" else {}), hidden_size=hidden, intermediate_size=mlp,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads, vocab_size=words,
        max_position_embeddings=131072, dtype="bfloat16",
        architectures=["".join(part.capitalize() for part in kind.split("_")) + "ForCausalLM"],
    )  # fmt: skip
    path = directory / name.replace("/", "--")
    config.save_pretrained(path)
    return path
