"""Saving while a run goes on: in the background, on a disk that is full, and what a rank gives back besides weights."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from full_disk import full_disk
from policy_cases import lone_worker, make_config, make_samples, save_policy
from test_packing import pack_samples
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.utils._pytree import tree_leaves

from rollout.data.dataset import StreamState
from trainer.cluster.policy_group import PolicyGroup
from trainer.config.outputs import CheckpointConfig
from trainer.ending.termination import Termination
from trainer.ending.time_limit import TimeLimit
from trainer.policy import checkpoint_shards
from trainer.policy.checkpoint_shards import ShardReport, file_shares
from trainer.policy.host_copy import local_part
from trainer.policy.worker import PolicyWorker
from trainer.run.guard import Guard
from trainer.run.saving import MAX_CONSECUTIVE_FAILURES, Ending, Saver
from trainer.rundir.checkpoint import CheckpointError, RunState, newest_checkpoint
from trainer.rundir.sealed_directory import FileRecord
from trainer.tracking.tracker import Tracker


@dataclass
class Lines:
    """A console that keeps its lines."""

    lines: list[str]

    def line(self, text: str) -> None:
        self.lines.append(text)


@dataclass
class Recorder:
    """What a Saver asks of a Tracker."""

    console: Lines

    def flush(self) -> None:
        self.console.lines.append("rows on the disk")


@dataclass
class LoneGroup:
    """A real rank behind the methods of PolicyGroup that a Saver uses; `slow` saves take that many questions."""

    worker: PolicyWorker
    slow: int = 0
    is_whole: bool = True
    asked: list[bool] = field(default_factory=list)
    """Whether each save was to be written in the background."""

    def save_checkpoint(self, path: Path, *, asynchronous: bool) -> None:
        self.asked.append(asynchronous)
        self.worker.save_checkpoint(path, asynchronous)

    def saved_checkpoint(self, *, wait: bool) -> list[ShardReport] | None:
        if self.slow and not wait:
            self.slow -= 1
            return None
        report = self.worker.saved_checkpoint(wait or self.slow == 0)
        return None if report is None else [report]


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[PolicyWorker]:
    config = make_config(save_policy(tmp_path / "model"), num_workers=1)
    with lone_worker(config, tmp_path / "model") as made:
        batch = pack_samples([make_samples()], num_ranks=1, max_tokens=1000, policy_version=0)
        made.train(batch.ranks[0], batch.samples, 1)
        yield made


def state(step: int) -> RunState:
    return RunState(step=step, policy_version=step, stream=StreamState(seed=0, epoch=0, position=0, digest=""))


def saver(tmp_path: Path, lines: list[str], *, asynchronous: bool = False, keep: int = 9) -> Saver:
    config = CheckpointConfig(every=1, keep=keep, asynchronous=asynchronous)
    return Saver(config, run_dir=tmp_path / "run", tracker=cast(Tracker, Recorder(console=Lines(lines))))


def saved_steps(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())


def as_group(group: LoneGroup) -> PolicyGroup:
    return cast(PolicyGroup, group)


def wait_for_metrics(saving: Saver) -> dict[str, float | None]:
    """What a save has to say once it is over."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if metrics := saving.commit_finished():
            return metrics
        time.sleep(0.01)
    raise TimeoutError


def test_a_save_in_the_background_counts_once_it_is_written(worker: PolicyWorker, tmp_path: Path) -> None:
    lines: list[str] = []
    group = LoneGroup(worker, slow=2)
    saving = saver(tmp_path, lines, asynchronous=True)
    saving.save(as_group(group), state(1), last=False)
    assert saving.commit_finished() == {}
    assert saving.commit_finished() == {}
    assert newest_checkpoint(tmp_path / "run") is None
    metrics = saving.commit_finished()
    assert set(metrics) == {"perf/checkpoint_exposed_s", "perf/checkpoint_write_s", "perf/checkpoint_mib"}
    assert all(value is not None and value > 0 for value in metrics.values())
    assert saving.commit_finished() == {}, "metrics of a save are told once"
    group.slow = 5
    saving.save(as_group(group), state(2), last=False)
    saving.save(as_group(group), state(3), last=False)  # waits for the one before
    assert saved_steps(tmp_path) == [".step_000003.unfinished", "step_000001", "step_000002"]
    saving.save(as_group(group), state(4), last=True)
    assert saved_steps(tmp_path)[-1] == "step_000004"
    assert group.asked == [True, True, True, False]
    flushed, saved = "rows on the disk", [f"saved step {step}" for step in (1, 2, 3, 4)]
    # The second save is told of when the third begins: only one is under way.
    assert [line.split(":")[0] for line in lines] == [word for line in saved for word in (flushed, line)]


def test_copies_of_saves_in_the_background_lie_in_the_same_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, but for the pinning; and the second save has the weights of its own time."""
    stager = DefaultStager(StagingOptions(False, False, False, False))
    monkeypatch.setattr(checkpoint_shards, "kept_stager", lambda device: stager)
    copies: list[set[int]] = []
    stage = stager.stage

    def recorded(state_dict: Any, **options: Any) -> Any:
        staged = stage(state_dict, **options)
        tensors = [local_part(leaf) for leaf in tree_leaves(staged) if isinstance(leaf, torch.Tensor)]
        copies.append({each.data_ptr() for each in tensors if each.numel() > 9})  # not the counters
        return staged

    monkeypatch.setattr(stager, "stage", recorded)
    config = make_config(save_policy(tmp_path / "model"), num_workers=1)
    batch = pack_samples([make_samples()], num_ranks=1, max_tokens=1000, policy_version=0)
    with lone_worker(config, tmp_path / "model") as worker:
        for step in (1, 2, 3):
            worker.train(batch.ranks[0], batch.samples, step)
            worker.save_checkpoint(tmp_path / f"saved {step}", True)
            report = worker.saved_checkpoint(True)
            assert report is not None and report.error is None
        weights = [local_part(each).detach().clone() for each in worker._policy.model.parameters()]
        assert len(copies[0]) > len(weights) and copies[0] == copies[1] == copies[2]
        worker.load_checkpoint(tmp_path / "saved 1", 1)
        before = [local_part(each).detach().clone() for each in worker._policy.model.parameters()]
        worker.load_checkpoint(tmp_path / "saved 3", 3)
        after = [local_part(each).detach() for each in worker._policy.model.parameters()]
    assert all(torch.equal(*pair) for pair in zip(after, weights, strict=True))
    assert not any(torch.equal(*pair) for pair in zip(before, weights, strict=True))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_leaves_no_trace_and_the_third_time_ends_the_run(
    worker: PolicyWorker, tmp_path: Path, asynchronous: bool, caplog: pytest.LogCaptureFixture
) -> None:
    lines: list[str] = []
    group = as_group(LoneGroup(worker))
    saving = saver(tmp_path, lines, asynchronous=asynchronous)
    saving.save(group, state(1), last=False)
    wait_for_metrics(saving)
    with full_disk(2**14):
        saving.save(group, state(2), last=False)
        assert wait_for_metrics(saving) == {"perf/checkpoint_failures": 1.0}
    assert saved_steps(tmp_path) == ["step_000001"]
    assert "the checkpoint of step 2 was not written: rank 0" in caplog.text and "File too large" in caplog.text
    assert "2 more may fail" not in caplog.text and "1 more may fail" in caplog.text
    saving.save(group, state(3), last=False)  # there is space again, so the count begins again
    wait_for_metrics(saving)
    with full_disk(2**14):
        for step in range(4, 4 + MAX_CONSECUTIVE_FAILURES - 1):
            saving.save(group, state(step), last=False)
            wait_for_metrics(saving)
        with pytest.raises(CheckpointError, match=r"step 6 was not written: .*GiB free.*another run.dir"):
            saving.save(group, state(6), last=False)
            wait_for_metrics(saving)
    assert saved_steps(tmp_path) == ["step_000001", "step_000003"]


def test_the_last_save_must_be_written(worker: PolicyWorker, tmp_path: Path) -> None:
    with full_disk(2**14), pytest.raises(CheckpointError, match="was not written"):
        saver(tmp_path, []).save(as_group(LoneGroup(worker)), state(1), last=True)


def test_a_directory_that_cannot_be_made_is_a_failed_save(worker: PolicyWorker, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("a file where the directory should be")
    lines: list[str] = []
    saver(tmp_path, lines).save(as_group(LoneGroup(worker)), state(1), last=False)
    assert "the checkpoint of step 1 was not written" in lines[1] and "checkpoints" in lines[1]


# ---------------------------------------------------------------- the end of a run


def ending(tmp_path: Path, group: LoneGroup, *, every: int = 3, asynchronous: bool = False) -> Ending:
    """The end of a run of 9 steps that saves every third step."""
    config = make_config(tmp_path / "model", num_workers=1)
    config.run.dir, config.run.num_steps = str(tmp_path / "run"), 9
    config.checkpoint.every, config.checkpoint.asynchronous = every, asynchronous
    saving = Saver(config.checkpoint, run_dir=tmp_path / "run", tracker=cast(Tracker, Recorder(console=Lines([]))))
    parts = {"policy": as_group(group), "saver": saving, "guard": Guard(), "limit": TimeLimit(None, "")}
    return Ending(config=config, termination=Termination(), **parts)  # type: ignore[arg-type]


def takes(run: Ending, steps: range) -> None:
    """Take steps as `take_steps` does, without training."""
    for step in steps:
        with run.rollout(step):
            pass
        with run.training():
            pass
        run.trained(partial(state, step))
        run.conclude(step, step_s=1.0)


@pytest.mark.parametrize(("last", "saves"), [(2, 1), (3, 1), (4, 2)])
def test_a_failure_saves_the_last_step_unless_it_is_saved(
    worker: PolicyWorker, tmp_path: Path, last: int, saves: int
) -> None:
    group = LoneGroup(worker)
    run = ending(tmp_path, group)
    with pytest.raises(ZeroDivisionError) as caught, run.last_step_saved():
        takes(run, range(1, last + 1))
        raise ZeroDivisionError
    assert saved_steps(tmp_path)[-1] == f"step_{last:06d}" and len(group.asked) == saves
    assert caught.value.__notes__ == [f"Step {last} is saved; go on with parity resume {tmp_path}/run"]


def test_a_failure_of_a_run_that_saves_nothing_saves_nothing(worker: PolicyWorker, tmp_path: Path) -> None:
    group = LoneGroup(worker)
    run = ending(tmp_path, group, every=0)
    with pytest.raises(ZeroDivisionError) as caught, run.last_step_saved():
        takes(run, range(1, 3))
        raise ZeroDivisionError
    assert not group.asked and "No step is saved" in caught.value.__notes__[0]


@pytest.mark.parametrize("fails", [True, False])
def test_what_is_under_way_at_the_end_of_a_run_is_kept(worker: PolicyWorker, tmp_path: Path, fails: bool) -> None:
    group = LoneGroup(worker)
    run = ending(tmp_path, group, asynchronous=True)
    with suppress(ZeroDivisionError), run.last_step_saved():
        group.slow = 9
        takes(run, range(1, 4))
        assert saved_steps(tmp_path) == [".step_000003.unfinished"]
        if fails:
            raise ZeroDivisionError
    found = newest_checkpoint(tmp_path / "run")
    assert found is not None and found.state.step == 3 and group.asked == [True]


def test_a_save_that_fails_on_the_way_out_is_told_beside_the_error(worker: PolicyWorker, tmp_path: Path) -> None:
    run = ending(tmp_path, LoneGroup(worker))
    with full_disk(2**14), pytest.raises(ZeroDivisionError) as caught, run.last_step_saved():
        takes(run, range(1, 3))
        raise ZeroDivisionError
    lost, way_on = caught.value.__notes__
    assert "the checkpoint of step 2 was not written" in lost and way_on.startswith("No step is saved")


def test_a_save_that_the_disk_did_not_take_is_tried_again_on_the_way_out(worker: PolicyWorker, tmp_path: Path) -> None:
    run = ending(tmp_path, LoneGroup(worker))
    with pytest.raises(ZeroDivisionError), run.last_step_saved():
        with full_disk(2**14):
            takes(run, range(1, 4))
        assert saved_steps(tmp_path) == []
        raise ZeroDivisionError
    assert saved_steps(tmp_path) == ["step_000003"]


def test_nothing_of_ranks_that_train_or_have_failed_is_saved(worker: PolicyWorker, tmp_path: Path) -> None:
    group = LoneGroup(worker)
    run = ending(tmp_path, group)
    with pytest.raises(ZeroDivisionError), run.last_step_saved():
        takes(run, range(1, 3))
        with run.training():
            raise ZeroDivisionError
    assert not group.asked
    with pytest.raises(ZeroDivisionError) as caught, run.last_step_saved():
        takes(run, range(1, 3))
        group.is_whole = False
        raise ZeroDivisionError
    assert not group.asked and "a rank has failed" in caught.value.__notes__[0]


def test_a_failure_after_the_training_waits_for_the_row_and_stays_the_first(
    worker: PolicyWorker, tmp_path: Path
) -> None:
    for row_fails in (False, True):
        run = ending(tmp_path, LoneGroup(worker))
        with pytest.raises(ZeroDivisionError), run.last_step_saved():
            takes(run, range(1, 2))
            with run.after_row():
                raise ZeroDivisionError
            run.trained(partial(state, 2))
            if row_fails:
                raise OSError("the row of the step cannot be written")
            run.conclude(2, step_s=1.0)
            pytest.fail("the run went on")
        assert saved_steps(tmp_path) == ["step_000002"]
        shutil.rmtree(tmp_path / "run")


def draws() -> list[float]:
    """The next numbers of every generator; normal ones too, of which Python and numpy keep the second."""
    return [random.random(), random.gauss(), float(np.random.normal()), float(np.random.rand()), float(torch.randn(()))]


def test_a_rank_takes_back_its_random_numbers(worker: PolicyWorker, tmp_path: Path) -> None:
    draws()
    (tmp_path / "saved").mkdir()
    worker.save_checkpoint(tmp_path / "saved", False)
    expected = draws()
    assert draws() != expected
    assert worker.load_checkpoint(tmp_path / "saved", 1)
    assert draws() == expected


@pytest.mark.scenario(7)
def test_ranks_of_another_number_get_new_random_numbers(worker: PolicyWorker, tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    worker.save_checkpoint(tmp_path / "saved", False)
    before = draws()
    (tmp_path / "saved" / "rng_1.json").write_text("{}")  # as two ranks would have left it
    assert not worker.load_checkpoint(tmp_path / "saved", 1)
    first = draws()
    assert not worker.load_checkpoint(tmp_path / "saved", 1)
    assert draws() == first != before, "the same for the same seed, step and rank"
    assert not worker.load_checkpoint(tmp_path / "saved", 2)
    assert draws() != first


def test_a_rank_takes_back_its_count_of_bad_steps(worker: PolicyWorker, tmp_path: Path) -> None:
    worker._policy._bad_steps = 2
    (tmp_path / "saved").mkdir()
    worker.save_checkpoint(tmp_path / "saved", False)
    worker._policy._bad_steps = 0
    worker.load_checkpoint(tmp_path / "saved", 1)
    with pytest.raises(RuntimeError, match="3 optimizer steps"):
        worker._policy.update(float("nan"))


@pytest.mark.scenario(8)
def test_a_checkpoint_of_another_model_is_refused_with_the_names(tmp_path: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = make_config(save_policy(tmp_path / "model"), num_workers=1)
    (tmp_path / "saved").mkdir()
    with lone_worker(config, tmp_path / "model") as worker:
        worker.save_checkpoint(tmp_path / "saved", False)
    wider = Qwen2Config(
        vocab_size=64, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen2ForCausalLM(wider).save_pretrained(tmp_path / "wider")
    config = make_config(tmp_path / "wider", num_workers=1)
    with (
        lone_worker(config, tmp_path / "wider") as worker,
        pytest.raises(
            CheckpointError, match=r"does not fit the model .*policy\.model\.\S+.*Set model, policy and optim"
        ),
    ):
        worker.load_checkpoint(tmp_path / "saved", 1)


@pytest.mark.scenario(7)
@pytest.mark.parametrize("writers", [1, 2, 3, 8, 24])
@pytest.mark.parametrize("readers", [1, 2, 3, 8, 16])
def test_every_file_is_compared_by_one_rank(writers: int, readers: int) -> None:
    files = [name for rank in range(writers) for name in (f"policy/__{rank}_0.distcp", f"policy/rng_{rank}.json")]
    records = {name: FileRecord(bytes=8, xxh3_128=name) for name in [*files, "policy/.metadata"]}
    shares = file_shares(records, num_ranks=readers)
    assert len(shares) == readers
    assert sorted(name for share in shares for name in share) == sorted(records)
    assert all(record == records[name] for share in shares for name, record in share.items())
    counts = [sum(name.endswith(".distcp") for name in share) for share in shares]
    assert max(counts) - min(counts) <= 1, "an even share"
    if writers == readers:
        assert all(f"policy/__{rank}_0.distcp" in share for rank, share in enumerate(shares)), "what it will read"
