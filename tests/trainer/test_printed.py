"""trainer/rundir/printed.py: what functions of the user print, from their real processes to one bounded file."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from rollout.episodes.config import EpisodeConfig
from rollout.episodes.trial import load_problem
from rollout.rewards import Scorer
from rollout.task_config import RewardConfig
from rollout.types import FinishReason, Prompt, Sample, SampleGroup
from trainer.rundir.printed import PRINTED_FILE, printed_log

SECRET = "hf_" + "abcdefghij" * 3
REWARD = f"""
import os, subprocess, sys
def reward(response, answer):
    print("scored", response, "\\x1b[31mred\\x1b[0m", "token={SECRET}")
    print("careful", file=sys.stderr)
    subprocess.run(["echo", "from a program"])
    os.write(1, b"without an end")
    if response == "7":
        os._exit(1)
    return 1.0
"""
ROLLOUT = """
print("a rollout function is loaded")
async def rollout(episode):
    pass
"""


def score(function: Path, responses: list[str]) -> None:
    """Score `responses` with the function `reward` of a file, each in a call of its own."""
    prompt = Prompt(prompt_id=0, token_ids=[1], text="?", answer="")
    samples = [
        Sample(
            prompt_id=0, sample_index=index, token_ids=[1, index], response_mask=[False, True],
            rollout_logprobs=[0.0, -1.0], token_versions=[0, 0], finish_reason=FinishReason.stop,
        )
        for index in range(len(responses))
    ]  # fmt: skip
    config = RewardConfig(function=f"{function}:reward", num_workers=1)
    with closing(Scorer(config, max_new_tokens=5, decode=lambda tokens: responses[tokens[0]])) as scorer:
        scorer.score([SampleGroup(prompt=prompt, samples=samples)])


def test_prints_go_to_one_file_without_secrets_and_not_to_the_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text(REWARD, encoding="utf-8")
    (tmp_path / "turns.py").write_text(ROLLOUT, encoding="utf-8")
    logs = tmp_path / "logs"
    with printed_log(logs):
        assert not logs.exists(), "no prints, no file"
        score(tmp_path / "own.py", ["7", *"12345"])  # the worker of 7 ends without flushing anything
        assert load_problem(EpisodeConfig(function=f"{tmp_path}/turns.py:rollout")) == ""
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("", "")
    text = (logs / PRINTED_FILE).read_text(encoding="utf-8")
    assert "scored 7 [31mred[0m token=<redacted>\n" in text and SECRET not in text
    for printed in ("careful\n", "from a program\n", "without an end", "a rollout function is loaded\n"):
        assert printed in text


def test_the_file_is_bounded_also_over_two_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.rundir.printed.MAX_BYTES", 100_000)
    (tmp_path / "own.py").write_text("def reward(response):\n    print('x' * 300_000)\n    return 1.0\n", "utf-8")
    for _ in range(2):
        with printed_log(tmp_path):
            score(tmp_path / "own.py", ["1", "2"])
    text = (tmp_path / PRINTED_FILE).read_text(encoding="utf-8")
    assert text == "x" * 100_000 + "\n... the rest is left out: the limit is 97.7 KiB\n"
