"""What saves memory changes no bit: activation checkpointing, offload to the host."""

from __future__ import annotations

import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp
from policy_cases import lone_worker, make_config, make_samples, save_policy
from test_packing import pack_samples
from torch.distributed.tensor import DTensor

from rollout.config import DType
from trainer.config.train import TrainConfig
from trainer.config.training import Offload
from trainer.limits.estimate import largest_micro_batch
from trainer.limits.floors import GroupLengths
from trainer.limits.memory_plan import CONTEXT_BYTES
from trainer.policy import host_copy
from trainer.policy import worker as policy_worker
from trainer.policy.host_copy import HostCopy, local_part
from trainer.policy.trainable import Trainable
from trainer.policy.worker import PolicyWorker
from trainer.scoring.forward import ScoringModel


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("model"))


def with_policy(model_path: Path, **changes: object) -> TrainConfig:
    config = make_config(model_path, num_workers=1)
    return replace(config, policy=replace(config.policy, **changes))


def train(worker: PolicyWorker, number: int) -> None:
    batch = pack_samples([make_samples()], num_ranks=1, max_tokens=80, policy_version=0)
    worker.train(batch.ranks[0], batch.samples, number)


def save(worker: PolicyWorker, path: Path) -> None:
    worker.save_checkpoint(path, False)
    report = worker.saved_checkpoint(True)
    assert report is not None and report.error is None


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def outcome(config: TrainConfig, model_path: Path) -> list[torch.Tensor]:
    """Gradients, weights and both moments of Adam after two steps."""
    with lone_worker(config, model_path) as worker:
        train(worker, 1)
        train(worker, 2)
        model, optimizer = worker._policy.model, worker._policy._optimizer
        parameters = list(model.parameters())
        gradients = [parameter.grad for parameter in parameters]
        states = [optimizer.state[p][name] for p in parameters for name in ("exp_avg", "exp_avg_sq")]
        moments = [worker._policy._readable(state) for state in states]
        return [whole(tensor) for tensor in [*gradients, *parameters, *moments] if tensor is not None]


def assert_same_bits(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected) == 26 * 4
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@contextmanager
def saved_bytes() -> Iterator[list[int]]:
    """Bytes that autograd keeps for the backward pass, one number per tensor."""
    sizes: list[int] = []
    seen: set[int] = set()

    def pack_tensor(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            sizes.append(storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack_tensor, lambda tensor: tensor):
        yield sizes


@pytest.mark.parametrize("every", [1, 2])
def test_checkpointed_activations_give_the_same_bits(model_path: Path, every: int) -> None:
    checkpointed = outcome(with_policy(model_path, activation_checkpoint_every=every), model_path)
    assert_same_bits(checkpointed, outcome(with_policy(model_path), model_path))


def test_checkpointed_layers_keep_little_for_the_backward_pass(model_path: Path) -> None:
    def kept(every: int) -> int:
        with lone_worker(with_policy(model_path, activation_checkpoint_every=every), model_path) as worker:
            batch = pack_samples([make_samples()], num_ranks=1, max_tokens=1000, policy_version=0)
            [micro] = batch.ranks[0][0].micro_batches
            with saved_bytes() as sizes:
                worker._training.score(micro)
            return sum(sizes)

    none, half, full = kept(0), kept(2), kept(1)
    assert full < half < none
    assert none - full > 1.9 * (none - half)  # two layers instead of one
    assert full < 0.4 * none


def test_checkpointing_works_in_half_precision(model_path: Path) -> None:
    config = with_policy(model_path, activation_checkpoint_every=1, dtype=DType.bfloat16)
    assert_same_bits(outcome(config, model_path), outcome(with_policy(model_path, dtype=DType.bfloat16), model_path))


@pytest.mark.parametrize("offload", [Offload.optimizer, Offload.parameters])
def test_offload_gives_the_same_bits(model_path: Path, offload: Offload) -> None:
    expected = outcome(with_policy(model_path), model_path)
    assert_same_bits(outcome(with_policy(model_path, offload=offload), model_path), expected)


def moments_of(worker: PolicyWorker) -> list[torch.Tensor]:
    states = worker._policy._optimizer.state.values()
    return [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]


def held(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of memory behind the tensors."""
    return sum(local_part(tensor).untyped_storage().nbytes() for tensor in tensors)


def test_optimizer_states_hold_no_device_memory_between_updates(model_path: Path, tmp_path: Path) -> None:
    with lone_worker(with_policy(model_path, offload=Offload.optimizer), model_path) as worker:
        train(worker, 1)
        assert len(moments_of(worker)) == 2 * 26
        assert held(moments_of(worker)) == 0
        save(worker, tmp_path / "offloaded")
        train(worker, 2)
        expected = [whole(parameter) for parameter in worker._policy.model.parameters()]
    # What was on the host is in the checkpoint, and a run without offload goes on from it with the same bits.
    with lone_worker(with_policy(model_path), model_path) as worker:
        worker.load_checkpoint(tmp_path / "offloaded", 1)
        train(worker, 2)
        found = [whole(parameter) for parameter in worker._policy.model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    with lone_worker(with_policy(model_path, offload=Offload.optimizer), model_path) as worker:
        worker.load_checkpoint(tmp_path / "offloaded", 1)
        assert held(moments_of(worker)) == 0
        train(worker, 2)
        found = [whole(parameter) for parameter in worker._policy.model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_host_copy_keeps_views_and_refuses_to_take_twice() -> None:
    device = torch.device("cpu")
    base = torch.arange(12.0)
    view, expected = base[4:].view(2, 4), base.clone()
    copy = HostCopy()
    copy.take([base, view], device=device)  # one storage
    assert held([base]) == 0
    assert torch.equal(copy.on_host(view), expected[4:].view(2, 4))
    with pytest.raises(RuntimeError, match="on the host already"):
        copy.take([base], device=device)
    copy.give_back(device=device)
    assert torch.equal(base, expected) and torch.equal(view, expected[4:].view(2, 4))
    view[0, 0] = -1.0
    assert base[4] == -1.0
    copy.give_back(device=device)
    assert base[4] == -1.0 and copy.on_host(base) is base


def test_a_host_copy_is_one_buffer_that_is_kept() -> None:
    device, copy = torch.device("cpu"), HostCopy()
    tensors = [torch.arange(3.0), torch.arange(5, dtype=torch.bfloat16), torch.arange(33.0).double()[7:]]
    expected = [tensor.clone() for tensor in tensors]
    places = set()
    for _ in range(2):
        copy.take(tensors, device=device)
        views = [copy.on_host(tensor) for tensor in tensors]
        assert held(tensors) == 0 and all(torch.equal(a, b) for a, b in zip(views, expected, strict=True))
        assert len({view.untyped_storage().data_ptr() for view in views}) == 1
        assert views[0].untyped_storage().nbytes() == 64 + 64 + 5 * 64  # 12, 10 and 264 bytes, each rounded up
        places.add(views[0].data_ptr())
        copy.give_back(device=device)
        assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))
    assert len(places) == 1
    copy.take(tensors[:1], device=device)
    assert copy.on_host(tensors[0]).untyped_storage().nbytes() == 64
    copy.give_back(device=device)


def test_a_checkpoint_before_the_first_update_wakes_nobody(model_path: Path, tmp_path: Path) -> None:
    with lone_worker(with_policy(model_path), model_path) as worker:
        worker.sleep()
        parameters = [parameter.to_local() for parameter in worker._policy._model.parameters()]
        worker.wake = worker._policy.wake = lambda: pytest.fail("the GPU is the engine's")  # type: ignore[method-assign]
        save(worker, tmp_path / "asleep")
        assert held(parameters) == held(moments_of(worker)) == 0
        states = worker._policy._optimizer.state.values()
        assert states and all(worker._policy._readable(state["step"]) == 0 for state in states)


@pytest.mark.parametrize("offload", list(Offload))
def test_a_policy_that_slept_goes_on_with_the_same_bits(model_path: Path, tmp_path: Path, offload: Offload) -> None:
    config = with_policy(model_path, offload=offload)
    expected = outcome(config, model_path)
    with lone_worker(config, model_path) as worker:
        worker.sleep()  # before there is any optimizer state
        worker.wake()
        train(worker, 1)
        parameters = [parameter.to_local() for parameter in worker._policy.model.parameters()]
        worker.sleep()
        worker.sleep()
        if offload is not Offload.parameters:
            assert held(parameters) == held(moments_of(worker)) == 0
            with pytest.raises(RuntimeError, match=r"the policy sleeps: .* resident\(\)"):
                worker.publish_weights(1)
        save(worker, tmp_path / "asleep")
        worker.wake()
        worker.wake()
        save(worker, tmp_path / "awake")
        train(worker, 2)
        optimizer = worker._policy._optimizer
        found = [parameter.grad for parameter in worker._policy.model.parameters()]
        found += list(worker._policy.model.parameters())
        states = [optimizer.state[p] for p in worker._policy.model.parameters()]
        moments = [worker._policy._readable(s[name]) for s in states for name in ("exp_avg", "exp_avg_sq")]
        assert_same_bits([whole(tensor) for tensor in [*found, *moments] if tensor is not None], expected)
    with lone_worker(config, model_path) as worker:
        worker.load_checkpoint(tmp_path / "asleep", 1)
        save(worker, tmp_path / "again")
    assert contents(tmp_path / "asleep") == contents(tmp_path / "awake") == contents(tmp_path / "again")


def contents(path: Path) -> dict[str, bytes]:
    """The tensors in a checkpoint of one rank."""
    reader = dcp.FileSystemReader(path)
    names = reader.read_metadata().state_dict_metadata
    state = {n: torch.empty(m.size, dtype=m.properties.dtype) for n, m in names.items() if hasattr(m, "size")}
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert len(state) > 100
    return {name: tensor.numpy().tobytes() for name, tensor in state.items()}


def test_a_checkpoint_can_be_saved_asleep_before_any_update(model_path: Path, tmp_path: Path) -> None:
    with lone_worker(with_policy(model_path), model_path) as worker:
        worker.sleep()
        save(worker, tmp_path / "first")
        with pytest.raises(RuntimeError, match="sleeps"):
            worker.publish_weights(1)  # still asleep
        worker.load_checkpoint(tmp_path / "first", 1)
        assert worker.publish_weights(1)


@pytest.mark.parametrize(("kept", "told"), [(CONTEXT_BYTES, False), (CONTEXT_BYTES + 2**30, True)])
def test_an_engine_that_keeps_its_memory_asleep_is_told_once_with_its_log(
    kept: int, told: bool, model_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No GPU is here: what one would say of its free memory is made up."""
    held = 2**29
    monkeypatch.setattr(host_copy, "ROOM_TIMEOUT_S", 0.0)
    for module in (host_copy, policy_worker):
        monkeypatch.setattr(module, "others_bytes", lambda device: held)
    with lone_worker(with_policy(model_path), model_path) as worker:
        worker.sleep()  # before the engine starts
        held += kept
        worker.wake()
        worker.sleep()
        worker.wake()
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == told
    said = f"keeps 3 GiB of the GPU, 2 GiB are planned: its log is {worker._setup.log_dir}/engine-0.log"
    assert all(said in line for line in warnings)


def test_a_dry_run_fills_the_cap_and_changes_nothing(model_path: Path) -> None:
    expected = outcome(with_policy(model_path), model_path)
    config = with_policy(model_path)
    config.sampling.max_new_tokens = 20
    groups = largest_micro_batch(config)
    assert groups == [GroupLengths(6, (20,) * 4, 80)] * 4  # less than the cap
    with lone_worker(config, model_path) as worker:
        report = worker.dry_run(groups)
        assert report.num_tokens == 4 * (6 + 4 * 20)
        # A peak on a CPU is of the process, whose first product loads libraries: of a small model that is most of it.
        assert str(report).endswith(" planned for it, and up to 512 MiB for libraries")
        assert report.planned_bytes is not None
        assert report.peak_bytes < report.planned_bytes + report.planned_besides_bytes
        on_gpu = str(replace(report, planned_besides_bytes=0))
        assert on_gpu.endswith(" planned") and "libraries" not in on_gpu
        assert all(parameter.grad is None for parameter in worker._policy.model.parameters())
        train(worker, 1)
        worker.dry_run(groups)
        train(worker, 2)
        found = [whole(parameter) for parameter in worker._policy.model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(found, expected[26:52], strict=True))
    # The cap cuts the second group: a part of it, and what is left.
    config.batch.max_tokens_per_microbatch = 140
    assert largest_micro_batch(config) == [
        GroupLengths(6, (20,) * 4, 80),
        GroupLengths(6, (20, 20), 40),
        GroupLengths(6, (2,), 2),
    ]
    assert largest_micro_batch(config, longest_prompt=3)[0] == GroupLengths(3, (20,) * 4, 80)
    # An optimizer step has half of the samples, a rank half of these.
    config.batch.mini_batch_prompts, config.policy.num_workers = 2, 2
    assert largest_micro_batch(config) == [GroupLengths(6, (20,) * 4, 80)]


def test_a_dry_run_holds_the_gradients_of_an_earlier_micro_batch(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[bool] = []
    backward = Trainable.backward

    def spy(self: Trainable[ScoringModel], loss: torch.Tensor) -> None:
        held.append(all(parameter.grad is not None for parameter in self.model.parameters()))
        backward(self, loss)

    monkeypatch.setattr(Trainable, "backward", spy)
    with lone_worker(with_policy(model_path), model_path) as worker:
        worker.dry_run([GroupLengths(1, (19,), 19)])
    assert held == [True]


def test_a_dry_run_that_does_not_fit_names_the_keys(model_path: Path) -> None:
    with lone_worker(with_policy(model_path), model_path) as worker:
        worker.dry_run([GroupLengths(1, (19,), 19)])
        limits = resource.getrlimit(resource.RLIMIT_AS)
        used = psutil.Process().memory_info().vms
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, limits[1]))
        try:
            with pytest.raises(
                RuntimeError, match=r"phase memory trial: .* does not fit \(batch.max_tokens_per_microbatch"
            ):
                worker.dry_run([GroupLengths(1, (99,) * 5000, 99 * 5000)])
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)
        worker.dry_run([GroupLengths(1, (19,), 19)])


def test_memory_that_could_not_be_pinned_is_not_unpinned(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
            return 0 if num_bytes < 8 else 2  # 2: out of memory

        def cudaHostUnregister(self, address: int) -> int:
            unpinned.append(address)
            return 0

    unpinned: list[int] = []
    monkeypatch.setattr(torch.cuda, "cudart", Driver)
    copy = HostCopy()
    copy._hold(4, is_pinned=True)
    first = copy._buffer.data_ptr()
    for num_bytes in (16, 32):
        with pytest.raises(RuntimeError, match="cudaHostRegister failed with CUDA status 2"):
            copy._hold(num_bytes, is_pinned=True)
    assert unpinned == [first]
