"""Engines in int8 and fp8 in a deep model: no replay has their log-probs, and the diagnosis still names the format."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_diagnosis import save_model
from torch import Tensor

from rollout.config import DType, Quantization
from trainer.diagnose.case import misfit
from trainer.diagnose.diagnosis import Diagnosis, Settings, diagnose
from trainer.diagnose.evidence import evidence_of
from trainer.diagnose.logprob_scorer import LogprobScorer
from trainer.diagnose.scoring import Scoring
from trainer.replay.bundle import Bundle

RESPONSES, LENGTH, PROMPT = 16, 24, 4
TOKENS = RESPONSES * LENGTH


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Deep enough that one rounding changes many behind it."""
    return save_model(tmp_path_factory.mktemp("model"), layers=12)


def bundle_of(engine: Tensor | None, trainer: Tensor | None) -> Bundle:
    draw = torch.Generator().manual_seed(1)
    nothing = torch.full((TOKENS,), -1.0)
    return Bundle(
        lengths=torch.tensor([LENGTH] * RESPONSES),
        rollout_logprobs=nothing if engine is None else engine,
        old_logprobs=nothing if trainer is None else trainer,
        token_ids=torch.randint(64, (TOKENS,), generator=draw),
        prompt_ids=torch.randint(64, (RESPONSES * PROMPT,), generator=draw),
        prompt_lengths=torch.tensor([PROMPT] * RESPONSES),
        metadata={"producer": "test", "temperature": "1.0"},
    )


def scorer_of(path: Path, engine: Tensor | None = None, trainer: Tensor | None = None) -> LogprobScorer:
    return LogprobScorer([[path]], evidence_of(bundle_of(engine, trainer), max_tokens=TOKENS))


def in_float16(kind: Quantization) -> Scoring:
    """An engine in an order that the ladder does not replay."""
    return Scoring().with_body(quantization=kind).computed_in(DType.float16)


def explained(path: Path, engine: Tensor, trainer: Tensor, said: Quantization = Quantization.none) -> Diagnosis:
    settings = Settings(temperature=1.0, engine_dtype=DType.float16, quantization=said)
    return diagnose(scorer_of(path, engine, trainer), settings, progress=lambda text: None)


@pytest.mark.parametrize("kind", [Quantization.int8, Quantization.fp8])
def test_the_format_is_named_though_no_replay_has_its_log_probs(deep: Path, kind: Quantization) -> None:
    scorer = scorer_of(deep)
    trainer, engine, replayed = scorer.score([Scoring(), in_float16(kind), Scoring().with_body(quantization=kind)])
    whole, left = (float(misfit(engine - each).mean()) for each in (trainer, replayed))
    assert left > whole / 5, "a replay has these log-probs, so the test shows nothing"
    found = explained(deep, engine, trainer)
    assert [(part.side, part.name) for part in found.faults] == [("engine", "quantization")]
    assert f"in {kind.value}" in found.faults[0].what
    assert found.faults[0].share > 0.8
    assert not explained(deep, engine, trainer, said=kind).faults


def test_noise_of_that_size_is_not_called_a_format(deep: Path) -> None:
    scorer = scorer_of(deep)
    trainer, engine = scorer.score([Scoring(), in_float16(Quantization.int8)])
    shuffled = (engine - trainer)[torch.randperm(TOKENS, generator=torch.Generator().manual_seed(2))]
    found = explained(deep, trainer + shuffled, trainer)
    assert not found.faults and found.unexplained.k3 > 0.9 * found.k3
