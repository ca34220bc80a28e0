"""Checkpoints on the disk: whole or absent, verified, damaged ones named; and what a rank takes back from one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from policy_cases import lone_worker, make_config, make_samples, save_policy

from rollout.data import StreamState
from trainer.checkpoint import (
    POLICY,
    CheckpointError,
    RunState,
    begin_checkpoint,
    commit_checkpoint,
    newest_checkpoint,
)
from trainer.packing import pack
from trainer.tracking.tracker import _forget_after


def write(run_dir: Path, step: int, *, keep: int = 3) -> Path:
    """A finished checkpoint with two small files for the policy."""
    unfinished = begin_checkpoint(run_dir, step)
    (unfinished / POLICY / "shard_0").write_bytes(bytes(range(200)) * 50 + bytes([step]))
    (unfinished / POLICY / "shard_1").write_bytes(b"optimizer" * step)
    stream = StreamState(seed=0, epoch=1, position=step, digest="abc")
    return commit_checkpoint(unfinished, RunState(step=step, policy_version=2 * step, stream=stream), keep=keep).path


def test_the_newest_is_found_with_its_state(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    for step in (5, 10, 100):
        write(tmp_path, step)
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.path.name == "step_000100"
    assert (found.state.step, found.state.policy_version, found.state.stream["position"]) == (100, 200, 100)
    assert (found.policy_path / "shard_1").read_bytes() == b"optimizer" * 100


def test_only_the_newest_stay(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        write(tmp_path, step, keep=2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_000003", "step_000004"]


def test_a_damaged_later_checkpoint_does_not_push_out_a_good_one(tmp_path: Path) -> None:
    write(tmp_path, 2, keep=1)
    (write(tmp_path, 4, keep=2) / "state.json").write_text("")
    write(tmp_path, 3, keep=1)
    found = newest_checkpoint(tmp_path)
    assert found is not None and found.state.step == 3


def test_an_unfinished_checkpoint_does_not_count_and_is_replaced(tmp_path: Path) -> None:
    write(tmp_path, 1)
    unfinished = begin_checkpoint(tmp_path, 2)
    (unfinished / POLICY / "shard_0").write_bytes(b"half")
    found = newest_checkpoint(tmp_path)
    assert found is not None and found.state.step == 1
    write(tmp_path, 2)
    found = newest_checkpoint(tmp_path)
    assert found is not None and found.state.step == 2
    assert (found.policy_path / "shard_0").read_bytes() != b"half"


DAMAGE = {
    "a flipped bit": lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
    "a shorter file": lambda path: path.write_bytes(path.read_bytes()[:-2]),
    "a missing file": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["policy/shard_0", "state.json", "manifest.json"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    tmp_path: Path, damage: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, 1)
    path = write(tmp_path, 2) / name
    DAMAGE[damage](path)
    found = newest_checkpoint(tmp_path)
    assert found is not None and found.state.step == 1
    assert "step_000002 is damaged" in caplog.text
    assert Path(name).name in caplog.text


def test_all_damaged_is_an_error_and_never_a_new_start(tmp_path: Path) -> None:
    for step in (1, 2):
        (write(tmp_path, step) / "policy" / "shard_1").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"every checkpoint in .* is damaged: .*step_000002/policy/shard_1"):
        newest_checkpoint(tmp_path)


def test_rows_behind_the_checkpoint_are_forgotten_and_a_torn_line_too(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [json.dumps({"step": step, "reward/mean": step / 10}) + "\n" for step in (1, 2, 3, 4)]
    path.write_text("".join(rows) + '{"step": 5, "rew')
    _forget_after(path, 3)
    assert path.read_text() == "".join(rows[:3])
    _forget_after(tmp_path / "absent.jsonl", 3)
    assert [found.name for found in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_rank_takes_back_weights_and_optimizer_bit_for_bit(tmp_path: Path) -> None:
    config = make_config(save_policy(tmp_path / "model"), num_workers=1)
    batch = pack([make_samples()], num_ranks=1, max_tokens=1000, policy_version=0)
    micros = batch.ranks[0][0].micro_batches
    with lone_worker(config, tmp_path / "model") as worker:
        worker.train(batch.ranks[0], batch.samples, 1)
        (tmp_path / "saved").mkdir()
        worker.save_checkpoint(tmp_path / "saved")
        saved = worker.logprobs(micros)[0]
        worker.train(batch.ranks[0], batch.samples, 2)
        expected = worker.logprobs(micros)[0]
        assert not torch.equal(saved, expected)
        worker.load_checkpoint(tmp_path / "saved")
        assert torch.equal(worker.logprobs(micros)[0], saved)
    with lone_worker(config, tmp_path / "model") as worker:
        assert not torch.equal(worker.logprobs(micros)[0], saved)
        worker.load_checkpoint(tmp_path / "saved")
        assert torch.equal(worker.logprobs(micros)[0], saved)
        # The same next step needs the same moments: Adam's first step after a fresh start would differ.
        worker.train(batch.ranks[0], batch.samples, 2)
        assert torch.equal(worker.logprobs(micros)[0], expected)
