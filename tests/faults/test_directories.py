"""Directories that a command cannot write to: one line and exit code 2 before Ray or torch, whatever the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from run_directory import write_run

from trainer.rundir.run_dir import lock_directory, release_directory, unusable_problem

HEAVY = ("torch", "ray", "transformers", "sglang", "datasets", "wandb")
COMMANDS = """
import contextlib, io, json, sys
from trainer.cli.commands import run
for words in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(words)
    loaded = [name for name in json.loads(sys.argv[2]) if name in sys.modules]
    print(json.dumps([code, out.getvalue(), err.getvalue(), loaded]))
"""


def run_all(commands: list[list[str]], cwd: Path) -> list[tuple[int, str, str, list[str]]]:
    """(exit code, stdout, stderr, heavy packages loaded) of each command, one after the other in a new process."""
    words = [sys.executable, "-c", COMMANDS, json.dumps(commands), json.dumps(HEAVY)]
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=120, check=True)
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


@pytest.mark.scenario(12)
@pytest.mark.sglang
def test_an_unusable_directory_is_one_line_before_anything_heavy_is_loaded(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", num_steps=2)
    (tmp_path / "file").write_text("kept")
    places = [f"{tmp_path}/file/below", "/proc/nothing/here", f"{tmp_path}/{'x' * 300}"]
    recipe, study = "arithmetic_grpo", ["study", "arithmetic_grpo", "study.modes=[tis]", "study.precisions=[float32]"]
    commands = [["train", recipe, f"run.dir={place}", *more] for place in places for more in ([], ["--dry-run"])]
    commands += [["train", recipe, "-m", "run.seed=0,1", f"hydra.sweep.dir={places[0]}"]]
    commands += [["train", recipe, "resume=auto", f"run.dir={places[0]}"]]
    commands += [["eval", recipe, "checkpoint=none", f"run.dir={places[0]}"]]
    commands += [["export", str(run_dir), places[0]]]
    commands += [["replay", str(run_dir), "step=1", f"out={places[0]}"]]
    commands += [["report", str(run_dir), "-o", "/proc/self/page.html"]]
    commands += [[*study, f"study.dir={place}", *more] for place in places[:2] for more in ([], ["--dry-run"])]
    before = sorted(tmp_path.rglob("*"))
    for words, (code, out, err, loaded) in zip(commands, run_all(commands, tmp_path), strict=True):
        assert (code, loaded) == (2, []), (words, out, err)
        assert not out or (words[0] == "train" and "--dry-run" in words), "only the plan of the run is printed"
        title, problem = err.splitlines()
        assert title.endswith("1 problem, nothing was started"), words
        assert "must be a directory that can be written to (" in problem and "Use another" in problem, words
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / "file").read_text() == "kept"


def test_a_directory_of_an_active_run_is_refused_with_the_process_id(tmp_path: Path) -> None:
    """Whether the command would begin there, go on there, or move aside what is there."""
    run_dir = write_run(tmp_path / "run", num_steps=2)
    train = ["train", "arithmetic_grpo", "rollout=torch", f"run.dir={run_dir}"]
    commands = [[*train, *more] for more in ([], ["--dry-run"], ["resume=auto"], ["resume=clean"])]
    lock = lock_directory(run_dir, key="run.dir")
    before = sorted(tmp_path.rglob("*"))
    try:
        for words, (code, _, err, loaded) in zip(commands, run_all(commands, tmp_path), strict=True):
            assert (code, loaded) == (2, []), (words, err)
            assert f"  - run.dir is in use by process {os.getpid()}, got '{run_dir}'. Wait for that process" in err
    finally:
        release_directory(lock, run_dir)
    assert sorted(tmp_path.rglob("*")) == [path for path in before if path.name != ".lock"]
    [(_, _, err, _)] = run_all([train], tmp_path)
    assert "run.dir must be absent or empty" in err, "the run has ended"


@pytest.mark.scenario(12)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_directory_of_another_user_is_unusable(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o555)
    for place in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        place.chmod(0o755)
    os.seteuid(65534)
    try:
        problem = unusable_problem("run.dir", tmp_path / "closed" / "a" / "b")
    finally:
        os.seteuid(0)
    assert problem is not None and "Permission denied" in problem.rule


def test_the_trial_leaves_no_trace(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for place in ("there", "there/a/b/c"):
        assert unusable_problem("run.dir", tmp_path / place) is None
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["there"]
    problem = unusable_problem("run.dir", tmp_path / "a\0b")
    assert problem is not None and "null byte" in problem.rule
