"""Weight buckets: what is packed comes out bit for bit, and whatever changed on the way is named."""

import pickle
import threading
import warnings
import weakref

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from packing_cases import pack_buckets

import rollout.weights.packing
from rollout.engine import WeightSyncError
from rollout.weights.packing import (
    ALIGNMENT,
    MAX_THREADS,
    TensorShape,
    check_buckets,
    num_bytes_of,
    num_threads,
    plan_buckets,
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


def pack(tensors=MIXED, *, version=3, bucket_bytes=1 << 20, dtype=torch.float32):
    return pack_buckets(tensors.items(), policy_version=version, bucket_bytes=bucket_bytes, dtype=dtype)


def unpack_all(buckets):
    return {spec.name: tensor for bucket in buckets for spec, tensor in unpack(bucket)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
def test_tensors_survive_packing_bit_for_bit(dtype, bucket_bytes):
    buckets = pack(dtype=dtype, bucket_bytes=bucket_bytes)
    unpacked = unpack_all(buckets)
    assert list(unpacked) == list(MIXED)
    for name, tensor in MIXED.items():
        expected = tensor.to(dtype) if tensor.is_floating_point() else tensor
        assert unpacked[name].dtype == expected.dtype
        assert unpacked[name].shape == expected.shape
        assert torch.equal(unpacked[name], expected)
    assert check_buckets(buckets, held_version=3) == 3


def test_a_tensor_larger_than_a_bucket_gets_its_own_and_others_share():
    tensors = {"a": torch.zeros(10), "big": torch.zeros(1000), "b": torch.zeros(10), "c": torch.zeros(10)}
    buckets = pack(tensors, bucket_bytes=200)
    assert [[spec.name for spec in bucket.tensors] for bucket in buckets] == [["a"], ["big"], ["b", "c"]]
    assert [(bucket.index, bucket.num_buckets) for bucket in buckets] == [(0, 3), (1, 3), (2, 3)]
    # 10 float32 = 40 bytes, padded to the next multiple of 64.
    assert [spec.offset for spec in buckets[2].tensors] == [0, 64]
    assert buckets[2].data.nbytes == 104
    assert not buckets[2].data[40:64].any()


def test_digest_is_that_of_the_bytes_that_travel():
    value = torch.tensor([1.0, -2.0])
    # bfloat16 is the upper half of float32: 1.0 = 3f80, -2.0 = c000, little-endian.
    assert tensor_digest(value.bfloat16()) == xxhash.xxh3_64_hexdigest(bytes.fromhex("803f00c0"))
    (bucket,) = pack({"w": value}, dtype=torch.bfloat16)
    assert bucket.tensors[0].digest == tensor_digest(value.bfloat16())
    assert bucket.tensors[0].dtype == "bfloat16"
    assert tensor_digest(value) != tensor_digest(value.flip(0))


def test_read_only_buffers_are_viewed_without_copy_or_warning():
    buckets = pack()
    chunks = []
    payload = pickle.dumps(buckets, protocol=5, buffer_callback=chunks.append)
    # As Ray hands them out: out-of-band buffers over memory that must not be written.
    arrived = pickle.loads(payload, buffers=[bytes(chunk) for chunk in chunks])
    assert not arrived[0].data.flags.writeable
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert check_buckets(arrived, held_version=0) == 3
        tensors = dict(zip(MIXED, (tensor for _, tensor in unpack(arrived[0])), strict=True))
    assert torch.equal(tensors["matrix"], MIXED["matrix"])
    start = arrived[0].data.ctypes.data
    for spec, tensor in unpack(arrived[0]):
        assert tensor.numel() == 0 or tensor.data_ptr() == start + spec.offset


@pytest.mark.parametrize("name", ["matrix", "transposed", "counter", "half"])
@pytest.mark.parametrize("bit", [0, 7])
def test_one_flipped_bit_is_named(name, bit):
    (bucket,) = pack()
    (spec,) = [spec for spec in bucket.tensors if spec.name == name]
    bucket.data[spec.offset + spec.num_bytes - 1] ^= 1 << bit
    with pytest.raises(WeightSyncError, match=rf"tensor {name} was changed.*{spec.digest}"):
        check_buckets([bucket], held_version=0)
    bucket.data[spec.offset + spec.num_bytes - 1] ^= 1 << bit
    check_buckets([bucket], held_version=0)


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
    (bucket,) = pack()
    setattr(bucket.tensors[0], field, value)
    with pytest.raises(WeightSyncError, match=f"tensor matrix .*{message}"):
        check_buckets([bucket], held_version=0)


def test_incomplete_mixed_and_old_syncs_are_refused():
    buckets = pack(bucket_bytes=1)
    with pytest.raises(WeightSyncError, match=r"expected weight buckets \[0, 1, 2, 3, 4, 5, 6\], got \[0, 1, 2"):
        check_buckets(buckets[:-1], held_version=0)
    with pytest.raises(WeightSyncError, match="no weight buckets"):
        check_buckets([], held_version=0)
    with pytest.raises(WeightSyncError, match=r"different policy versions were mixed: \[3, 4\]"):
        check_buckets([*buckets[:-1], pack(version=4, bucket_bytes=1)[-1]], held_version=0)
    with pytest.raises(WeightSyncError, match="version 3 were sent to an engine that already holds version 4"):
        check_buckets(buckets, held_version=4)
    buckets[1].tensors[0].name = "matrix"
    with pytest.raises(WeightSyncError, match="sent more than once: matrix"):
        check_buckets(buckets, held_version=0)


def test_packing_refuses_what_cannot_travel():
    with pytest.raises(ValueError, match="no tensors"):
        pack({})
    with pytest.raises(ValueError, match="tensor w was given twice"):
        pack_buckets([("w", torch.ones(1))] * 2, policy_version=0, bucket_bytes=8, dtype=torch.float32)
    with pytest.raises(ValueError, match="bucket_bytes must be >= 1, got 0"):
        pack(bucket_bytes=0)
    with pytest.raises(ValueError, match=r"tensor z has dtype torch\.complex64"):
        pack({"z": torch.zeros(2, dtype=torch.complex64)})
    with pytest.raises(ValueError, match=r"floating-point type.*torch\.int64"):
        pack(dtype=torch.int64)


def use_threads(monkeypatch, number):
    """Whatever this machine has: `number` threads, and every tensor is a batch of its own."""
    monkeypatch.setattr(rollout.weights.packing, "num_threads", lambda: number)
    monkeypatch.setattr(rollout.weights.packing, "BATCH_BYTES", 1)


@pytest.mark.parametrize(("cores", "threads"), [({3}, 1), ({0, 5}, 2), (set(range(64)), MAX_THREADS)])
def test_threads_are_those_of_the_cores_that_the_process_may_use(monkeypatch, cores, threads):
    monkeypatch.setattr(rollout.weights.packing.os, "sched_getaffinity", lambda _: cores)
    assert num_threads() == threads


@pytest.mark.parametrize("number", [1, 2, 5])
def test_any_number_of_threads_writes_and_checks_every_tensor(monkeypatch, number):
    use_threads(monkeypatch, number)
    tensors = {f"t{i}": torch.arange(i, i + 1 + i % 7) for i in range(60)}
    buckets = pack(tensors, bucket_bytes=300)
    assert check_buckets(buckets, held_version=0) == 3
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in unpack_all(buckets).items())
    for bucket in buckets:
        bucket.data[bucket.tensors[-1].offset] ^= 1
        with pytest.raises(WeightSyncError, match=f"tensor {bucket.tensors[-1].name} was changed"):
            check_buckets(buckets, held_version=0)
        bucket.data[bucket.tensors[-1].offset] ^= 1
    with pytest.raises(NotImplementedError, match="no data"):
        pack(tensors | {"t7": torch.empty(1, dtype=torch.int64, device="meta")})


def test_two_threads_digest_at_a_time(monkeypatch):
    use_threads(monkeypatch, 2)
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

    monkeypatch.setattr(rollout.weights.packing.xxhash, "xxh3_64", Digest)
    check_buckets(pack({"a": torch.ones(3), "b": torch.ones(4)}), held_version=0)


def test_few_tensors_are_held_while_the_next_are_gathered(monkeypatch):
    use_threads(monkeypatch, 3)
    monkeypatch.setattr(rollout.weights.packing, "MAX_WAITING", 4)
    gathered, write = threading.Event(), rollout.weights.packing._write
    held = []

    def write_late(*arguments):
        if threading.current_thread() is not threading.main_thread():
            assert gathered.wait(WAIT_S)
        write(*arguments)

    def gather():
        arrays = []
        for i in range(40):
            array = np.full(3, i)
            arrays.append(weakref.ref(array))
            yield f"t{i}", torch.from_numpy(array)
            del array
            held.append(sum(at() is not None for at in arrays))
        gathered.set()

    monkeypatch.setattr(rollout.weights.packing, "_write", write_late)
    shapes = [TensorShape(f"t{i}", torch.int64, (3,)) for i in range(40)]
    plan = plan_buckets(shapes, bucket_bytes=1 << 20, dtype=torch.float32)
    write_tensors(gather(), plan, np.zeros(num_bytes_of(plan), dtype=np.uint8))
    assert 4 <= max(held) <= 4 + 2


@settings(max_examples=50)
@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=8),
    bucket_bytes=st.integers(1, 400),
    seed=st.integers(0, 99),
)
def test_any_shapes_and_bucket_sizes_round_trip(shapes, bucket_bytes, seed):
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"t{i}": torch.randn(shape, generator=generator) for i, shape in enumerate(shapes)}
    buckets = pack(tensors, bucket_bytes=bucket_bytes)
    check_buckets(buckets, held_version=0)
    unpacked = unpack_all(buckets)
    assert all(torch.equal(unpacked[name], tensor) for name, tensor in tensors.items())
    for bucket in buckets:
        assert bucket.data.dtype == np.uint8
        assert bucket.data.nbytes <= bucket_bytes or len(bucket.tensors) == 1
        assert all(spec.offset % ALIGNMENT == 0 for spec in bucket.tensors)
