"""Data of strangers through the whole command: every bad row with its line, exit code 2, no process of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from data_cases import byte_tokenizer
from policy_cases import save_policy

from trainer.cli.commands import run


@pytest.mark.scenario(29)
def test_bad_rows_end_the_command_before_ray_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARITY_CACHE", str(tmp_path / "cache"))
    model = save_policy(tmp_path / "model")
    byte_tokenizer(model)
    rows = tmp_path / "rows.jsonl"
    lines = [
        '{"question": "a", "answer": "1"}',
        '{"question": "b", "answer": "1", "x": ' + "[" * 900 + "]" * 900 + "}",
        '{"question": "c", "answer": "\\ud83d"}',
        '{"question": "d", "answer"',
    ]
    rows.write_text("\r\n".join(lines), newline="", encoding="utf-8-sig")
    words = ["model=hf", f"model.path={model}", "rollout=torch", "data=file", f"data.train_path={rows}"]
    words += [f"data.eval_path={rows}", "reward.function=gsm8k", "tracking.wandb=disabled", f"run.dir={tmp_path}/run"]
    code = run(["train", "arithmetic_grpo", *words])
    shown = capsys.readouterr()
    assert code == 2, shown.err
    assert f"  - data.train_path must have rows that can be used, got '{rows}'. 3 rows cannot be used:" in shown.err
    assert "data.eval_path" not in shown.err, "the same file is named once"
    for line in (2, 3, 4):
        assert f"{rows}, line {line}: " in shown.err
    assert "Traceback" not in shown.err and "starting Ray" not in shown.err + shown.out
    assert not (tmp_path / "run").exists()
