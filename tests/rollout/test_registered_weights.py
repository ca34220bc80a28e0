"""Shared weights that CUDA has page-locked, with a stand-in for CUDA's runtime: it locks as a driver does, by touching
every page for writing, which takes a private copy of a page that is not shared."""

from __future__ import annotations

import ctypes
import json
import logging
import mmap
from collections.abc import Iterable, Iterator
from dataclasses import asdict

import pytest
import torch

from rollout.sglang import loader
from rollout.types import SharedWeights
from rollout.weights.packed_weights import TensorShape
from rollout.weights.shared_weights import WeightPublisher


class Runtime:
    """Stands in for torch.cuda.cudart(); `refuses` is the error of every registration."""

    def __init__(self, refuses: int = 0) -> None:
        self.refuses = refuses
        self.registered: dict[int, int] = {}
        self.calls = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert address % mmap.PAGESIZE == 0 and flags == 0 and address not in self.registered
        self.calls += 1
        if self.refuses:
            return self.refuses
        for page in range(0, size, mmap.PAGESIZE):
            byte = ctypes.c_ubyte.from_address(address + page)
            byte.value = byte.value
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


class Model(torch.nn.Module):
    """What the loader needs of SGLang's model."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, torch.Tensor] = {}

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.held = {name: tensor.clone() for name, tensor in named}


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    """CUDA's runtime in this process; the loader has mapped nothing yet."""
    found = Runtime()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    loader._mapped.cache_clear()
    yield found
    loader._mapped.cache_clear()


def weights(version: int) -> list[tuple[str, torch.Tensor]]:
    """Three pages of float32."""
    return [("w", torch.full((3 * mmap.PAGESIZE // 4,), float(version)))]


def publish(publisher: WeightPublisher, version: int) -> SharedWeights:
    return publisher.publish(weights(version), policy_version=version)


def load(model: Model, shared: SharedWeights) -> None:
    """As SGLang calls the loader for a request of Parity."""
    tensors = [{"name": s.name, "dtype": s.dtype, "shape": s.shape, "offset": s.offset} for s in shared.tensors]
    request = {
        "region": asdict(shared.address),
        "policy_version": shared.policy_version,
        "quantized": False,
        "adapter": None,
        "tensors": tensors,
    }
    text = torch.frombuffer(bytearray(json.dumps(request).encode()), dtype=torch.uint8)
    loader.load_shared(model, [("description", text)])


def test_both_sides_register_once_and_read_every_later_version(runtime: Runtime) -> None:
    publisher = WeightPublisher([TensorShape("w", torch.float32, tuple(weights(0)[0][1].shape))], dtype=torch.float32)
    model = Model()
    for version in (1, 2, 3):
        load(model, publish(publisher, version))
        assert torch.equal(model.held["w"], weights(version)[0][1])
    assert runtime.calls == 2
    assert list(runtime.registered.values()) == [3 * mmap.PAGESIZE] * 2
    publisher.close()
    assert len(runtime.registered) == 1
    loader._mapped.cache_clear()
    assert not runtime.registered


def test_memory_that_cuda_refuses_is_copied_as_it_is_and_the_log_says_so(
    runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    runtime.refuses = 2
    publisher = WeightPublisher([TensorShape("w", torch.float32, tuple(weights(0)[0][1].shape))], dtype=torch.float32)
    model = Model()
    with caplog.at_level(logging.WARNING):
        load(model, publish(publisher, 1))
        load(model, publish(publisher, 2))
    assert torch.equal(model.held["w"], weights(2)[0][1])
    assert runtime.calls == 2  # it is not tried at every sync
    assert caplog.text.count("failed with CUDA error 2: they are copied as pageable memory") == 2
    publisher.close()


def test_a_process_without_cuda_registers_nothing(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    publisher = WeightPublisher([TensorShape("w", torch.float32, tuple(weights(0)[0][1].shape))], dtype=torch.float32)
    load(Model(), publish(publisher, 1))
    assert runtime.calls == 0
    publisher.close()
