"""SGLang takes the arguments of every recipe for GPUs, and resolves them to what Parity meant; no GPU is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from compose_cases import config_of
from described_models import SIZES, write_config

from rollout.config import Routing
from rollout.engine import EngineNeeds
from rollout.sglang.config import SGLangConfig
from rollout.sglang.installation import server_args
from rollout.sglang.quantized import engine_quantization
from trainer.compose.catalog import recipe_files
from trainer.config.paths import recipe_dir
from trainer.config.training import HFModelConfig
from trainer.limits.memory_plan import may_take_turns

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

HERE = Path(__file__).parent
REQUESTS = 1000
"""Requests of a step for each engine."""


def gpu_engines() -> dict[str, tuple[str, SGLangConfig, bool]]:
    """Recipe with GPU engines, and whether one sleeps -> model, engine, sleeps."""
    found = {}
    for name in recipe_files(recipe_dir()):
        words = [] if name.startswith(("arithmetic", "smollm2", "collapse")) else ["data.train_path=some/data@train"]
        words += ["data.eval_path=some/data@test"] if words else []
        config = config_of(*words, name=name)
        rollout = config.rollout
        if not (isinstance(rollout, SGLangConfig) and rollout.gpus_per_engine):
            continue
        assert isinstance(config.model, HFModelConfig)
        for sleeps in (False, True) if may_take_turns(config) else (False,):
            found[f"{name}, sleeps={sleeps}"] = (config.model.path, rollout, sleeps)
    return found


def test_sglang_resolves_the_arguments_of_every_gpu_recipe(tmp_path: Path) -> None:
    engines = gpu_engines()
    assert {"dapo_qwen2.5_32b, sleeps=True", "dapo_int8_qwen2.5_32b, sleeps=True"} <= engines.keys()
    models = {model: write_config(model, tmp_path) for model, _, _ in engines.values()}
    arguments = [
        server_args(
            rollout, models[model], device="cuda", random_seed=7,
            needs=EngineNeeds(
                sleeps=sleeps, num_requests=REQUESTS,
                routes=Routing.replay if SIZES[model][0] == "qwen3_moe" else Routing.live,
            ),
            quantization=engine_quantization(rollout),
        )
        for model, rollout, sleeps in engines.values()
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    environment.pop("SGLANG_PLATFORM", None)
    child = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "resolve_server_args.py")],
        input=json.dumps(arguments), capture_output=True, text=True, env=environment, timeout=600, check=False,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-3000:]
    resolved: list[dict[str, Any]] = json.loads(child.stdout.splitlines()[-1])
    for (name, (_, rollout, sleeps)), sent, got in zip(engines.items(), arguments, resolved, strict=True):
        assert {key: got[key] for key in sent} == sent, name
        assert (got["device"], got["tp_size"], got["dp_size"]) == ("cuda", rollout.tp_size, 1), name
        graphs = {phase: got["cuda_graph_config"][phase]["backend"] for phase in ("decode", "prefill")}
        assert got["cuda_graph_config"]["decode"]["max_bs"] == REQUESTS, name
        assert graphs["decode"] == "full" and (graphs["prefill"] == "disabled") == sleeps, (name, graphs)
        assert got["enable_memory_saver"] == sleeps, name
        if rollout.gpu_share < 1:
            assert got["mem_fraction_static"] == (0.8 if sleeps else rollout.gpu_share), name
