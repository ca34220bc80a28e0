"""parity diagnose of a mixture: what of K3 the choice of experts makes, with routes that are known and that are not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_routing import altered, make_samples, routed, scoring
from tiny_model import write_tiny_model
from torch import Tensor

from algorithms.kl import k3
from rollout.config import DType
from rollout.types import Sample
from trainer.batch.packing import micro_batch
from trainer.batch.route_tensors import route_tensors
from trainer.cli.commands import run
from trainer.diagnose.diagnosis import Diagnosis, Settings, diagnose
from trainer.diagnose.evidence import evidence_of
from trainer.diagnose.logprob_scorer import LogprobScorer, OtherWeightsError
from trainer.diagnose.results import part_rows, record
from trainer.diagnose.scoring import Scoring
from trainer.replay.bundle import Bundle, write_bundle

SETTINGS = Settings(temperature=1.0)
LENGTHS = ((4, 25), (4, 30), (6, 22), (5, 28))


class Mixture:
    """Responses of a mixture, scored by the trainer's own model with experts that no router chose, and with its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        write_tiny_model(path, model_type="qwen3_moe")
        self.model = scoring(path)
        routed_samples = routed(self.model, make_samples(LENGTHS))
        self.samples = [altered(each, seed=number) for number, each in enumerate(routed_samples)]
        self.given = self.logprobs(self.samples)
        self.live = self.logprobs([replace(each, routes=None) for each in self.samples])

    def logprobs(self, samples: list[Sample]) -> Tensor:
        parts = []
        for sample in samples:
            micro = micro_batch([sample])
            with torch.no_grad():
                parts.append(self.model(micro, temperature=1.0).logprobs[micro.response_index])
        return torch.cat(parts)

    def bundle(self, *, engine: Tensor, trainer: Tensor, with_routes: bool = True, **metadata: str) -> Bundle:
        ids, masks = ([torch.as_tensor(getattr(each, name)) for each in self.samples] for name in
                      ("token_ids", "response_mask"))  # fmt: skip
        routes = [each.routes for each in self.samples if each.routes is not None]
        return Bundle(
            lengths=torch.tensor([length for _, length in LENGTHS]),
            rollout_logprobs=engine,
            old_logprobs=trainer,
            token_ids=torch.cat([each[mask] for each, mask in zip(ids, masks, strict=True)]),
            prompt_ids=torch.cat([each[~mask] for each, mask in zip(ids, masks, strict=True)]),
            prompt_lengths=torch.tensor([length for length, _ in LENGTHS]),
            **(route_tensors(routes) if with_routes else {}),
            metadata={"producer": "test", "temperature": "1.0", **metadata},
        )

    def diagnosed(self, bundle: Bundle, settings: Settings = SETTINGS) -> Diagnosis:
        scorer = LogprobScorer([[self.path]], evidence_of(bundle, max_tokens=1000))
        return diagnose(scorer, settings, progress=lambda text: None)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Mixture:
    return Mixture(tmp_path_factory.mktemp("mixture") / "model")


def test_the_scorer_uses_the_experts_that_the_trainer_uses(mixture: Mixture) -> None:
    bundle = mixture.bundle(engine=mixture.given, trainer=mixture.live)
    scorer = LogprobScorer([[mixture.path]], evidence_of(bundle, max_tokens=1000))
    whole, cached, live = scorer.score(
        [Scoring().with_body(replays=True), Scoring().with_body(replays=True, prefix=0), Scoring()]
    )
    assert torch.allclose(whole, mixture.given.double(), atol=1e-4)
    assert torch.allclose(cached, mixture.given.double(), atol=1e-4)
    assert torch.allclose(live, mixture.live.double(), atol=1e-4)
    assert float((whole - live).abs().max()) > 0.1
    few = scorer.of_responses([2, 0], most=20)
    assert torch.allclose(few.score([Scoring().with_body(replays=True)])[0], few.evidence.engine, atol=1e-4)


def test_experts_that_differ_are_a_part_of_the_mismatch(mixture: Mixture) -> None:
    found = mixture.diagnosed(mixture.bundle(engine=mixture.given, trainer=mixture.live))
    [part] = found.parts
    assert (part.name, part.side, part.is_fault) == ("routing", "trainer", False)
    assert part.k3 == pytest.approx(found.k3, rel=1e-3)
    assert found.routing is not None and found.routing.is_recorded and not found.routing.is_replayed
    assert found.routing.tokens_rerouted > 0.9 and found.routing.share > 0.99
    assert part_rows(found)[1][0] == "routing"


def test_what_replay_took_away_is_told(mixture: Mixture) -> None:
    engine = mixture.given + 0.01 * torch.randn(len(mixture.given), generator=torch.Generator().manual_seed(0))
    bundle = mixture.bundle(engine=engine, trainer=mixture.given, routing="replay")
    found = mixture.diagnosed(bundle, replace(SETTINGS, replays_routes=True))
    assert found.routing is not None and found.routing.is_replayed
    assert found.routing.k3_live == pytest.approx(float(k3(mixture.live - engine).mean()), rel=1e-2)
    assert found.routing.k3_replayed == pytest.approx(found.k3)
    assert "routing" not in [part.name for part in found.parts], "it is no part of what is left"
    assert part_rows(found)[-1][0] == "routing"
    told = record(found)["routing"]
    assert isinstance(told, dict) and told["share"] == found.routing.share


def test_routes_that_nobody_wrote_down_are_estimated_or_not_known(mixture: Mixture) -> None:
    bundle = mixture.bundle(engine=mixture.live, trainer=mixture.live, with_routes=False)
    scorer = LogprobScorer([[mixture.path]], evidence_of(bundle, max_tokens=1000))
    [coarse] = scorer.score([Scoring().computed_in(DType.bfloat16)])
    bundle = mixture.bundle(engine=coarse, trainer=mixture.live, with_routes=False)
    found = mixture.diagnosed(bundle, replace(SETTINGS, engine_dtype=DType.bfloat16))
    assert found.routing is not None and not found.routing.is_recorded
    assert "routing" in [part.name for part in found.parts]
    assert any("estimated" in note for note in found.notes)
    alike = mixture.diagnosed(bundle)  # both sides are said to compute in float32
    assert alike.routing is None
    assert any("was not written down" in note for note in alike.notes)


def test_a_bundle_says_that_routes_are_missing(
    mixture: Mixture, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "b.safetensors"
    words = ["diagnose", str(path), f"model={mixture.path}", "rollout_dtype=bfloat16", f"out={tmp_path / 'out'}"]
    for scores, with_routes in ((mixture.given, True), (mixture.live, False)):
        write_bundle(
            mixture.bundle(engine=scores + 0.01, trainer=scores, with_routes=with_routes, routing="replay"), path
        )
        assert run(words) == 0
        notes = json.loads((tmp_path / "out" / "diagnosis.json").read_text())["notes"]
        assert any("routes=true" in note for note in notes) is not with_routes
        capsys.readouterr()
    # The engine chose what no replay can guess: refused, and why.
    write_bundle(
        mixture.bundle(engine=mixture.given + 0.01, trainer=mixture.given, with_routes=False, routing="replay"), path
    )
    assert run(words) == 2
    assert "routes=true" in capsys.readouterr().err


def test_routes_of_another_model_are_refused(mixture: Mixture) -> None:
    bundle = mixture.bundle(engine=mixture.given, trainer=mixture.given)
    assert bundle.routes is not None
    with pytest.raises(OtherWeightsError, match="routes"):
        mixture.diagnosed(replace(bundle, routes=bundle.routes[:, :1]))
    with pytest.raises(OtherWeightsError, match="expert 99 of 8"):
        mixture.diagnosed(replace(bundle, routes=bundle.routes.clone().index_fill_(2, torch.tensor([0]), 99)))
