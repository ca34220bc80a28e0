"""A study of two real runs of `parity train` from one command, and the same command again: nothing is repeated, one
page shows both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from runs import QUICK, metrics_of

from trainer.cli.commands import run


@pytest.mark.slow
def test_two_runs_are_compared_and_not_repeated(
    base_model_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "study", "arithmetic_grpo", *QUICK, "rollout=torch", "policy.num_workers=1", "run.num_steps=2",
        "batch.prompts_per_step=8", "batch.group_size=4", "eval.max_prompts=8", "checkpoint.every=0",
        "study.modes=[tis]", "study.seeds=[0]", "study.parallel=2", "study.dir=both",
    ]  # fmt: skip
    assert run(words) == 0, capsys.readouterr().err
    said = capsys.readouterr()
    names = ["tis-bfloat16-seed0", "tis-int8-seed0"]
    for name in names:
        assert f"{name} done in" in said.err
        assert len(metrics_of(Path("both") / name)) == 2
        assert Path("both", name, "report.html").is_file()
        log = Path("both", "logs", f"{name}.log").read_text().strip()
        assert log.endswith("report.html") and "step 2/2" in log and "log-probs proven on" in log
        assert "/correction: tis" in Path("both", name, "config.yaml").read_text()
        environment = json.loads(Path("both", name, "environment.json").read_text())
        assert environment["versions"]["torch"]
    assert said.out.splitlines()[-1] == "both/study.html"
    assert said.out.count(" tis ") == 2
    page = Path("both/study.html").read_text()
    assert "2 of 2 runs finished" in page and all(f'href="{name}/report.html"' in page for name in names)
    plain, quantised = json.loads(Path("both/study.json").read_text())["cells"]
    assert plain["heldout_last"] is not None and quantised["k3_max"] > 0
    # The quantised engine holds other weights: from the first evaluation on it is another policy.
    assert (
        metrics_of(Path("both") / names[0])[0]["mismatch/k3"] != metrics_of(Path("both") / names[1])[0]["mismatch/k3"]
    )
    before = {name: Path("both", name, "metrics.jsonl").stat().st_mtime_ns for name in names}
    assert run(words) == 0
    assert before == {name: Path("both", name, "metrics.jsonl").stat().st_mtime_ns for name in names}
    said = capsys.readouterr()
    assert "2 are finished" in said.err and "starts" not in said.err
    assert run([*words, "optim.lr=1e-3"]) == 2
    assert "holds 2 runs of another config" in capsys.readouterr().err
