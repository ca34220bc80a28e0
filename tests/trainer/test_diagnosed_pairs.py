"""parity diagnose with two causes at once: what was fitted for one has to be fitted again beside the other."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_diagnosis import save_model
from test_rounded_activations import TOKENS, bundle_of, scorer_of

from rollout.config import DType, Quantization
from trainer.diagnose.case import Case
from trainer.diagnose.diagnosis import Diagnosis, Settings, diagnose
from trainer.diagnose.evidence import evidence_of
from trainer.diagnose.logprob_scorer import LogprobScorer
from trainer.diagnose.results import answer, facts, part_rows
from trainer.diagnose.rungs import fitted_temperature
from trainer.diagnose.scoring import EditKind, Scoring, TensorEdit

DOWN = "model.layers.1.mlp.down_proj.weight"
OLD = Scoring().with_body(weights=1)


def older_of(path: Path, to: Path, *, noise: float, rank: int = 0) -> Path:
    """Weights that lie a little away everywhere, or in the attention by an adapter of `rank`."""
    model = LogprobScorer([[path]], evidence_of(bundle_of(None, None), max_tokens=TOKENS))._load(path)
    draw = torch.Generator().manual_seed(5)
    for name, each in model.named_parameters():
        if rank and not name.endswith(("q_proj.weight", "v_proj.weight")):
            continue
        step = torch.randn(each.shape, generator=draw)
        if rank:
            step = torch.randn(len(each), rank, generator=draw) @ torch.randn(rank, each.shape[1], generator=draw)
        each.data += noise * (each.std() if each.numel() > 1 else 1).nan_to_num(0.0) * step
    model.save_pretrained(to)
    return to


def explained(paths: list[Path], engine: Scoring, *, settings: Settings, noise: float = 0.0) -> Diagnosis:
    def scorer(*both: torch.Tensor | None) -> LogprobScorer:
        return LogprobScorer([paths], evidence_of(bundle_of(*both), max_tokens=TOKENS))

    trainer, scores = scorer(None, None).score([Scoring(), engine])
    scores = torch.where(scores.isnan(), trainer, scores)
    draw = torch.Generator().manual_seed(3)
    scores = scores + noise * torch.randn(TOKENS, generator=draw, dtype=torch.float64)
    return diagnose(scorer(scores, trainer), settings, progress=lambda text: None)


PLAIN = Settings(temperature=1.0)
SCALED = TensorEdit(name=DOWN, kind=EditKind.scaled, factor=1.15)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "new")


@pytest.mark.parametrize(
    ("temperature", "noise"), [(1.02, 0.005), (1.05, 0.02), (1.15, 0.02), (0.8, 0.02), (1.15, 0.05), (1.4, 0.05)]
)
def test_a_temperature_beside_older_weights(tmp_path: Path, model: Path, temperature: float, noise: float) -> None:
    older = older_of(model, tmp_path / "older", noise=noise)
    found = explained([model, older], replace(OLD, temperature=temperature), settings=PLAIN)
    whats = {part.what for part in found.faults}
    assert whats == {f"has log-probs at temperature {temperature:g}, not 1", "has the weights older"}, answer(found)
    assert abs(found.unexplained.share) < 0.02


def test_a_temperature_behind_older_weights_that_explain_nearly_all(tmp_path: Path, model: Path) -> None:
    older = older_of(model, tmp_path / "older", noise=0.2)
    found = explained([model, older], replace(OLD, temperature=1.02), settings=PLAIN)
    assert {part.what for part in found.parts} == {"has log-probs at temperature 1.02, not 1", "has the weights older"}
    assert abs(found.unexplained.share) < 1e-4


def test_a_share_below_0_is_explained(tmp_path: Path, model: Path) -> None:
    found = explained(
        [model, older_of(model, tmp_path / "older", noise=0.2)], replace(OLD, temperature=1.4), settings=PLAIN
    )
    assert [part.name for part in found.parts if part.share < -0.2] == ["temperature"]
    assert any("works against another" in fact for fact in facts(found))


@pytest.mark.parametrize(
    ("given", "told"),
    [("trainer", ""), ("engine", "the engine's are: the trainer had other"), ("before", "it may not hold the weights")],
)
def test_weights_that_the_trainer_did_not_have_are_told(tmp_path: Path, model: Path, given: str, told: str) -> None:
    """The trainer is a step before the engine, and `before` another one behind it."""
    paths = {"trainer": model, "engine": older_of(model, tmp_path / "engine", noise=0.1)}
    paths["before"] = older_of(paths["engine"], tmp_path / "before", noise=0.1)
    of_both = LogprobScorer([[*paths.values()]], evidence_of(bundle_of(None, None), max_tokens=TOKENS))
    trainer, engine = of_both.score([Scoring(), OLD])
    evidence = evidence_of(bundle_of(engine, trainer), max_tokens=TOKENS)
    found = diagnose(LogprobScorer([[paths[given]]], evidence), PLAIN, progress=lambda text: None)
    notes = [each for each in facts(found) if "are not those of the model" in each]
    assert len(notes) == bool(told) and all(told in each for each in notes)
    assert told or not found.parts, "nothing that was tried explains weights that nobody named"
    assert answer(found).endswith("No cause that was tried explains it.")


@pytest.mark.parametrize("noise", [0.005, 0.02])
def test_a_scaled_tensor_beside_older_weights(tmp_path: Path, model: Path, noise: float) -> None:
    older = older_of(model, tmp_path / "older", noise=noise)
    found = explained([model, older], OLD.with_edits(SCALED), settings=PLAIN)
    assert {part.what for part in found.faults} == {f"holds {DOWN} multiplied by 1.15", "has the weights older"}
    assert abs(found.unexplained.share) < 0.02


def test_a_shift_beside_an_adapter_that_is_missing(tmp_path: Path, model: Path) -> None:
    older = older_of(model, tmp_path / "older", noise=0.2, rank=2)
    found = explained([model, older], replace(OLD, shift=1), settings=PLAIN)
    assert {part.name for part in found.parts} == {"shift", "stale weights"}, answer(found)
    assert abs(found.unexplained.share) < 0.02


@pytest.mark.parametrize("temperature", [1.02, 1.1])
def test_a_temperature_beside_a_format_nobody_declared(model: Path, temperature: float) -> None:
    engine = Scoring(temperature=temperature).with_body(quantization=Quantization.int8)
    found = explained([model], engine, settings=PLAIN)
    assert {part.name for part in found.faults} == {"temperature", "quantization"}, answer(found)
    assert any(f"at temperature {temperature:g}, not 1" in part.what for part in found.faults), answer(found)


def test_a_part_of_the_way_and_a_temperature_are_fitted_together(tmp_path: Path, model: Path) -> None:
    older = older_of(model, tmp_path / "older", noise=0.02)
    engine = replace(OLD.with_body(share=0.6), temperature=1.1)
    found = explained([model, older], engine, settings=PLAIN)
    whats = {part.what for part in found.faults}
    assert whats == {"has log-probs at temperature 1.1, not 1", "has weights 60% of the way to older"}, answer(found)


def test_a_fitted_number_stands_with_its_interval(model: Path) -> None:
    [fault] = explained([model], Scoring(temperature=1.2), settings=PLAIN, noise=0.1).faults
    low, high = (float(word.strip("()")) for word in fault.what.rpartition("not 1 ")[2].split(" to "))
    assert 1.15 < low < high < 1.25


def test_the_standard_error_of_a_fitted_number_is_the_spread_of_the_number(model: Path) -> None:
    scorer = scorer_of(model)
    [hot] = scorer.score([Scoring(temperature=1.2)])
    held = 0
    for seed in range(40):
        draw = torch.Generator().manual_seed(seed)
        noisy = hot + 0.1 * torch.randn(TOKENS, generator=draw, dtype=torch.float64)
        case = Case(scorer=scorer, target=noisy, mask=torch.ones(TOKENS, dtype=torch.bool))
        found = fitted_temperature(case, Scoring())
        assert found is not None and found.number is not None
        scoring, [error] = case.refitted(found.scoring, [found.number])
        held += abs(found.number.get(scoring) - math.log(1.2)) < float(error)
    assert 20 <= held <= 34, "one standard error holds 68 %"


@pytest.mark.parametrize("dtype", [DType.float32, DType.bfloat16, DType.float16])
@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_named_where_nothing_is_wrong(tmp_path: Path, dtype: DType, seed: int) -> None:
    path = save_model(tmp_path / "model", seed=seed)
    older = older_of(path, tmp_path / "older", noise=0.02)
    found = explained([path, older], Scoring().computed_in(dtype), settings=replace(PLAIN, engine_dtype=dtype))
    assert not found.faults, answer(found)


def test_the_rounding_of_float32_reads_as_agreement(model: Path) -> None:
    found = explained([model], Scoring(), settings=PLAIN, noise=1e-8)
    assert 0 < found.k3 < 1e-15
    assert "agree" in answer(found)
    assert "not explained" not in {row[0] for row in part_rows(found)}
