"""The probe before training: a real engine and a real rank on the same weights, and engines that lie in every way."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from policy_cases import lone_worker, make_config, save_policy
from torch import Tensor

from rollout.config import DType, Routing, SamplingConfig
from rollout.torch.config import TorchEngineConfig
from rollout.torch.engine import TorchEngine
from rollout.types import GenerateRequest, Generation, Prompt
from trainer.batch.train_batch import MicroBatch
from trainer.config.train import TrainConfig
from trainer.policy.worker import PolicyWorker
from trainer.run.probe import ProbeError, judge, probe_logprobs, rounding_tolerance, tolerance_of

PROMPTS = [Prompt(prompt_id=i, token_ids=[i + 2, 40, 7, i + 9], text="", answer="") for i in range(6)]


class Ranks:
    """One rank in this process in the place of the policy group."""

    def __init__(self, worker: PolicyWorker) -> None:
        self._worker = worker

    def logprobs(
        self, micros: Sequence[MicroBatch], *, temperature: float | None = None, adapter_factor: float = 1.0
    ) -> list[Tensor]:
        return self._worker.logprobs(list(micros), temperature, adapter_factor)

    def resident(self) -> AbstractContextManager[None]:
        return nullcontext()


class Engines:
    """One engine in this process in the place of the engine group; `asks` and `tells` are how it lies."""

    takes_turns = False

    def __init__(
        self,
        engine: TorchEngine,
        asks: Callable[[GenerateRequest], GenerateRequest] = lambda request: request,
        tells: Callable[[Generation], Generation] = lambda generation: generation,
    ) -> None:
        self._engine, self._asks, self._tells = engine, asks, tells

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        return [self._tells(one) for one in self._engine.generate([self._asks(request) for request in requests])]

    def resident(self) -> AbstractContextManager[None]:
        return nullcontext()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def config(model_path: Path) -> TrainConfig:
    made = make_config(model_path, num_workers=1)
    made.sampling = SamplingConfig(temperature=0.7, max_new_tokens=12)
    return made


@pytest.fixture(scope="module")
def ranks(config: TrainConfig, model_path: Path) -> Iterator[Ranks]:
    with lone_worker(config, model_path) as worker:
        # Wide weights: a peaked next-token law, so that temperatures differ.
        with torch.no_grad():
            for parameter in worker._policy.model.parameters():
                parameter.mul_(6.0 if parameter.dim() > 1 else 1.0)
        yield Ranks(worker)


@pytest.fixture(scope="module")
def engine(model_path: Path) -> Iterator[TorchEngine]:
    yield from started(model_path, DType.float32)


@pytest.fixture(scope="module")
def coarse_engine(model_path: Path) -> Iterator[TorchEngine]:
    yield from started(model_path, DType.bfloat16)


def started(model_path: Path, dtype: DType) -> Iterator[TorchEngine]:
    made = TorchEngine(TorchEngineConfig(dtype=dtype), index=0, device="cpu", num_threads=1)
    made.start(model_path)
    assert made._model is not None
    with torch.no_grad():
        for parameter in made._model.parameters():
            parameter.mul_(6.0 if parameter.dim() > 1 else 1.0)
    yield made
    made.stop()


def run(config: TrainConfig, ranks: Ranks, engines: Engines) -> Any:
    task = SimpleNamespace(dataset=SimpleNamespace(train=PROMPTS), stop_token_ids=(), routes=Routing.live)
    return probe_logprobs(config, task, ranks, engines, policy_version=0)


def test_engine_and_rank_on_the_same_weights_agree(config: TrainConfig, ranks: Ranks, engine: TorchEngine) -> None:
    report = run(config, ranks, Engines(engine))
    assert report.num_samples == 4 and report.num_tokens == 4 * 12
    assert report.mean_gap < 1e-5 and report.k3 < 1e-6
    assert re.match(r"log-probs proven on 48 tokens of 4 responses: .* K3 .* in \d+\.\d s$", str(report))


def test_an_exact_engine_agrees_in_every_bit_or_is_refused(
    config: TrainConfig, ranks: Ranks, engine: TorchEngine
) -> None:
    """Engine and rank compute in the usual arithmetic here: the promise is not kept."""
    promised = replace(config, rollout=TorchEngineConfig(exact=True, dtype=config.policy.dtype))
    with pytest.raises(ProbeError, match=r"rollout.exact=true, and the log-probs of \d+ of 48 tokens are not those of"):
        run(promised, ranks, Engines(engine))


def shifted(generation: Generation) -> Generation:
    assert generation.logprobs is not None
    return replace(generation, logprobs=[-1.0, *generation.logprobs[:-1]])


def hotter(request: GenerateRequest) -> GenerateRequest:
    return replace(request, sampling=replace(request.sampling, temperature=1.0))


def colder(request: GenerateRequest) -> GenerateRequest:
    return replace(request, sampling=replace(request.sampling, temperature=0.49))


@pytest.mark.parametrize(
    ("lie", "text"),
    [
        ({"asks": hotter}, r"These are log-probs at temperature 1, not 0\.7: .*SGLANG_RETURN_ORIGINAL_LOGPROB"),
        ({"asks": colder}, r"These are log-probs at temperature 0\.49, not 0\.7: the engine divides by it twice"),
        ({"tells": shifted}, "These are the log-probs of the tokens before: the engine's are shifted by one"),
        (
            {"tells": lambda g: replace(g, logprobs=[*g.logprobs[1:], -1.0])},
            "These are the log-probs of the tokens after",
        ),
        (
            {"tells": lambda g: replace(g, logprobs=[value * 0.5 - 2.0 for value in g.logprobs])},
            "No other temperature and no shift explains it: the engine holds other weights",
        ),
        ({"tells": lambda g: replace(g, logprobs=None)}, "invalid: no_logprobs"),
        ({"tells": lambda g: replace(g, logprobs=[float("nan")] * len(g.token_ids))}, "invalid: bad_logprob"),
        ({"tells": lambda g: replace(g, token_versions=[3] * len(g.token_ids))}, "invalid: wrong_version"),
    ],
)
def test_a_lie_is_refused_and_named(
    config: TrainConfig, ranks: Ranks, engine: TorchEngine, lie: dict[str, Any], text: str
) -> None:
    with pytest.raises(ProbeError, match=text):
        run(config, ranks, Engines(engine, **lie))


def test_an_engine_that_rounds_where_float32_was_promised_is_refused(
    config: TrainConfig, ranks: Ranks, coarse_engine: TorchEngine
) -> None:
    with pytest.raises(ProbeError, match="rounding to 16 bits where both should compute in float32"):
        run(config, ranks, Engines(coarse_engine))
    honest = replace(config, rollout=replace(config.rollout, dtype=DType.bfloat16))
    report = run(honest, ranks, Engines(coarse_engine))
    assert 1e-3 < report.mean_gap < report.tolerance == rounding_tolerance(DType.bfloat16, 0.7)
    with pytest.raises(ProbeError, match=r"not 0\.7"):
        run(honest, ranks, Engines(coarse_engine, asks=hotter))


def test_a_tolerance_of_the_users_own_is_used(config: TrainConfig, ranks: Ranks, coarse_engine: TorchEngine) -> None:
    wider = replace(config, rollout=replace(config.rollout, probe_tolerance=0.5))
    assert run(wider, ranks, Engines(coarse_engine)).tolerance == tolerance_of(wider) == 0.5


def test_a_tolerance_below_the_rounding_is_called_that() -> None:
    generator = torch.Generator().manual_seed(0)
    truth = [-torch.rand(16, generator=generator) for _ in range(4)]
    rounded = [values + 2e-7 * (-1) ** torch.arange(16) for values in truth]
    with pytest.raises(ProbeError) as refused:
        judge(rounded, lambda temperature: truth, temperature=1.0, tolerance=1e-9, lowest=DType.float32)
    assert "That is rounding in float32, for which 0.001 is allowed" in str(refused.value)
    assert "16 bits" not in str(refused.value)


def test_an_engine_that_leaves_a_trained_adapter_out_is_named() -> None:
    generator = torch.Generator().manual_seed(0)
    truth, base = ([-torch.rand(16, generator=generator) for _ in range(4)] for _ in range(2))
    with pytest.raises(ProbeError, match="log-probs of the model without its adapter: the engine leaves it out"):
        judge(
            base, lambda temperature: truth, temperature=1.0, tolerance=0.1, lowest=DType.bfloat16,
            without_adapter=lambda: base,
        )  # fmt: skip


def test_one_wrong_engine_among_many_is_not_averaged_away() -> None:
    generator = torch.Generator().manual_seed(0)
    truth = [-torch.rand(16, generator=generator) for _ in range(40)]
    noisy = [values + 0.02 * torch.randn(16, generator=generator) for values in truth]
    arguments = {"temperature": 1.0, "tolerance": 0.125, "lowest": DType.bfloat16}
    judge(noisy, lambda temperature: truth, **arguments)
    noisy[7] = truth[7] - 0.6
    with pytest.raises(ProbeError, match="one engine of several differs"):
        judge(noisy, lambda temperature: truth, **arguments)


def test_at_temperature_one_nothing_is_explained_by_itself() -> None:
    values = [torch.full((10,), -1.0)]
    with pytest.raises(ProbeError, match="No other temperature"):
        judge([values[0] - 1], lambda _: values, temperature=1.0, tolerance=0.1, lowest=DType.bfloat16)
