"""A rank and an engine with an adapter in this process, behind the handles that a run has for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from policy_cases import lone_worker
from torch import Tensor

from rollout.config import Routing
from rollout.engine import Engine, EngineSetup, WeightReport, wait_for
from rollout.group.group_member import Published
from rollout.group.worker import RolloutWorker
from rollout.types import GenerateRequest, Generation, Prompt, SharedWeights, WeightLayout
from trainer.batch.train_batch import MicroBatch
from trainer.cluster.weight_sync import sync_weights
from trainer.config.train import TrainConfig
from trainer.limits.adapter_shape import sent_adapter
from trainer.policy.worker import PolicyWorker
from trainer.run.adapter_probe import probe_adapter
from trainer.run.probe import probe_logprobs

PROMPTS = [[3, 4, 5, 6, 7, 8, 9], [20, 21, 22], [40, 41], [11, 12, 13, 14, 11, 12]]


class OneRank:
    """The PolicyGroup of one rank without an actor around it."""

    def __init__(self, worker: PolicyWorker) -> None:
        self.worker = worker
        self.has_base = False

    def resident(self) -> AbstractContextManager[None]:
        return nullcontext()

    def publish_weights(self, *, policy_version: int, nodes: object, layouts: tuple[WeightLayout, ...]) -> Published:
        shared = self.worker.publish_weights(policy_version, with_base=not self.has_base, layouts=layouts)
        assert shared is not None
        self.has_base = True
        return Published(shared=shared, node="here")

    def begin_adapter_probe(self, *, seed: int, size: float) -> None:
        self.worker.begin_adapter_probe(seed, size)

    def end_adapter_probe(self) -> None:
        self.worker.end_adapter_probe()

    def logprobs(
        self, micros: list[MicroBatch], *, temperature: float | None = None, adapter_factor: float = 1.0
    ) -> list[Tensor]:
        return self.worker.logprobs(micros, temperature, adapter_factor)


class OneEngine:
    """The EngineGroup of one engine without an actor around it."""

    nodes: frozenset[str] = frozenset({"here"})
    takes_turns = False
    num_mapped = 1

    def __init__(self, worker: RolloutWorker, layout: WeightLayout | None) -> None:
        self.worker = worker
        self._layout = layout

    @property
    def engine(self) -> Engine:
        return self.worker._engine

    def resident(self) -> AbstractContextManager[None]:
        return nullcontext()

    def layouts(self) -> tuple[WeightLayout, ...]:
        return () if self._layout is None else (self._layout,)

    def load_weights(self, published: Published) -> dict[int, WeightReport]:
        return {0: self.load(published.shared)}

    def load(self, shared: SharedWeights) -> WeightReport:
        return self.worker.load_weights(shared)

    def generate(self, requests: list[GenerateRequest]) -> list[Generation]:
        tickets = list(range(len(requests)))
        self.worker._engine.submit(tickets, requests)
        return wait_for(tickets, self.worker._engine.poll, others=[])


@contextmanager
def rank_and_engine(config: TrainConfig, model_path: Path, log_dir: Path) -> Iterator[tuple[Any, Any]]:
    """(OneRank, OneEngine) of a run that trains an adapter; Any, because they stand for the groups."""
    setup = EngineSetup(
        config=config.rollout,
        index=0,
        seed=config.run.seed,
        device="cpu",
        num_threads=1,
        log_dir=log_dir,
        model_path=model_path,
        adapter=sent_adapter(config, model_path),
    )
    engine = RolloutWorker(setup)
    try:
        info, _ = engine.start()
        with lone_worker(config, model_path) as worker:
            yield OneRank(worker), OneEngine(engine, info.layout)
    finally:
        engine.stop()


def start_run(config: TrainConfig, policy: Any, engines: Any) -> str:
    """What a run does before its first optimizer step: the first sync and both probes."""
    prompts = [Prompt(prompt_id=n, token_ids=ids, text="", answer="") for n, ids in enumerate(PROMPTS)]
    task: Any = SimpleNamespace(dataset=SimpleNamespace(train=prompts), stop_token_ids=(), routes=Routing.live)
    sync_weights(policy, engines, policy_version=0)
    noise = probe_logprobs(config, task, policy, engines, policy_version=0).mean_gap
    return str(probe_adapter(config, task, policy, engines, policy_version=0, noise=noise))
