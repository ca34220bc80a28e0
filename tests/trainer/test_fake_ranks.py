"""The memory plan against one rank of the recipes for GPUs, measured without a GPU: see `fake_ranks.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from compose_cases import config_of
from fake_ranks import peak_of_a_rank, sparse_model

from trainer.limits.estimate import critic_shape, largest_micro_batch, model_shape, rank_memory

QWEN2 = {"max_position_embeddings": 32768, "num_attention_heads": 14, "num_key_value_heads": 2}
RECIPES = [
    pytest.param(
        "gsm8k_grpo_qwen2.5_0.5b",
        {
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
        ["policy.num_workers=8"],
        id="0.5B on 8",
    ),
    pytest.param(
        "dapo_qwen2.5_7b",
        {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
        },
        [],
        id="7B on 8",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        "dapo_qwen2.5_32b",
        {
            "hidden_size": 5120,
            "intermediate_size": 27648,
            "num_hidden_layers": 64,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "vocab_size": 152064,
        },
        [],
        id="32B on 64",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("recipe", "sizes", "words"), RECIPES)
def test_the_plan_of_a_rank_is_within_a_tenth(
    recipe: str, sizes: dict[str, object], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = sparse_model(tmp_path / "model", **{**QWEN2, "tie_word_embeddings": False, **sizes})
    rows = tmp_path / "rows.jsonl"
    rows.touch()
    config = config_of(f"model.path={path}", f"data.train_path={rows}", f"data.eval_path={rows}", *words, name=recipe)
    plan = rank_memory(config, model_shape(config), critic_shape(config))
    # The optimizer's moments are not made here: a shard of 8 bytes per parameter, which no micro-batch changes.
    planned = plan.on_device - plan.optimizer
    measured = peak_of_a_rank(config, largest_micro_batch(config), monkeypatch)
    assert planned == pytest.approx(measured, rel=0.1), f"{planned / 2**30:.2f} GiB, {measured / 2**30:.2f} measured"
