"""Checkpoints on the disk: whole or absent, verified, damaged ones named; and what a rank takes back from one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from policy_cases import lone_worker, make_config, make_samples, save_policy
from test_packing import pack_samples

from algorithms.config import MISConfig
from rollout.data.dataset import StreamState
from trainer.policy.model import full_tensors
from trainer.policy.worker import PolicyWorker
from trainer.rundir.checkpoint import (
    POLICY,
    CheckpointError,
    RunState,
    begin_checkpoint,
    best_checkpoint,
    commit_checkpoint,
    newest_checkpoint,
    set_later_aside,
)
from trainer.rundir.dump import DumpDescription, begin_dump, commit_dump, dumped_steps
from trainer.rundir.rows import forget_after, read_rows
from trainer.rundir.sealed_directory import MANIFEST, FileRecord, describe_file


def write(run_dir: Path, step: int, *, keep: int = 3, best: str | None = None, accuracy: float | None = None) -> Path:
    """A finished checkpoint with two small files for the policy."""
    unfinished = begin_checkpoint(run_dir, step)
    (unfinished / POLICY / "shard_0").write_bytes(bytes(range(200)) * 50 + bytes([step % 256]))
    (unfinished / POLICY / "shard_1").write_bytes(b"optimizer" * (step % 1000))
    stream = StreamState(seed=0, epoch=1, position=step, digest="abc")
    evaluation = {} if accuracy is None else {"eval/accuracy": accuracy}
    state = RunState(step=step, policy_version=2 * step, stream=stream, evaluation=evaluation)
    return commit_checkpoint(unfinished, state, keep=keep, best_metric=best).path


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


def test_the_best_stays_besides_the_newest(tmp_path: Path) -> None:
    accuracies = {1: 0.2, 2: 0.7, 3: 0.7, 4: None, 5: 0.5, 6: 0.1}
    for step, accuracy in accuracies.items():
        write(tmp_path, step, keep=2, best="eval/accuracy", accuracy=accuracy)
    names = ["step_000003", "step_000005", "step_000006"]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == names
    best = best_checkpoint(tmp_path, "eval/accuracy")
    assert best is not None and best.state.step == 3
    assert best_checkpoint(tmp_path, "eval/accuracy_sampled") is None
    (best.path / "policy" / "shard_0").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"the best .* cannot be used: .*step_000003/.*shard_0 has 0 bytes, the"):
        best_checkpoint(tmp_path, "eval/accuracy")


def test_steps_are_compared_as_numbers_and_other_names_are_left_alone(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000):
        write(tmp_path, step)
    (tmp_path / "checkpoints" / "step_of_mine").mkdir()
    found = newest_checkpoint(tmp_path)
    assert found is not None and found.state.step == 1_000_000


def test_an_old_checkpoint_that_cannot_be_removed_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1, keep=1)
    monkeypatch.setattr(Path, "rename", _refuse(Path.rename, "step_000001"))
    write(tmp_path, 2, keep=1)
    assert "the old checkpoint" in caplog.text and "cannot be removed" in caplog.text
    found = newest_checkpoint(tmp_path)
    assert found is not None and found.state.step == 2


def _refuse(rename: Callable[[Path, Path], Path], name: str) -> Callable[[Path, Path], Path]:
    """`rename`, but a directory called `name` stays: root may remove everything, so permissions cannot show it."""

    def renamed(path: Path, target: Path) -> Path:
        if path.name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return rename(path, target)

    return renamed


@pytest.mark.scenario(5)
def test_another_format_is_refused_where_no_older_checkpoint_can_be_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, 1)
    manifest = write(tmp_path, 2) / "manifest.json"
    # A later format may have more fields: its number is read before its form.
    manifest.write_text(manifest.read_text().replace('"format": 2', '"written": "later", "format": 99'))
    found = newest_checkpoint(tmp_path)
    assert found is not None and found.state.step == 1
    assert "has format 99, this version of Parity reads format 2" in caplog.text
    (tmp_path / "checkpoints" / "step_000001" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="has format 99, this version of Parity reads format 2"):
        newest_checkpoint(tmp_path)


def test_a_file_that_a_rank_described_must_be_there(tmp_path: Path) -> None:
    unfinished = begin_checkpoint(tmp_path, 1)
    state = RunState(step=1, policy_version=1, stream=StreamState(seed=0, epoch=0, position=0, digest=""))
    records = {"policy/shard_7": FileRecord(bytes=1, xxh3_128="")}
    with pytest.raises(FileNotFoundError, match="lacks policy/shard_7"):
        commit_checkpoint(unfinished, state, keep=1, records=records)
    assert newest_checkpoint(tmp_path) is None


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_a_damaged_later_checkpoint_does_not_push_out_a_good_one(tmp_path: Path) -> None:
    write(tmp_path, 2, keep=1)
    (write(tmp_path, 4, keep=2) / "state.json").write_text("")
    set_later_aside(tmp_path, 2)
    write(tmp_path, 3, keep=1)
    found = newest_checkpoint(tmp_path)
    assert found is not None and found.state.step == 3


def test_a_checkpoint_that_was_passed_over_stays_until_its_step_is_on_the_disk(tmp_path: Path) -> None:
    for step in (2, 4):
        write(tmp_path, step)
    assert [path.name for path in set_later_aside(tmp_path, 2)] == ["step_000004.aside"]  # 4 could not be read
    found = newest_checkpoint(tmp_path)
    assert found is not None and found.state.step == 2, "its rows are forgotten, so it must not be taken up any more"
    write(tmp_path, 3)
    assert names(tmp_path) == ["step_000002", "step_000003", "step_000004.aside"]
    write(tmp_path, 4)
    assert names(tmp_path) == ["step_000002", "step_000003", "step_000004"]


def test_a_checkpoint_of_another_version_is_kept_when_its_step_is_made_again(tmp_path: Path) -> None:
    write(tmp_path, 2)
    manifest = write(tmp_path, 4) / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 2', '"format": 99'))
    shard = (manifest.parent / "policy" / "shard_0").read_bytes()
    set_later_aside(tmp_path, 2)
    for step in (4, 6, 8):
        write(tmp_path, step, keep=1)
    assert names(tmp_path) == ["step_000004.other_format", "step_000008"]
    kept = tmp_path / "checkpoints" / "step_000004.other_format"
    assert (kept / "policy" / "shard_0").read_bytes() == shard and '"format": 99' in (kept / MANIFEST).read_text()


def test_what_a_checkpoint_replaces_stays_until_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", _refuse(Path.rename, ".step_000001.unfinished"))
        with pytest.raises(PermissionError):
            write(tmp_path, 1)
    kept = [name for name in names(tmp_path) if not name.startswith(".")]
    assert kept == ["step_000001.aside"]
    write(tmp_path, 1)
    assert names(tmp_path) == ["step_000001"]


def test_what_a_dump_replaces_stays_until_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dump(step: int) -> None:
        description = DumpDescription(step=step, policy_version=0, correction="tis", ranks=(), metrics={})
        commit_dump(begin_dump(tmp_path, step), description, records={}, config_text="", keep=1)

    for step in (1, 3):
        dump(step)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", _refuse(Path.rename, ".step_000001.unfinished"))
        with pytest.raises(PermissionError):
            dump(1)
    assert dumped_steps(tmp_path) == [3]
    dump(2)
    assert dumped_steps(tmp_path) == [2], "later steps belong to a run that was resumed from an earlier one"


def test_a_directory_of_checkpoints_that_cannot_be_read_is_not_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"checkpoints cannot be read .*Restore it"):
        newest_checkpoint(tmp_path)


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


@pytest.mark.scenario(3)
@pytest.mark.scenario(4)
@pytest.mark.scenario(5)
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
    assert "step_000002 cannot be used" in caplog.text
    assert Path(name).name in caplog.text


@pytest.mark.scenario(5)
def test_no_flipped_bit_of_a_manifest_ends_the_search(tmp_path: Path) -> None:
    write(tmp_path, 1)
    manifest = write(tmp_path, 2) / "manifest.json"
    good = manifest.read_bytes()
    for place in range(8 * len(good)):
        flipped = bytearray(good)
        flipped[place // 8] ^= 1 << place % 8
        manifest.write_bytes(flipped)
        found = newest_checkpoint(tmp_path)
        assert found is not None and found.state.step == 1, bytes(flipped)


@pytest.mark.parametrize(
    "text",
    [
        *("[]", "null", "7", "{}", "[" * 100_000, '{"format": 2}', '{"format": 2, "files": []}'),
        *('{"format": 2, "files": {"state.json": 1}}', '{"format": 2, "files": {"state.json": {"bytes": 1}}}'),
    ],
)
def test_a_manifest_of_any_other_form_is_damage(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, 1)
    (write(tmp_path, 2) / "manifest.json").write_text(text)
    found = newest_checkpoint(tmp_path)
    assert found is not None and found.state.step == 1
    assert "step_000002 cannot be used" in caplog.text and "manifest.json" in caplog.text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.sampled_from(["format", "files", "state.json"]) | st.text(), inner)
    ),
)


@pytest.mark.scenario(5)
def test_a_manifest_of_any_json_is_damage(tmp_path: Path) -> None:
    write(tmp_path, 1)
    manifest = write(tmp_path, 2) / "manifest.json"
    files = json.loads(manifest.read_text())["files"]

    @given(JSON)
    def check(content: object) -> None:
        for text in (
            content,
            {"format": 2, "files": content},
            {"format": 2, "files": {**files, "state.json": content}},
        ):
            manifest.write_text(json.dumps(text))
            found = newest_checkpoint(tmp_path)
            assert found is not None and found.state.step == 1

    check()


@pytest.mark.parametrize("name", ["manifest.json", "policy/shard_0", "state.json"])
def test_a_file_that_the_disk_does_not_give_is_damage(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, 1)
    path = write(tmp_path, 2)
    manifest = json.loads((path / "manifest.json").read_text())
    if name != "manifest.json":
        manifest["files"][name]["bytes"] = 0
        (path / "manifest.json").write_text(json.dumps(manifest))
    # Linux answers a read at the start of this file of zero bytes with EIO, as it does for a bad sector.
    (path / name).unlink()
    (path / name).symlink_to("/proc/self/mem")
    found = newest_checkpoint(tmp_path)
    assert found is not None and found.state.step == 1
    assert "Input/output error" in caplog.text


def test_a_state_with_a_field_of_another_version_is_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, 1)
    path = write(tmp_path, 2)
    state = json.loads((path / "state.json").read_text()) | {"of_tomorrow": 1}
    (path / "state.json").write_text(json.dumps(state))
    manifest = json.loads((path / "manifest.json").read_text())
    record = describe_file(path / "state.json")
    manifest["files"]["state.json"] = {"bytes": record.bytes, "xxh3_128": record.xxh3_128}
    (path / "manifest.json").write_text(json.dumps(manifest))
    found = newest_checkpoint(tmp_path)
    assert found is not None and found.state.step == 1
    assert "state.json cannot be read" in caplog.text and "of_tomorrow" in caplog.text


@pytest.mark.scenario(6)
def test_all_damaged_is_an_error_and_never_a_new_start(tmp_path: Path) -> None:
    for step in (1, 2):
        (write(tmp_path, step) / "policy" / "shard_1").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be used: .*step_000002/policy/shard_1"):
        newest_checkpoint(tmp_path)


def test_rows_behind_the_checkpoint_are_forgotten_and_a_torn_line_too(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [json.dumps({"step": step, "reward/mean": step / 10}) + "\n" for step in (1, 2, 3, 4)]
    path.write_text("".join(rows) + '{"step": 5, "rew')
    assert forget_after(path, 3) == 0
    assert path.read_text() == "".join(rows[:3])
    assert forget_after(tmp_path / "absent.jsonl", 3) == 0
    assert [found.name for found in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\u0085", "\x0b", "\x1c", "\r"])
def test_no_character_of_a_response_ends_a_row(tmp_path: Path, character: str) -> None:
    path = tmp_path / "samples.jsonl"
    rows = [{"step": step, "response": f"a{character}b"} for step in range(1, 6)]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8", newline="")
    before = path.read_bytes()
    assert read_rows(path) == rows
    assert forget_after(path, 5) == 0
    assert path.read_bytes() == before
    assert forget_after(path, 3) == 0
    assert read_rows(path) == rows[:3]


def test_a_damaged_row_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    rows = [json.dumps({"step": step}).encode() + b"\n" for step in (1, 2, 3, 4)]
    damaged = [b'{"step": 2, "resp\n', b'{"no step": 1}\n', b"\xff\xfe\n", b"[" * 100_000 + b"\n", b'{"step": "1"}\n']
    path.write_bytes(rows[0] + b"".join(damaged) + b"".join(rows[1:]))
    assert forget_after(path, 3) == 5
    assert path.read_bytes() == b"".join(rows[:3])
    assert (tmp_path / "samples.jsonl.damaged").read_bytes() == b"".join(damaged)
    path.write_bytes(damaged[0] + rows[0] + rows[1][:-1])
    assert forget_after(path, 3) == 1
    assert path.read_bytes() == rows[0] + rows[1], "the last row was whole but for the end of its line"
    assert (tmp_path / "samples.jsonl.damaged").read_bytes() == b"".join([*damaged, damaged[0]])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_takes_back_weights_and_optimizer_bit_for_bit(tmp_path: Path, asynchronous: bool) -> None:
    # Four mini-batches, whose order the later passes draw: a rank that goes on must draw the same.
    config = make_config(save_policy(tmp_path / "model"), num_workers=1, mini_batch_prompts=1)
    config.batch.passes = 3
    samples = make_samples()
    minis = [samples[first : first + 4] for first in range(0, 16, 4)]
    batch = pack_samples(minis, num_ranks=1, max_tokens=1000, policy_version=0)
    micros = batch.ranks[0][0].micro_batches
    with lone_worker(config, tmp_path / "model") as worker:
        worker.train(batch.ranks[0], batch.samples, 1)
        (tmp_path / "saved").mkdir()
        torch.rand(3)  # the generators have moved since the start
        worker.save_checkpoint(tmp_path / "saved", asynchronous)
        drawn = torch.rand(3)
        saved = worker.logprobs(micros)[0]
        worker.train(batch.ranks[0], batch.samples, 2)
        expected = worker.logprobs(micros)[0]
        assert not torch.equal(saved, expected)
        # Written in the background, while the weights went on, it holds them as they were.
        report = worker.saved_checkpoint(True)
        assert report is not None and report.error is None
        assert worker.load_checkpoint(tmp_path / "saved", 1)
        assert torch.equal(worker.logprobs(micros)[0], saved)
    with lone_worker(config, tmp_path / "model") as worker:
        assert not torch.equal(worker.logprobs(micros)[0], saved)
        assert worker.load_checkpoint(tmp_path / "saved", 1)
        assert torch.equal(torch.rand(3), drawn)
        assert torch.equal(worker.logprobs(micros)[0], saved)
        # The same next step needs the same moments: Adam's first step after a fresh start would differ.
        worker.train(batch.ranks[0], batch.samples, 2)
        assert torch.equal(worker.logprobs(micros)[0], expected)


@pytest.mark.parametrize("rejected", [False, True])
def test_a_save_before_the_first_update_changes_no_later_one(tmp_path: Path, rejected: bool) -> None:
    """Nothing was trained yet, or every token of the first step was rejected: there are gradients, and no moments."""
    config = make_config(save_policy(tmp_path / "model"), num_workers=1, correction=MISConfig())
    (tmp_path / "saved").mkdir()

    def train(worker: PolicyWorker, logprob: float, step: int) -> float | None:
        samples = make_samples()
        for sample in samples:
            sample.rollout_logprobs = np.where(sample.response_mask, logprob, 0.0)
        batch = pack_samples([samples], num_ranks=1, max_tokens=1000, policy_version=0)
        return worker.train(batch.ranks[0], batch.samples, step).metrics["optim/skipped_steps"]

    found = []
    for part in ("without a save", "saved", "resumed"):
        with lone_worker(config, tmp_path / "model") as worker:
            if part == "resumed":
                assert worker.load_checkpoint(tmp_path / "saved", 1)
            elif rejected:
                assert train(worker, -30.0, 1) == 1.0
            if part == "saved":
                worker.save_checkpoint(tmp_path / "saved", False)
            assert train(worker, -4.2, 2) == 0.0  # near the policy: 1/64 is -4.16
            found.append(torch.cat([tensor.flatten() for _, tensor in full_tensors(worker._policy.model)]).clone())
    assert torch.equal(found[1], found[0]) and torch.equal(found[2], found[0])
