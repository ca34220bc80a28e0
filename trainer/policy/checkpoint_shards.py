"""Saves and loads one rank's part of a checkpoint: its shards of a state dict, and its random number generators.

    <policy>/__<rank>_<n>.distcp, .metadata    torch.distributed.checkpoint
    <policy>/rng_<rank>.json                   Python, numpy, torch and its GPU, as JSON: theirs would be pickles

Used by `trainer/policy/worker.py`. Every method contains collectives: all ranks call it together.
"""

from __future__ import annotations

import json
import random
import re
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from trainer.policy.checkpoint_reader import INDEX, DataPlanner, DataReader
from trainer.rundir.checkpoint import CheckpointError
from trainer.rundir.sealed_directory import FileRecord, describe_file, to_disk

REJECTED_STEPS = "rejected_steps"
"""Name in a checkpoint of the count of optimizer steps in a row without a kept token; earlier versions have none."""
_SHOWN_ERRORS = 3
_WRITER = re.compile(r"(?:__|rng_)(?P<rank>\d{1,9})[_.]")
"""Beginning of the name of a file that one rank wrote, with its number."""

RngState = dict[str, Any]
"""States of all generators of a process, as JSON values; `cuda` is None on a CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardReport:
    """Outcome of writing one rank's part of a checkpoint."""

    files: dict[str, FileRecord]
    """Every file that this rank wrote, by name; on the disk. Empty after an error."""
    error: str | None
    """The reason why the part could not be written; None if it was written."""
    write_s: float
    """Seconds from the call until the files were on the disk and described."""


class ShardWriter:
    """Writes the state of one rank, at once or in the background; one save at a time.

    A save in the background first copies the state to host memory; then training may go on. It writes in a thread
    of its own and agrees with the other ranks over a gloo group of its own, so that the collectives of training and
    saving cannot meet.
    """

    def __init__(self, *, rank: int, device: torch.device, timeout_s: float) -> None:
        """`timeout_s` bounds every collective of a save, and how long `report` waits."""
        self._rank = rank
        self._device = device
        self._timeout_s = timeout_s
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._running: Future[ShardReport] | None = None
        self._stager = kept_stager(device)

    def save(self, state: Mapping[str, Any], path: Path, *, asynchronous: bool) -> None:
        """Write `state` and the generators to the directory `path`; `report` says what came of it.

        Returns when everything is written, or, if `asynchronous`, when it is copied.
        """
        started = time.perf_counter()
        rng = _capture_rng(self._device)
        if self._running is not None:
            self.report(wait=True)  # the copy of a save that is being written must not change
        if asynchronous:
            writing = dcp.async_save(
                dict(state), checkpoint_id=path, process_group=self._group, async_stager=self._stager
            )
            assert isinstance(writing, Future)
            self._running = self._thread.submit(self._finish, writing.result, rng, path, started)
            return

        def write() -> object:
            return dcp.save(dict(state), checkpoint_id=path, process_group=self._group)

        self._running = Future()
        self._running.set_result(self._finish(write, rng, path, started))

    def report(self, *, wait: bool) -> ShardReport | None:
        """Return the report of the last save; None while the save is being written, unless `wait`.

        Raises TimeoutError if the wait takes longer than `timeout_s`.
        """
        if self._running is None:
            raise RuntimeError("report() comes after save()")
        if not wait and not self._running.done():
            return None
        try:
            return self._running.result(self._timeout_s)
        except TimeoutError as error:
            text = f"the checkpoint was not written within policy.step_timeout_s={self._timeout_s:g} s"
            raise TimeoutError(f"{text}; look at the disk, or raise it") from error

    def _finish(self, write: Callable[[], object], rng: RngState, path: Path, started: float) -> ShardReport:
        """Write and describe the files of this rank; no error gets past it, because the other ranks answer too."""
        files, problem = {}, None
        try:
            write()
            _rng_path(path, self._rank).write_text(json.dumps(rng) + "\n", encoding="utf-8")
            index = [path / INDEX] if self._rank == 0 else []
            for file in [*sorted(path.glob(f"__{self._rank}_*")), _rng_path(path, self._rank), *index]:
                to_disk(file)
                files[file.name] = describe_file(file)
        except CheckpointException as error:
            problem = _reasons(error)
        except OSError as error:
            problem = f"rank {self._rank}: {error}"
        return ShardReport(files={} if problem else files, error=problem, write_s=time.perf_counter() - started)


def kept_stager(device: torch.device) -> DefaultStager | None:
    """For ranks on GPUs: copies a save to pinned memory that the next save uses again. None on a CPU: it gains nothing.

    New pageable memory is filled at a tenth of the bus's speed (an estimate). Not yet run on a GPU.
    """
    if device.type == "cpu":
        return None
    return DefaultStager(StagingOptions(use_shared_memory=False, use_async_staging=False))


def file_shares(records: Mapping[str, FileRecord], *, num_ranks: int) -> list[dict[str, FileRecord]]:
    """The files that each rank compares before it loads: each file once, those of one writer by one rank.

    Tensors are sharded by rows in the order of the ranks, so a rank gets the files in which its own rows begin, however
    many ranks wrote them. Rank 0 gets what belongs to no writer, which is small.
    """
    found = {name: _WRITER.match(Path(name).name) for name in records}
    writers = {name: 0 if match is None else int(match["rank"]) for name, match in found.items()}
    num_writers = max(writers.values(), default=0) + 1
    shares: list[dict[str, FileRecord]] = [{} for _ in range(num_ranks)]
    for name, record in records.items():
        shares[writers[name] * num_ranks // num_writers][name] = record
    return shares


def load_shards(state: Mapping[str, Any], path: Path, *, alone: bool = False) -> None:
    """Fill the tensors of `state` from the directory `path`, which any number of ranks may have written.

    All ranks call this together, unless this process is `alone`. Raises CheckpointError if the tensors do not fit, with
    their names, or if the directory holds more than data.
    """
    reader = DataReader(path)
    known = reader.read_metadata().state_dict_metadata
    wanted = {name: part for name, part in state.items() if name != REJECTED_STEPS or name in known}
    try:
        with warnings.catch_warnings():
            # torch warns of no_dist, although it is what was asked for.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            dcp.load(wanted, storage_reader=reader, planner=DataPlanner(), no_dist=alone)
    except CheckpointException as error:
        raise CheckpointError(
            f"{path} does not fit the model and the optimizer of this run: {_reasons(error)}. "
            "Set model, policy and optim as they were when it was saved (state.json beside it)."
        ) from error


def load_rng(path: Path, *, rank: int, num_ranks: int, device: torch.device, seed: int, step: int) -> bool:
    """Take back this rank's generators from `path`; False if they were seeded anew instead.

    They are if another number of ranks wrote it: then no rank does what any of them did before.
    """
    if len(list(path.glob("rng_*.json"))) != num_ranks:
        for_python, for_numpy, for_torch = np.random.SeedSequence([seed, step, rank]).generate_state(3)
        random.seed(int(for_python))
        np.random.seed(int(for_numpy))
        torch.manual_seed(int(for_torch))
        return False
    state: RngState = json.loads(_rng_path(path, rank).read_text(encoding="utf-8"))
    version, words, normal = state["python"]
    random.setstate((version, tuple(words), normal))
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(_from_text(state["torch"]))
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(_from_text(state["cuda"]), device)
    return True


def _capture_rng(device: torch.device) -> RngState:
    """The state of all generators of this process; `device` is the rank's."""
    name, words, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [name, np.asarray(words).tolist(), *rest],
        "torch": _to_text(torch.get_rng_state()),
        "cuda": _to_text(torch.cuda.get_rng_state(device)) if device.type == "cuda" else None,
    }


def _to_text(state: torch.Tensor) -> str:
    return bytes(state.cpu().numpy()).hex()


def _from_text(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def _rng_path(path: Path, rank: int) -> Path:
    return path / f"rng_{rank}.json"


def _reasons(error: CheckpointException) -> str:
    """The first errors behind torch's, which repeats them rank by rank with their tracebacks."""
    texts = [f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in sorted(error.failures.items())]
    more = f"; and {len(texts) - _SHOWN_ERRORS} more" if len(texts) > _SHOWN_ERRORS else ""
    return "; ".join(texts[:_SHOWN_ERRORS]) + more
