"""Weights in shared memory: what is published arrives bitwise in another process, is never read while it changes, and
nothing is left when everybody is killed."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from rollout.engine import WeightSyncError
from rollout.types import SharedWeights
from rollout.weights.packed_weights import TensorShape, check_weights, tensor_digest, unpack
from rollout.weights.shared_weights import (
    DATA_START,
    MAX_REGIONS,
    MappedRegion,
    WeightPublisher,
    WeightReader,
    copy_of,
)

WAIT_S = 90.0


def named_tensors(seed: int) -> list[tuple[str, torch.Tensor]]:
    """Tensors of many sizes, an empty one and integers."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {"embed": (700_001,), "a": (30, 33), "b": (7,), "large": (3000,), "none": (0, 4), "c": (64, 2)}
    named = [(name, torch.randn(shape, generator=generator)) for name, shape in sizes.items()]
    return [*named, ("counter", torch.tensor([seed, 2**40]))]


def make_publisher(dtype: torch.dtype = torch.bfloat16) -> WeightPublisher:
    shapes = [TensorShape(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named_tensors(0)]
    return WeightPublisher(shapes, dtype=dtype)


def publish(publisher: WeightPublisher, version: int) -> SharedWeights:
    return publisher.publish(iter(named_tensors(version)), policy_version=version)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_published_is_read_bitwise_with_the_digests_of_the_cast_tensors(dtype: torch.dtype) -> None:
    publisher, reader = make_publisher(dtype), WeightReader()
    for version in (1, 2, 3):
        with reader.opened(publish(publisher, version)) as packed:
            check_weights(packed, held_version=0)
            assert packed.policy_version == version
            found = {spec.name: (tensor, spec.digest) for spec, tensor in unpack(packed)}
        for name, tensor in named_tensors(version):
            expected = tensor.to(dtype) if tensor.is_floating_point() else tensor
            assert torch.equal(found[name][0], expected)
            assert found[name][1] == tensor_digest(expected)


def test_non_contiguous_tensors_are_published_in_row_major_order() -> None:
    tensor = torch.arange(12.0).reshape(3, 4).T
    publisher = WeightPublisher([TensorShape("w", tensor.dtype, (4, 3))], dtype=torch.float32)
    with WeightReader().opened(publisher.publish([("w", tensor)], policy_version=1)) as packed:
        ((_, found),) = unpack(packed)
        assert torch.equal(found, tensor)


def test_other_tensors_than_planned_are_refused_and_leave_no_readable_version() -> None:
    publisher, reader = make_publisher(), WeightReader()
    first = publish(publisher, 1)
    reshaped = [(name, tensor.flatten()) for name, tensor in named_tensors(2)]
    for wrong in (reshaped, named_tensors(2)[:-1], [*named_tensors(2), ("more", torch.ones(1))]):
        with pytest.raises(
            ValueError, match=r"tensor (a|more) of shape .* came, planned was|1 planned tensors did not"
        ):
            publisher.publish(wrong, policy_version=2)
        with pytest.raises(WeightSyncError, match="hold a half-written version"), reader.opened(first):
            pass
    with reader.opened(publish(publisher, 3)) as packed:
        check_weights(packed, held_version=1)


def test_a_byte_that_changes_in_the_region_is_named() -> None:
    publisher, reader = make_publisher(), WeightReader()
    shared = publish(publisher, 1)
    place = next(spec.offset for spec in shared.tensors if spec.name == "large")
    with open(shared.address.path, "r+b") as file:
        file.seek(DATA_START + place + 1000)
        byte = file.read(1)[0]
        file.seek(DATA_START + place + 1000)
        file.write(bytes([byte ^ 16]))
    with (
        reader.opened(shared) as packed,
        pytest.raises(WeightSyncError, match="policy version 1: tensor large was changed"),
    ):
        check_weights(packed, held_version=0)


def test_a_reader_cannot_change_what_others_read() -> None:
    publisher = make_publisher()
    shared = publish(publisher, 1)
    with WeightReader().opened(shared) as mine, WeightReader().opened(shared) as theirs:
        mine.data[:] = 0
        check_weights(theirs, held_version=0)


def test_an_announcement_keeps_its_digests_when_the_next_version_is_published() -> None:
    publisher = make_publisher()
    old = publish(publisher, 1)
    digests = [spec.digest for spec in old.tensors]
    publish(publisher, 2)
    assert digests == [spec.digest for spec in old.tensors]


def test_a_stale_announcement_is_refused() -> None:
    publisher, reader = make_publisher(), WeightReader()
    old = publish(publisher, 1)
    new = publish(publisher, 2)
    with (
        pytest.raises(WeightSyncError, match="hold policy version 2, policy version 1 was announced"),
        reader.opened(old),
    ):
        pass
    with pytest.raises(WeightSyncError, match="hold policy version 2, policy version 1 was announced"):
        copy_of(old)
    with pytest.raises(WeightSyncError, match=r"weights of policy version 2 .* already holds version 3"):
        check_weights(copy_of(new), held_version=3)


def test_memory_in_use_is_not_written_and_is_written_again_once_free() -> None:
    publisher, reader = make_publisher(), WeightReader()
    addresses = []
    for version in range(1, 7):
        shared = publish(publisher, version)
        addresses.append(shared.address.region_id)
        # As an engine that uses the weights in place: the lock stays until the next version is in use.
        with reader.opened(shared) as packed:
            check_weights(packed, held_version=0)
        for spec, tensor in unpack(packed):
            assert tensor_digest(tensor) == spec.digest
        if version > 1:
            assert addresses[-1] != addresses[-2]
    assert len(set(addresses)) == 2
    reader.release()
    addresses = []
    for version in range(7, 10):
        shared = publish(publisher, version)
        addresses.append(shared.address.region_id)
        with reader.opened(shared) as packed:
            check_weights(packed, held_version=0)
        reader.release()
    assert len(set(addresses)) == 1


def test_a_failed_sync_keeps_the_memory_that_the_engine_still_uses() -> None:
    publisher, reader = make_publisher(), WeightReader()
    with reader.opened(publish(publisher, 1)) as kept:
        pass
    for version in (2, 3, 4):
        with pytest.raises(RuntimeError, match="planted"), reader.opened(publish(publisher, version)):
            raise RuntimeError("planted")
    check_weights(kept, held_version=1)
    assert len(publisher._pool._regions) == 2


def test_engines_that_hold_every_region_end_the_sync() -> None:
    publisher = make_publisher()
    readers = [WeightReader() for _ in range(MAX_REGIONS)]
    for version, reader in enumerate(readers):
        with reader.opened(publish(publisher, version)):
            pass  # the memory stays in use
    with pytest.raises(WeightSyncError, match=r"policy version 9 cannot be published: engines hold on to all 3"):
        publish(publisher, 9)
    readers[1].close()
    publish(publisher, 9)


def test_nobody_reads_while_the_trainer_writes() -> None:
    publisher, reader = make_publisher(), WeightReader()
    shared = publish(publisher, 1)

    def in_the_middle() -> Iterator[tuple[str, torch.Tensor]]:
        for position, pair in enumerate(named_tensors(2)):
            if position == 3:
                with pytest.raises(WeightSyncError, match="is writing to the shared weights"), reader.opened(shared):
                    pass
                # Even without the lock the version says that the bytes are no version at all.
                with pytest.raises(WeightSyncError, match="half-written"):
                    MappedRegion(shared.address).expect(1)
            yield pair

    publisher.publish(in_the_middle(), policy_version=2)


def test_what_lies_under_the_path_must_be_the_announced_region(tmp_path: Path) -> None:
    publisher = make_publisher()
    shared = publish(publisher, 1)
    for address, message in (
        (replace(shared.address, num_bytes=shared.address.num_bytes + 1), "is not the trainer's shared weights"),
        (replace(shared.address, region_id="0" * 16), "holds something else than shared weights 0000"),
        (replace(shared.address, path=str(tmp_path / "absent")), "are gone"),
    ):
        with pytest.raises(WeightSyncError, match=message):
            MappedRegion(address)
    with open(shared.address.path, "rb") as file:
        (tmp_path / "copy").write_bytes(file.read())
    with pytest.raises(WeightSyncError, match="of sealed size"):
        MappedRegion(replace(shared.address, path=str(tmp_path / "copy")))
    with pytest.raises(OSError), open(shared.address.path, "r+b") as file:
        file.truncate(100)


CHILD = """
    import pickle, sys, time
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    from test_shared_weights import make_publisher, publish
    from rollout.weights.shared_weights import WeightReader
    from rollout.weights.packed_weights import check_weights

    role, directory = sys.argv[1], Path(sys.argv[2])
    if role == "trainer":
        publisher = make_publisher()
        publish(publisher, 1)
        shared = publish(publisher, 2)
        (directory / "part").write_bytes(pickle.dumps(shared))
        (directory / "part").rename(directory / "shared")
    else:
        reader = WeightReader()
        with reader.opened(pickle.loads((directory / "shared").read_bytes())) as packed:
            check_weights(packed, held_version=1)
        (directory / "mapped").touch()
        while not (directory / "trainer_is_dead").exists():
            time.sleep(0.01)
        check_weights(packed, held_version=1)
        (directory / "checked").touch()
    time.sleep(600)
"""


def start_child(role: str, directory: Path) -> subprocess.Popen[bytes]:
    program = textwrap.dedent(CHILD).format(tests=str(Path(__file__).parent))
    return subprocess.Popen([sys.executable, "-c", program, role, str(directory)])


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not come"
        time.sleep(0.01)


def test_a_reader_outlives_the_trainer_and_nothing_is_left_when_all_are_killed(tmp_path: Path) -> None:
    segments = set(os.listdir("/dev/shm"))
    trainer = start_child("trainer", tmp_path)
    children = [trainer]
    try:
        wait_for(tmp_path / "shared")
        children.append(start_child("engine", tmp_path))
        wait_for(tmp_path / "mapped")
        files = {Path(m.path).name for child in children for m in psutil.Process(child.pid).memory_maps()}
        assert any("parity-weights" in name for name in files), "the memory is where the test looks"
        trainer.send_signal(signal.SIGKILL)
        trainer.wait(WAIT_S)
        (tmp_path / "trainer_is_dead").touch()
        wait_for(tmp_path / "checked")
        shared = pickle.loads((tmp_path / "shared").read_bytes())
        with pytest.raises(WeightSyncError, match=r"shared weights at /proc/\d+/fd/\d+ are gone"):
            MappedRegion(shared.address)
    finally:
        for child in children:
            child.kill()
            child.wait(WAIT_S)
    assert set(os.listdir("/dev/shm")) - segments == set()


def test_digests_are_those_of_the_region_not_of_the_source() -> None:
    """Casting comes first: float32 values that bfloat16 cannot hold would give another digest."""
    publisher = make_publisher()
    shared = publish(publisher, 1)
    digests = {spec.name: spec.digest for spec in shared.tensors}
    source = dict(named_tensors(1))["large"]
    assert digests["large"] == tensor_digest(source.bfloat16()) != tensor_digest(source)
    assert np.all(copy_of(shared).data[:2] == source_bytes(dict(named_tensors(1))["embed"]))


def source_bytes(tensor: torch.Tensor) -> np.ndarray:
    raw: np.ndarray = tensor[:1].bfloat16().view(torch.uint8).numpy()
    return raw
