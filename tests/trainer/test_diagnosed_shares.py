"""parity diagnose: the share of each cause of K3, how sure it is, and what is said where it is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_diagnosis import save_model
from test_rounded_activations import TOKENS, bundle_of, scorer_of
from torch import Tensor

from algorithms.kl import k3
from rollout.config import DType, Quantization
from trainer.diagnose.case import Candidate
from trainer.diagnose.diagnosis import Diagnosis, Part, Settings, diagnose
from trainer.diagnose.evidence import evidence_of, k3_between, pooled
from trainer.diagnose.logprob_scorer import LogprobScorer
from trainer.diagnose.results import part_rows
from trainer.diagnose.scoring import Scoring
from trainer.diagnose.shares import Effect, Shares, shares

BOTH = Settings(temperature=1.0, engine_dtype=DType.bfloat16, quantization=Quantization.int8)
INT8 = Scoring().with_body(quantization=Quantization.int8)
HALF = Scoring().computed_in(DType.bfloat16)
EXACT = Scoring().with_body(rounded=DType.bfloat16)
"""The definition of a model whose weights are 16-bit numbers."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose weights are 16-bit numbers, so that only the arithmetic rounds."""
    path = save_model(tmp_path_factory.mktemp("model"))
    model = LogprobScorer([[path]], evidence_of(bundle_of(None, None), max_tokens=TOKENS))._load(path)
    model.bfloat16().float().save_pretrained(path)
    return path


def found(path: Path, engine: Tensor, settings: Settings) -> Diagnosis:
    [trainer] = scorer_of(path).score([Scoring()])
    return diagnose(scorer_of(path, engine, trainer), settings, progress=lambda text: None)


def part_of(diagnosis: Diagnosis, name: str) -> Part:
    [part] = [part for part in diagnosis.parts if part.name == name]
    return part


def noise(size: float) -> Tensor:
    return size * torch.randn(TOKENS, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


@pytest.mark.parametrize("other", ["quantization", "temperature"])
def test_two_causes_of_one_size_are_told_apart(path: Path, other: str) -> None:
    """The share of each is that of Shapley in K3 of the engine with both, with either, and with none."""
    scorer = scorer_of(path)
    trainer, half, hot = scorer.score([Scoring(), HALF, Scoring(temperature=1.01)])
    one = replace(Scoring(), temperature=1 + 0.01 * float((half - trainer).std() / (hot - trainer).std()))
    if other == "quantization":
        one = INT8
    both, alone = scorer.score([one.computed_in(DType.bfloat16), one])
    rest = noise(0.3 * float((half - trainer).std()))
    diagnosis = found(path, both + rest, replace(BOTH, quantization=one.body.quantization))
    mask = torch.ones(TOKENS, dtype=torch.bool)
    whole, first, last = (k3_between(each, trainer, mask) for each in (both, alone, half))
    share = (first + whole - last) / 2 / whole
    assert 0.05 < share < 0.95, "the sizes are too different to show anything"
    for name, planted in ((other, share), ("arithmetic", 1 - share)):
        part = part_of(diagnosis, name)
        assert part.low < planted < part.high < 1.05
        assert part.low > 0 or planted < 0.2
        assert part.high - part.low < 0.4


def test_what_is_declared_is_a_row_also_where_it_is_not_there(path: Path) -> None:
    [half] = scorer_of(path).score([HALF])
    diagnosis = found(path, half, BOTH)
    assert {row[0] for row in part_rows(diagnosis)} >= {"quantization", "arithmetic", "rounded weights"}
    assert part_of(diagnosis, "quantization").high < 0.1
    assert part_of(diagnosis, "arithmetic").low > 0.8


def test_what_no_replay_shows_is_not_given_to_the_cause_that_rounds(path: Path) -> None:
    """Differences that nobody knows are more than the rounding of the type: the rest has its own row."""
    trainer, half = scorer_of(path).score([Scoring(), HALF])
    strange = noise(2 * float((half - trainer).std()))
    diagnosis = found(path, half + strange, replace(BOTH, quantization=Quantization.none))
    planted = float(strange.square().mean()) / float((half + strange - trainer).square().mean())
    assert diagnosis.unexplained.share == pytest.approx(planted, abs=0.1)
    assert part_of(diagnosis, "arithmetic").high < 0.4
    assert part_rows(diagnosis)[-2][0] == "not explained"


def test_a_small_cause_behind_rounding_of_its_size_is_found(path: Path) -> None:
    half, hot = scorer_of(path).score([HALF, replace(HALF, temperature=1.02)])
    settings = replace(BOTH, quantization=Quantization.none)
    assert not found(path, half + noise(0.3 * float((hot - half).std())), settings).faults
    diagnosis = found(path, hot + noise(0.3 * float((hot - half).std())), settings)
    assert [part.name for part in diagnosis.faults] == ["temperature"]
    assert part_of(diagnosis, "arithmetic").low > 0


def test_noise_of_the_size_of_a_type_that_both_sides_have_is_its_arithmetic(path: Path) -> None:
    """Both replay the type alike, and their noise in another order is known by its amount only."""
    exact, half = scorer_of(path).score([Scoring(), HALF])
    size = float((half - exact).std())
    declared = Settings(temperature=1.0, engine_dtype=DType.bfloat16, trainer_dtype=DType.bfloat16)
    sides = (half + noise(size), half + noise(size).flip(0))
    diagnosis = diagnose(scorer_of(path, *sides), declared, progress=lambda text: None)
    assert not diagnosis.faults and not any("not those of the model" in note for note in diagnosis.notes)
    assert sum(part.share for part in diagnosis.parts if part.name == "arithmetic") > 0.7


def test_an_order_has_no_more_than_its_side_is_away_from_the_definition(path: Path) -> None:
    """int8 beside 16 bits on both sides, which round nearly alike: the type by itself would make much more of K3."""
    exact, half, both = scorer_of(path).score([Scoring(), HALF, INT8.computed_in(DType.bfloat16)])
    little = noise(0.2 * float((half - exact).std()))
    declared = replace(BOTH, trainer_dtype=DType.bfloat16)
    trainer, mask = half + little, torch.ones(TOKENS, dtype=torch.bool)
    diagnosis = diagnose(scorer_of(path, both + little.flip(0), trainer), declared, progress=lambda text: None)
    away = k3_between(trainer, half, mask)
    assert k3_between(half, exact, mask) > 10 * away, "so much would be the type's"
    orders = [part for part in diagnosis.parts if part.name == "arithmetic"]
    assert len(orders) == 2 and all(part.k3 < 1.5 * away for part in orders)
    assert part_of(diagnosis, "quantization").low > 0.5


def made_up(tokens: int, *, seed: int) -> Shares:
    """Two causes that do nearly the same, and much that neither explains."""
    draw = torch.Generator().manual_seed(seed)
    one, own, rest = (torch.randn(tokens, generator=draw, dtype=torch.float64) / 100 for _ in range(3))
    other = 0.99 * one + 0.14 * own
    effects: Sequence[Effect] = [
        Effect(
            side="engine",
            cause=Candidate(name=name, what="", remedy="", scoring=Scoring()),
            change=change,
            size=change * (one + other) / 2,
        )
        for name, change in (("one", one), ("other", other))
    ]
    deviation = one + other + rest
    mask = torch.ones(tokens, dtype=torch.bool)
    return shares({"engine": deviation}, effects, -deviation, mask, [16] * (tokens // 16))


def test_causes_that_cannot_be_told_apart_are_named_with_the_tokens_that_would_do() -> None:
    """Each has half of the 80 % that both explain."""
    few = [made_up(320, seed=seed) for seed in range(20)]
    assert sum(each.parts[0].low < 0.4 < each.parts[0].high for each in few) >= 17
    named = [tokens for each in few for one, other, tokens in each.mixed if (one, other) == (0, 1)]
    assert len(named) >= 15
    assert all(each > 320 for each in named)
    enough = 16 * round(2 * sum(named) / len(named) / 16)
    many = [made_up(enough, seed=seed) for seed in range(20)]
    assert sum(bool(each.mixed) for each in many) <= 2
    assert sum(each.parts[0].low < 0.4 < each.parts[0].high for each in many) >= 17


def test_the_output_says_what_cannot_be_told_apart(path: Path, tmp_path: Path) -> None:
    """Old weights behind fp8, and few tokens."""
    model = LogprobScorer([[path]], scorer_of(path).evidence)._load(path)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(1 + 0.02 * torch.randn(each.shape, generator=draw))
    model.save_pretrained(tmp_path / "old")
    paths = [path, tmp_path / "old"]
    fp8 = Scoring().with_body(quantization=Quantization.fp8)
    scorer = LogprobScorer([paths], scorer_of(path).evidence)
    trainer, engine = scorer.score([Scoring(), fp8.with_body(weights=1)])
    evidence = evidence_of(bundle_of(engine, trainer), max_tokens=96)
    settings = Settings(temperature=1.0, quantization=Quantization.fp8)
    diagnosis = diagnose(LogprobScorer([paths], evidence), settings, progress=lambda text: None)
    assert any("cannot be told apart with 96 tokens" in note for note in diagnosis.notes)


def test_steps_with_other_weights_are_judged_as_one(path: Path, tmp_path: Path) -> None:
    """Each step is read with its own weights, a cause of either is looked for in both, and more tokens say more."""
    later = save_model(tmp_path / "later", seed=1)
    steps = []
    for weights, seed in ((path, 0), (later, 1)):
        trainer, engine = LogprobScorer([[weights]], scorer_of(path).evidence).score([Scoring(), INT8])
        rest = 3 * float((engine - trainer).std()) * torch.randn(TOKENS, generator=torch.Generator().manual_seed(seed))
        steps.append(evidence_of(bundle_of(engine + rest, trainer), max_tokens=TOKENS))
    both = pooled(steps)
    scorer = LogprobScorer([[path], [later]], both)
    alone = [LogprobScorer([[weights]], each) for weights, each in zip((path, later), steps, strict=True)]
    ways = [Scoring(), INT8.computed_in(DType.bfloat16), Scoring().with_body(prefix=0), Scoring(head=DType.bfloat16)]
    wanted = torch.cat([each.score(ways) for each in alone], dim=1)
    assert torch.equal(scorer.score(ways), wanted)
    assert both.num_tokens == 2 * TOKENS
    assert both.k3 == pytest.approx(k3_between(both.engine, both.trainer, both.mask))
    settings = Settings(temperature=1.0, quantization=Quantization.int8)
    parts = [part_of(diagnose(each, settings, progress=lambda text: None), "quantization") for each in (*alone, scorer)]
    assert all(one.low < other.high for one in parts for other in parts), "steps do not contradict each other"
    assert parts[2].high - parts[2].low < max(part.high - part.low for part in parts[:2])


def test_tokens_that_a_cause_hardly_changes_do_not_decide_whether_it_is_there() -> None:
    """Most tokens of a sure policy: what no cause explains is far above the change, and may go the other way."""
    count = 2000
    draw = torch.Generator().manual_seed(2)
    change = 1e-6 * torch.randn(count, generator=draw, dtype=torch.float64)
    change[::20] = torch.randn(count // 20, generator=draw, dtype=torch.float64)
    deviation = torch.where(change.abs() < 1e-3, change - 1e-4 * change.sign(), change)
    cause = Candidate(name="stale weights", what="", remedy="", scoring=Scoring())
    effect = Effect(side="engine", cause=cause, change=change, size=k3(-change))
    result = shares({"engine": deviation}, [effect], -deviation, torch.ones(count, dtype=torch.bool), [count])
    [part] = result.parts
    assert part.share > 0.9 and part.low > 0.9 and abs(result.unexplained.share) < 0.1
