"""`parity diagnose` names what was planted, and nothing where nothing was: benchmarks/diagnose.py, one draw of each."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_style import ROOT

sys.path.append(str(ROOT / "benchmarks"))

from diagnose import answer, world_of
from planted_faults import FAULTS, World, clean

from rollout.config import DType
from trainer.diagnose.results import answer as paragraph

pytestmark = pytest.mark.slow

ONLY_WITH_BPE = "other tokens"
"""The demo's tokenizer has one token per character: encoded again, the ids are the same."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, base_model_cache: Path) -> Iterator[World]:
    del base_model_cache
    made = world_of("demo", tmp_path_factory.mktemp("weights"))
    made.begin(0)
    yield made


@pytest.mark.parametrize("fault", [name for name in FAULTS if name != ONLY_WITH_BPE])
def test_the_planted_fault_is_named_first(world: World, fault: str) -> None:
    plant, names = FAULTS[fault]
    made = plant(world, DType.float32)
    found, _ = answer(made)
    assert found.faults, paragraph(found)
    assert found.faults[0].name in names, paragraph(found)
    assert not made.where or made.where in found.faults[0].what
    # Rounding in another order is known by its amount only: ten seeds left 0 to 20 % of it (docs/measured/diagnose.md).
    most = 0.25 if fault == "arithmetic" else 0.05
    assert abs(found.unexplained.k3) < most * found.k3


@pytest.mark.parametrize("engine", [DType.float32, DType.bfloat16])
def test_nothing_is_named_where_nothing_is_wrong(world: World, engine: DType) -> None:
    for _ in range(3):
        found, _ = answer(clean(world, engine))
        assert not found.faults, paragraph(found)
        assert engine is DType.float32 or any(part.is_declared for part in found.parts)
