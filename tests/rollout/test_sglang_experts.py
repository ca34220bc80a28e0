"""Mixtures of experts in a real SGLang server: log-probs of transformers, syncs that are verified in every expert."""

from __future__ import annotations

from pathlib import Path

import pytest
from sglang_cases import LONG, PROMPTS, largest_gap, make_requests, start_served
from tiny_model import MIXTURES, write_tiny_model

from rollout.config import DType

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


@pytest.mark.parametrize(("family", "tp_size"), [*((family, 1) for family in MIXTURES), ("qwen3_moe", 2)])
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
