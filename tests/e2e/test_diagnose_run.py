"""`parity diagnose` of a run: a written step, and one more step with the run's own engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer.cli.commands import run
from trainer.cli.diagnose import one_more

pytestmark = pytest.mark.slow

RUN = (
    "model.num_steps=400", "tracking.wandb=disabled", "eval.max_prompts=32", "rollout=torch", "run.num_steps=2",
    "eval.every=0", "batch.prompts_per_step=8", "dump.every=1", "checkpoint.every=2", "rollout.quantization=int4",
    "sampling.top_p=0.95",
)  # fmt: skip
"""What truncation kept is in the bundle, so truncation explains nothing."""


def test_a_run_is_explained(tmp_path: Path, local_ray: None, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "rün, (1)"
    assert run(["train", "arithmetic_grpo", *RUN, f"run.dir='{run_dir}'"]) == 0
    before = (run_dir / "metrics.jsonl").read_text()
    for words in (["step=1"], []):  # the first weights are those of the model; then from the checkpoint
        assert run(["diagnose", str(run_dir), *words]) == 0
        found = json.loads((run_dir / "diagnosis" / "diagnosis.json").read_text())
        first = found["parts"][0]
        assert (first["name"], first["side"], first["is_fault"]) == ("quantization", "engine", False)
        assert "truncation" not in {part["name"] for part in found["parts"]}
        assert "int4" in first["what"]
        assert abs(found["unexplained"]) < 0.1 * found["k3"]
    assert (tmp_path / "rün, (1)-diagnosis" / "dumps" / "step_000003").is_dir()
    assert one_more(run_dir).name == "rün, (1)-diagnosis-2"  # nothing is replaced
    assert not list((run_dir / "diagnosis").glob(".weights-*"))
    assert (run_dir / "metrics.jsonl").read_text() == before
    assert "Where K3 comes from" in (run_dir / "report.html").read_text()
    capsys.readouterr()
    assert run(["diagnose", str(run_dir), "step=2"]) == 2
    refusal = capsys.readouterr().err
    assert "sampled by the weights after" in refusal
    assert "Leave step= out" in refusal
