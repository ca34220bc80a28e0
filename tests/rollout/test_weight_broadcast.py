"""Weights between machines over gloo, on this one: what arrives is what was sent, and nobody waits for ever."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection

import numpy as np
import pytest

import rollout.weights.weight_broadcast
from rollout.config import LOOPBACK
from rollout.engine import BroadcastError, WeightSyncError
from rollout.types import BroadcastAddress, RegionAddress, SharedWeights
from rollout.weights.shared_weights import WeightReader
from rollout.weights.weight_broadcast import WeightReceiver, WeightSender

NUM_BYTES = 1000
HERE = LOOPBACK[0]


@pytest.fixture
def receivers() -> Iterator[list[WeightReceiver]]:
    made = [WeightReceiver(), WeightReceiver()]
    yield made
    for receiver in made:
        receiver.close()


def announce(version: int, num_bytes: int = NUM_BYTES) -> SharedWeights:
    address = RegionAddress(path="of another machine", region_id="theirs", num_bytes=num_bytes)
    return SharedWeights(address=address, policy_version=version, tensors=[])


def exchange(sender: WeightSender, receivers: list[WeightReceiver], data: np.ndarray, version: int) -> list[np.ndarray]:
    """What the receivers hold then."""
    with ThreadPoolExecutor(len(receivers)) as pool:
        waiting = [
            pool.submit(receiver.receive, announce(version), sender.address, rank=rank, host=HERE)
            for rank, receiver in enumerate(receivers, start=1)
        ]
        sender.send(data)
    held = []
    for each in waiting:
        reader = WeightReader()
        with reader.opened(each.result()):
            held.append(reader._regions[each.result().address.region_id].data.copy())
        reader.close()
    return held


def random_bytes(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(256, size=NUM_BYTES, dtype=np.uint8)


def test_every_machine_gets_the_bytes_of_every_version(
    receivers: list[WeightReceiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout.weights.weight_broadcast, "PIECE_BYTES", 384)  # three pieces, the last one shorter
    sender = WeightSender(HERE, num_receivers=2, timeout_s=30)
    for version in (1, 2):
        data = random_bytes(version)
        for held in exchange(sender, receivers, data, version):
            assert np.array_equal(held, data)


def test_a_receiver_joins_another_group_when_it_is_sent_to_another_address(receivers: list[WeightReceiver]) -> None:
    exchange(WeightSender(HERE, num_receivers=2, timeout_s=30), receivers, random_bytes(1), 1)
    [held] = exchange(WeightSender(HERE, num_receivers=1, timeout_s=30), receivers[:1], random_bytes(2), 2)
    assert np.array_equal(held, random_bytes(2))


def test_a_receiver_that_does_not_come_ends_the_broadcast_in_time() -> None:
    sender = WeightSender(HERE, num_receivers=1, timeout_s=1)
    begin = time.monotonic()
    with pytest.raises(BroadcastError, match=r"to 1 other machine\(s\) was not formed .*sync_timeout_s=1"):
        sender.send(np.zeros(NUM_BYTES, dtype=np.uint8))
    assert time.monotonic() - begin < 20


def test_a_sender_that_does_not_come_ends_the_broadcast_in_time_and_leaves_no_version(
    receivers: list[WeightReceiver],
) -> None:
    receiver = receivers[0]
    nobody = BroadcastAddress(host=HERE, port=9, num_receivers=1, timeout_s=1)
    with pytest.raises(BroadcastError, match=r"cannot be reached at 127\.0\.0\.1:9"):
        receiver.receive(announce(1), nobody, rank=1, host=HERE)
    sender = WeightSender(HERE, num_receivers=1, timeout_s=2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(receiver.receive, announce(1), sender.address, rank=1, host=HERE)
        sender.send(np.zeros(NUM_BYTES, dtype=np.uint8))
    lost = waiting.result()
    # The sender does not send version 2.
    begin = time.monotonic()
    with pytest.raises(BroadcastError, match=r"failed or took longer than rollout\.sync_timeout_s=2"):
        receiver.receive(announce(2), sender.address, rank=1, host=HERE)
    assert time.monotonic() - begin < 20
    with pytest.raises(WeightSyncError, match="hold a half-written version"), WeightReader().opened(lost):
        pass


def receive_and_stop(address: BroadcastAddress, done: Connection) -> None:
    """In another process: take version 1, then stand still."""
    receiver = WeightReceiver()  # kept: without it the connection ends
    receiver.receive(announce(1), address, rank=1, host=HERE)
    done.send("received")
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize("dies", [True, False])
def test_a_receiver_that_dies_ends_the_broadcast_at_once_and_one_that_hangs_in_time(dies: bool) -> None:
    sender = WeightSender(HERE, num_receivers=1, timeout_s=120)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=receive_and_stop, args=(sender.address, theirs), daemon=True)
    process.start()
    sender.send(np.zeros(NUM_BYTES, dtype=np.uint8))
    assert ours.recv() == "received"
    if not dies:
        sender.address = replace(sender.address, timeout_s=2)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(sender.send, np.zeros(64 << 20, dtype=np.uint8))  # more than sockets hold
        time.sleep(0.5)
        assert not sending.done()
        if dies:
            process.kill()
        begin = time.monotonic()
        with pytest.raises(BroadcastError, match="the broadcast of weights between machines failed"):
            sending.result()
    assert time.monotonic() - begin < 60
    process.kill()
    process.join()
