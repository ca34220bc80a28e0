"""Mixtures of experts in a real SGLang server: log-probs of transformers, syncs that are verified in every expert."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from policy_cases import save_words
from sglang_cases import LONG, PROMPTS, largest_gap, make_requests, start_served
from test_export import saved_after_a_step
from tiny_model import SERVED, write_tiny_model
from transformers import AutoModelForCausalLM

from rollout.config import DType
from rollout.sglang.config import SGLangConfig
from rollout.sglang.engine import SGLangEngine
from rollout.weights.experts import ROUTER_BIAS
from trainer.models.export import write_model

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


@pytest.mark.parametrize(
    ("family", "tp_size"), [*((family, 1) for family in SERVED), ("qwen3_moe", 2), ("glm4_moe", 2)]
)
def test_a_sync_reaches_every_expert(family: str, tp_size: int, tmp_path: Path) -> None:
    served = start_served(tmp_path, model_type=family, tied=False, dtype=DType.float32, tp_size=tp_size)
    try:
        requests = make_requests(PROMPTS, num_samples=2)
        assert largest_gap(requests, served.engine.generate(requests), served.model, temperature=1.0) < 1e-5
        new = write_tiny_model(tmp_path / "new", seed=9, model_type=family, max_positions=LONG + 20)
        served.load(new)
        served.verify()
        assert largest_gap(requests, served.engine.generate(requests), new, temperature=1.0) < 1e-5
    finally:
        served.engine.stop()


def test_a_router_with_a_bias_keeps_its_digits(tmp_path: Path) -> None:
    """SGLang holds it in float32 beside weights in bfloat16; what is sent of its bias is float32 too."""
    served = start_served(tmp_path, model_type="glm4_moe", tied=False, dtype=DType.bfloat16)
    try:
        new = write_tiny_model(tmp_path / "new", seed=9, model_type="glm4_moe", max_positions=LONG + 20)
        sent = served.packed(new, dtype=torch.bfloat16)
        assert {each.dtype for each in sent.tensors if each.name.endswith(ROUTER_BIAS)} == {"float32"}
        served.engine.load_weights(sent)
    finally:
        served.engine.stop()


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_an_export_is_served_with_what_was_trained(family: str, tmp_path: Path) -> None:
    """SGLang skips the names that transformers has in memory, without a word."""
    save_words(tmp_path / "start")
    write_tiny_model(tmp_path / "start", model_type=family)
    config, checkpoint, _ = saved_after_a_step(tmp_path / "start", tmp_path / "run")
    write_model(config, checkpoint, tmp_path / "export", dtype=torch.float32)
    trained, first = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("export", "start"))
    served = SGLangConfig(dtype=DType.float32)
    engine = SGLangEngine(served, index=0, seed=0, device="cpu", log_dir=tmp_path / "logs", num_threads=1)
    engine.start(tmp_path / "export")
    try:
        requests = make_requests(PROMPTS, num_samples=2)
        generations = engine.generate(requests)
    finally:
        engine.stop()
    assert largest_gap(requests, generations, trained, temperature=1.0) < 1e-5
    assert largest_gap(requests, generations, first, temperature=1.0) > 1e-3
