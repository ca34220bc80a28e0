"""The file that a path to no file probably means: named for data, for code and in the refusal of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from algorithms.config import Problem
from rollout.similar_file import similar_directory, similar_file
from rollout.task_config import SUFFIXES
from rollout.user_code.custom_code import similar_custom
from trainer.cli.commands import run
from trainer.start.task_check import find_model


@pytest.mark.parametrize(
    ("given", "there", "meant"),
    [
        ("trian.jsonl", ["train.jsonl", "eval.jsonl"], "Did you mean train.jsonl?"),
        ("Train.jsonl", ["train.jsonl"], "Did you mean train.jsonl?"),
        ("train.json", ["train.jsonl", "train1.json"], "Did you mean train.jsonl?"),
        ("train.jsnl", ["train.jsonl"], "Did you mean train.jsonl?"),
        ("x.jsonl", ["x.jsonl.gz", "x1.jsonl"], "There is x.jsonl.gz: unpack it."),
        ("x.csv", ["x.csv.zst"], "There is x.csv.zst: unpack it."),
        ("x.jsonl.gz", ["x.jsonl", "x.csv"], "Did you mean x.jsonl?"),
        ("a.csv", ["b.csv"], ""),
        ("gsm.jsonl", ["math.jsonl"], ""),
        ("train.jsonl", ["train.py", "notes.txt"], ""),
        ("train.jsonl", [], ""),
        ("", ["train.jsonl"], ""),
        ("no/such/train.jsonl", ["train.jsonl"], ""),
        ("train\0.jsonl", ["eval.jsonl"], ""),
    ],
)
def test_a_file_is_suggested_only_if_its_name_is_similar(
    given: str, there: list[str], meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in there:
        (tmp_path / name).touch()
    assert similar_file(given, SUFFIXES) == meant


def test_a_suggestion_for_code_keeps_the_name_of_the_function(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def score(response): return 1.0\n")
    assert similar_custom(f"{tmp_path}/rewards.py:score") == f"Did you mean {tmp_path}/reward.py:score?"
    assert similar_custom(f"{tmp_path}/reward.txt:score") == f"Did you mean {tmp_path}/reward.py:score?"
    assert similar_custom(f"{tmp_path}/reward.py:score") == "", "it is there"
    assert similar_custom(f"{tmp_path}/judge.py:score") == similar_custom("exact") == ""


def test_a_file_without_the_name_of_a_function_is_answered_with_its_functions(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text("LIMIT = 1\ndef score(response): return LIMIT\nasync def judge(response): return 0.5\n")
    assert similar_custom(str(file)) == f"Did you mean {file}:score or {file}:judge?"
    file.write_text("def score(response) return 1.0\n")
    assert similar_custom(str(file)) == "", "it is no Python"


def test_a_refusal_names_the_files_that_were_probably_meant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train.jsonl", "eval.jsonl.gz", "aime.jsonl", "reward.py", "episode.py"):
        (tmp_path / name).touch()
    words = ["data=file", "data.train_path=trian.jsonl", "data.eval_path=eval.jsonl", "+eval.sets.aime=aime.json"]
    words += ["reward.function=rewards.py:score", "episode.function=episodes.py:play"]
    assert run(["train", "arithmetic_grpo", "rollout=torch", *words]) == 2
    error = capsys.readouterr().err
    for said in (
        "data.train_path must be an existing file, or repo[:config]@split, got 'trian.jsonl'. "
        "Did you mean train.jsonl?",
        "got 'eval.jsonl'. There is eval.jsonl.gz: unpack it.",
        "eval.sets.aime must be an existing file, or repo[:config]@split, got 'aime.json'. Did you mean aime.jsonl?",
        f"reward.function must name an existing file; there is no {tmp_path}/rewards.py, got 'rewards.py:score'. "
        "Did you mean reward.py:score?",
        "Did you mean episode.py:play?",
    ):
        assert said in error, error


def test_a_similar_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tinny.txt").touch()
    problem = find_model("model.path", f"{tmp_path}/tinny", None)
    assert isinstance(problem, Problem) and problem.remedy == f"Did you mean {tmp_path}/tiny?"
    assert similar_directory(f"{tmp_path}/other") == similar_directory(f"{tmp_path}/nowhere/tiny") == ""
