"""Check 7: sleep and wake of a rank: what is given back, how long it takes, and that no bit changes; checkpoints."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace

import psutil
import torch

from gpu_check.host import NEEDS_CUDA, Host, gib
from gpu_check.memory import RECIPES, SMALL
from gpu_check.ranks import bits, lone_rank, run_config, training_data
from gpu_check.rows import Row, judged, not_run, noted
from trainer.limits.estimate import largest_micro_batch
from trainer.policy.worker import PolicyWorker

LEFT_BYTES = int(1.5 * 2**30)
"""Memory of a GPU that a sleeping rank may keep: the context and libraries."""
ROUNDS = 2


def turns(host: Host, *, expandable: bool) -> Iterator[Row]:
    """Two rounds of sleep and wake of a trained rank; `expandable` with expandable segments, which need a GPU."""
    check = "7 expandable segments" if expandable else "7"
    if expandable:
        host.require_cuda()
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    setting = replace(RECIPES["1.5B, 1 rank"] if host.is_cuda else SMALL, num_workers=1)
    config = run_config(setting, host)
    with lone_rank(config, host) as worker:
        mini, samples = training_data(
            config, largest_micro_batch(config), vocab=setting.size.vocab, num_micro_batches=1
        )
        worker.train([mini], samples, 1)
        before, state = bits(worker), worker._policy.state_dict()
        moments = _checksum(state["optimizer"])
        for number in range(1, ROUNDS + 1):
            yield from _round(check, number, worker, host)
        same = torch.equal(before, bits(worker)) and moments == _checksum(worker._policy.state_dict()["optimizer"])
        yield judged(
            check,
            "weights and moments after sleep and wake",
            expected="the same bits",
            measured="the same" if same else "other bits",
            ok=same,
            reason="sleep or wake damages them",
        )
    if not expandable:
        yield from _checkpoints(check, host)


def _round(check: str, number: int, worker: PolicyWorker, host: Host) -> Iterator[Row]:
    """One sleep and one wake."""
    resident = psutil.Process().memory_info().rss
    awake = host.used() if host.is_cuda else 0
    _, slept = host.once(worker.sleep)
    left = host.used() if host.is_cuda else 0
    grown = psutil.Process().memory_info().rss - resident
    _, woke = host.once(worker.wake)
    what = f"sleep and wake number {number}"
    yield noted(check, what, measured=f"{slept:.2f} s, {woke:.2f} s; the host takes {gib(max(0, grown))} more")
    if host.is_cuda:
        yield judged(
            check,
            f"{what}: memory of the GPU",
            expected=f"less than {gib(LEFT_BYTES)} left",
            measured=f"{gib(left)} of {gib(awake)} left",
            ok=left < LEFT_BYTES,
            reason="sleep gives too little back",
        )
    else:
        yield not_run(check, f"{what}: memory of the GPU", reason=NEEDS_CUDA)


def _checkpoints(check: str, host: Host) -> Iterator[Row]:
    """Checkpoints of a trained rank, of 0.5B on a GPU."""
    setting = replace(RECIPES["0.5B, 8 ranks"] if host.is_cuda else SMALL, num_workers=1)
    config = run_config(setting, host)
    with lone_rank(config, host) as worker:
        mini, samples = training_data(
            config, largest_micro_batch(config), vocab=setting.size.vocab, num_micro_batches=1
        )
        worker.train([mini], samples, 1)
        yield from _saved_and_loaded(check, worker, host)


def _saved_and_loaded(check: str, worker: PolicyWorker, host: Host) -> Iterator[Row]:
    """A checkpoint saved awake, asleep and in the background; each is loaded after the weights were changed."""
    wanted = bits(worker)
    for name, asleep, asynchronous in (("awake", False, False), ("asleep", True, False), ("background", False, True)):
        path = host.scratch / f"checkpoint_{name}"
        path.mkdir()
        if asleep:
            worker.sleep()
        _, returned = host.once(lambda p=path, a=asynchronous: worker.save_checkpoint(p, a))  # type: ignore[misc]
        report = worker.saved_checkpoint(wait=True)
        worker.wake()
        error = "no report" if report is None else report.error
        if error is None:
            with torch.no_grad():
                for parameter in worker._policy.model.parameters():
                    parameter.zero_()
            worker.load_checkpoint(path, 1)
        same = torch.equal(wanted, bits(worker))
        written = 0 if report is None else report.write_s
        yield judged(
            check,
            f"checkpoint, {name}: loaded again",
            expected="the same bits",
            measured=f"{'the same' if same else 'other'}; returned after {returned:.2f} s, written in {written:.2f} s",
            ok=same and error is None,
            reason=error or "other bits",
        )
        shutil.rmtree(path)


def _checksum(state: object) -> int:
    """A number that changes with any bit of the tensors inside `state`, which may be nested."""
    if isinstance(state, dict):
        return sum(_checksum(state[name]) for name in state)
    if isinstance(state, torch.Tensor):
        local = getattr(state, "to_local", lambda: state)()
        data = local.detach().contiguous().view(-1).view(torch.int32).long()
        return int((data * (torch.arange(data.numel(), device=data.device) % 251 + 1)).sum())
    return 0
