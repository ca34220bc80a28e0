"""Every kind of engine that tests compare, the built-in ones and a user's own (`toy_engine.py`)."""

from __future__ import annotations

from pathlib import Path

from rollout.config import CustomEngine, DType
from rollout.engine import Engine, EngineSetup
from rollout.group.engines import ENGINES
from rollout.processes.custom_class import load_class

TOY = f"{Path(__file__).parent / 'toy_engine.py'}:ToyEngine"


def start_engine(name: str, model_path: Path, *, log_dir: Path) -> Engine:
    """The engine `sglang`, `torch` or `toy` of a float32 model, on one thread, as a worker of a run makes it."""
    config = (load_class(TOY, CustomEngine) if name == "toy" else ENGINES[name])(dtype=DType.float32)
    setup = EngineSetup(
        config=config, index=0, seed=0, device="cpu", num_threads=1, log_dir=log_dir, model_path=model_path
    )
    engine = config.build(setup)
    engine.start(model_path)
    return engine
