"""Every kind of engine that tests compare, the built-in ones and a user's own (`toy_engine.py`)."""

from __future__ import annotations

import os
from pathlib import Path

from rollout.config import CustomEngine, DType
from rollout.engine import Engine, EngineSetup
from rollout.group.engines import ENGINES
from rollout.user_code.custom_class import load_class

OWN = {
    "toy": f"{Path(__file__).parent / 'toy_engine.py'}:ToyEngine",
    **({"yours": os.environ["PARITY_TEST_ENGINE"]} if "PARITY_TEST_ENGINE" in os.environ else {}),
}
"""Engines of users; PARITY_TEST_ENGINE=path/to/file.py:Name adds one to the contract test."""


HEAD_DIMS = {"vllm": 32}
"""Numbers of a head of the tiny models, where an engine does not serve those of 16."""


def start_engine(name: str, model_path: Path, *, log_dir: Path) -> Engine:
    """An engine of ENGINES or of OWN, of a float32 model, on one thread, as a worker of a run makes it."""
    config = (load_class(OWN[name], CustomEngine) if name in OWN else ENGINES[name])(dtype=DType.float32)
    setup = EngineSetup(
        config=config, index=0, seed=0, device="cpu", num_threads=1, log_dir=log_dir, model_path=model_path
    )
    engine = config.build(setup)
    engine.start(model_path)
    return engine
