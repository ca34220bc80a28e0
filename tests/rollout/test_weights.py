"""Packed weights: what is packed comes out bit for bit, and whatever changed on the way is named."""

import pickle
import threading
import warnings
import weakref
from dataclasses import replace

import numpy as np
import packing_cases
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

import rollout.weights.packed_weights
from rollout.engine import WeightSyncError
from rollout.weights.packed_weights import (
    ALIGNMENT,
    MAX_THREADS,
    TensorShape,
    check_weights,
    num_bytes_of,
    num_threads,
    plan_packing,
    split,
    tensor_digest,
    unpack,
    write_tensors,
)

WAIT_S = 30.0

MIXED = {
    "matrix": torch.linspace(-1, 1, 15).reshape(3, 5),
    "transposed": torch.arange(12.0).reshape(3, 4).T,
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 7),
    "counter": torch.tensor([1, 2, 2**40]),
    "bits": torch.tensor([True, False, True]),
    "half": torch.tensor([1.0, 1e-4, 65504.0], dtype=torch.float16),
}


def pack(tensors=MIXED, *, version=3, dtype=torch.float32):
    return packing_cases.pack(tensors.items(), policy_version=version, dtype=dtype)


def unpack_all(packed):
    return {spec.name: tensor for spec, tensor in unpack(packed)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_survive_packing_bit_for_bit(dtype):
    packed = pack(dtype=dtype)
    unpacked = unpack_all(packed)
    assert list(unpacked) == list(MIXED)
    for name, tensor in MIXED.items():
        expected = tensor.to(dtype) if tensor.is_floating_point() else tensor
        assert unpacked[name].dtype == expected.dtype
        assert unpacked[name].shape == expected.shape
        assert torch.equal(unpacked[name], expected)
    check_weights(packed, held_version=3)


def test_tensors_lie_one_after_the_other_on_a_grid():
    packed = pack({"a": torch.ones(10), "b": torch.ones(2)})
    # 10 float32 = 40 bytes, padded to the next multiple of 64.
    assert [spec.offset for spec in packed.tensors] == [0, 64]
    assert packed.data.nbytes == 72
    assert not packed.data[40:64].any()


def test_weights_are_split_between_tensors_and_a_larger_tensor_comes_alone():
    tensors = {"a": torch.zeros(10), "big": torch.zeros(1000), "b": torch.ones(10), "c": torch.zeros(10)}
    parts = list(split(pack(tensors), max_bytes=200))
    assert [[spec.name for spec in part.tensors] for part in parts] == [["a"], ["big"], ["b", "c"]]
    assert [spec.offset for spec in parts[2].tensors] == [0, 64] and parts[2].data.nbytes == 104
    for part in parts:
        check_weights(part, held_version=3)


def test_digest_is_that_of_the_bytes_that_travel():
    value = torch.tensor([1.0, -2.0])
    # bfloat16 is the upper half of float32: 1.0 = 3f80, -2.0 = c000, little-endian.
    assert tensor_digest(value.bfloat16()) == xxhash.xxh3_64_hexdigest(bytes.fromhex("803f00c0"))
    (spec,) = pack({"w": value}, dtype=torch.bfloat16).tensors
    assert spec.digest == tensor_digest(value.bfloat16())
    assert spec.dtype == "bfloat16"
    assert tensor_digest(value) != tensor_digest(value.flip(0))


def test_read_only_buffers_are_viewed_without_copy_or_warning():
    chunks = []
    payload = pickle.dumps(pack(), protocol=5, buffer_callback=chunks.append)
    # As Ray hands them out: out-of-band buffers over memory that must not be written.
    arrived = pickle.loads(payload, buffers=[bytes(chunk) for chunk in chunks])
    assert not arrived.data.flags.writeable
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_weights(arrived, held_version=0)
        tensors = unpack_all(arrived)
    assert torch.equal(tensors["matrix"], MIXED["matrix"])
    start = arrived.data.ctypes.data
    for spec, tensor in unpack(arrived):
        assert tensor.numel() == 0 or tensor.data_ptr() == start + spec.offset


@pytest.mark.parametrize("name", ["matrix", "transposed", "counter", "half"])
@pytest.mark.parametrize("bit", [0, 7])
def test_one_flipped_bit_is_named(name, bit):
    packed = pack()
    (spec,) = [spec for spec in packed.tensors if spec.name == name]
    packed.data[spec.offset + spec.num_bytes - 1] ^= 1 << bit
    with pytest.raises(WeightSyncError, match=rf"tensor {name} was changed.*{spec.digest}"):
        check_weights(packed, held_version=0)
    packed.data[spec.offset + spec.num_bytes - 1] ^= 1 << bit
    check_weights(packed, held_version=0)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("offset", 1 << 30, "outside the"),
        ("offset", 4, "off the 64-byte grid"),
        ("shape", (2, 5), "needs 40 bytes, its spec says 60"),
        ("dtype", "float8", "unknown dtype 'float8'"),
    ],
)
def test_a_spec_that_contradicts_the_buffer_is_named(field, value, message):
    packed = pack()
    setattr(packed.tensors[0], field, value)
    with pytest.raises(WeightSyncError, match=f"tensor matrix .*{message}"):
        check_weights(packed, held_version=0)


def test_empty_and_old_syncs_and_repeated_tensors_are_refused():
    packed = pack()
    with pytest.raises(WeightSyncError, match="no tensors were sent"):
        check_weights(replace(packed, tensors=[]), held_version=0)
    with pytest.raises(WeightSyncError, match="version 3 were sent to an engine that already holds version 4"):
        check_weights(packed, held_version=4)
    packed.tensors[1].name = "matrix"
    with pytest.raises(WeightSyncError, match="sent more than once: matrix"):
        check_weights(packed, held_version=0)


def test_packing_refuses_what_cannot_travel():
    with pytest.raises(ValueError, match="no tensors"):
        pack({})
    with pytest.raises(ValueError, match="tensor w was given twice"):
        packing_cases.pack([("w", torch.ones(1))] * 2, policy_version=0, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"tensor z has dtype torch\.complex64"):
        pack({"z": torch.zeros(2, dtype=torch.complex64)})
    with pytest.raises(ValueError, match=r"floating-point type.*torch\.int64"):
        pack(dtype=torch.int64)
    with pytest.raises(NotImplementedError, match="no data"):
        pack({"t": torch.empty(1, dtype=torch.int64, device="meta")})


@pytest.mark.parametrize(("cores", "threads"), [({3}, 1), ({0, 5}, 2), (set(range(64)), MAX_THREADS)])
def test_threads_are_those_of_the_cores_that_the_process_may_use(monkeypatch, cores, threads):
    monkeypatch.setattr(rollout.weights.packed_weights.os, "sched_getaffinity", lambda _: cores)
    assert num_threads() == threads


@pytest.mark.parametrize("number", [1, 2, 5])
def test_any_number_of_threads_digests_and_checks_every_tensor(monkeypatch, number):
    monkeypatch.setattr(rollout.weights.packed_weights, "num_threads", lambda: number)
    tensors = {f"t{i}": torch.arange(i, i + 1 + i % 7) for i in range(60)}
    packed = pack(tensors)
    check_weights(packed, held_version=0)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in unpack_all(packed).items())
    for spec in packed.tensors[::9]:
        packed.data[spec.offset] ^= 1
        with pytest.raises(WeightSyncError, match=f"tensor {spec.name} was changed"):
            check_weights(packed, held_version=0)
        packed.data[spec.offset] ^= 1


def test_two_threads_digest_at_a_time(monkeypatch):
    monkeypatch.setattr(rollout.weights.packed_weights, "num_threads", lambda: 2)
    together = threading.Barrier(2)
    digest = xxhash.xxh3_64

    class Digest:
        def __init__(self):
            self.digest = digest()

        def update(self, data):
            together.wait(WAIT_S)  # broken, and an error, if one thread does one after the other
            self.digest.update(data)

        def hexdigest(self):
            return self.digest.hexdigest()

    monkeypatch.setattr(rollout.weights.packed_weights.xxhash, "xxh3_64", Digest)
    check_weights(pack({"a": torch.ones(3), "b": torch.ones(4)}), held_version=0)


def test_no_tensor_is_held_while_the_next_is_gathered():
    arrays, held = [], []

    def gather():
        for i in range(40):
            array = np.full(3, i)
            arrays.append(weakref.ref(array))
            yield f"t{i}", torch.from_numpy(array)
            del array
            held.append(sum(at() is not None for at in arrays))

    plan = plan_packing([TensorShape(f"t{i}", torch.int64, (3,)) for i in range(40)], dtype=torch.float32)
    write_tensors(gather(), plan, np.zeros(num_bytes_of(plan), dtype=np.uint8))
    assert max(held) <= 1


@settings(max_examples=50)
@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=8),
    max_bytes=st.integers(1, 400),
    seed=st.integers(0, 99),
)
def test_any_shapes_round_trip_whole_and_in_parts(shapes, max_bytes, seed):
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"t{i}": torch.randn(shape, generator=generator) for i, shape in enumerate(shapes)}
    packed = pack(tensors)
    check_weights(packed, held_version=0)
    parts = list(split(packed, max_bytes=max_bytes))
    unpacked = {name: tensor for part in parts for name, tensor in unpack_all(part).items()}
    assert list(unpacked) == list(unpack_all(packed)) == list(tensors)
    assert all(torch.equal(unpacked[name], tensor) for name, tensor in tensors.items())
    for part in parts:
        assert part.data.nbytes <= max_bytes or len(part.tensors) == 1
        assert all(spec.offset % ALIGNMENT == 0 for spec in part.tensors)
