"""`parity diagnose` of a run: dumped steps, and one more step with the run's own engine where none was dumped."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import rmtree

import pytest

from trainer.cli.commands import run
from trainer.cli.diagnose import one_more

pytestmark = pytest.mark.slow

RUN = (
    "model.num_steps=400", "tracking.wandb=disabled", "eval.max_prompts=32", "rollout=torch", "run.num_steps=3",
    "eval.every=0", "batch.prompts_per_step=8", "dump.every=1", "checkpoint.every=2", "rollout.quantization=int4",
    "sampling.top_p=0.95",
)  # fmt: skip
"""What truncation kept is in the bundle, so truncation explains nothing."""


def test_a_run_is_explained(tmp_path: Path, local_ray: None, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "rün, (1)"
    assert run(["train", "arithmetic_grpo", *RUN, f"run.dir='{run_dir}'"]) == 0
    before = (run_dir / "metrics.jsonl").read_text()

    def explained(*words: str) -> list[str]:
        assert run(["diagnose", str(run_dir), *words]) == 0
        found = json.loads((run_dir / "diagnosis" / "diagnosis.json").read_text())
        first = found["parts"][0]
        assert (first["name"], first["side"], first["is_fault"]) == ("quantization", "engine", False)
        assert "truncation" not in {part["name"] for part in found["parts"]}
        assert "int4" in first["what"]
        assert first["low"] <= first["share"] <= first["high"]
        assert abs(found["unexplained"]) < 0.1 * found["k3"]
        notes: list[str] = found["notes"]
        return notes

    assert "judged, as one: step 1" in explained("step=1")
    assert "judged, as one: step 1, 3" in explained(), "no checkpoint has the weights of step 2"
    assert not one_more(run_dir).name.endswith("-2")
    capsys.readouterr()
    assert run(["diagnose", str(run_dir), "step=2"]) == 2
    refusal = capsys.readouterr().err
    assert "sampled by the weights after" in refusal
    assert "Leave step= out" in refusal
    rmtree(run_dir / "dumps")
    assert "judged, as one: step 4" in explained()
    assert (tmp_path / "rün, (1)-diagnosis" / "dumps" / "step_000004").is_dir()
    assert one_more(run_dir).name == "rün, (1)-diagnosis-2"  # nothing is replaced
    assert not list((run_dir / "diagnosis").glob(".weights-*"))
    assert (run_dir / "metrics.jsonl").read_text() == before
    assert "Where K3 comes from" in (run_dir / "report.html").read_text()
