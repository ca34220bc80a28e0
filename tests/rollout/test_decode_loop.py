"""The embedded engine as a stream: polls, aborts, resumed responses, weights that change in the middle, failures."""

import threading
import time
from dataclasses import replace

import pytest
import torch
from test_torch_engine import TOLERANCE, forward_logprobs, make_requests, shared_weights_of, start, weights_of
from tiny_model import write_tiny_model

import rollout.embedded.engine
import rollout.embedded.sampling_loop
from rollout.engine import EngineError, WeightSyncError


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(path)
    return path


def long_requests(count=4, *, short=0, max_new_tokens=400):
    """No stop tokens; the first `short` of them have five tokens, the others all that they may."""
    requests = make_requests(count, max_new_tokens=max_new_tokens, stop=())
    return [
        replace(request, sampling=replace(request.sampling, max_new_tokens=5)) if index < short else request
        for index, request in enumerate(requests)
    ]


def wait_for(engine, tickets, *, timeout_s=60.0):
    """Generations of `tickets`, polled often."""
    found = {}
    deadline = time.monotonic() + timeout_s
    while not found.keys() >= set(tickets):
        assert time.monotonic() < deadline
        found |= dict(engine.poll(0.002))
    return found


def decode_threads():
    return [thread for thread in threading.enumerate() if thread.name == "decode"]


def test_when_one_polls_changes_no_bit(model_path):
    requests = make_requests()
    engine = start(model_path, max_batch_size=8)
    once = engine.generate(requests)
    engine.submit(range(24), requests)
    polled = wait_for(engine, range(24))
    assert [polled[ticket] for ticket in range(24)] == once
    engine.submit(range(100, 124), requests)
    time.sleep(0.2)
    late = wait_for(engine, range(100, 124))
    assert [late[ticket] for ticket in range(100, 124)] == once
    assert engine.poll(0.0) == []


@pytest.mark.parametrize(("seconds", "together"), [(0.0, False), (60.0, True)])
def test_a_poll_waits_a_little_for_further_completions(model_path, monkeypatch, seconds, together):
    monkeypatch.setattr(rollout.embedded.sampling_loop, "GATHER_S", seconds)
    engine = start(model_path)
    engine.submit(range(4), long_requests(4, short=2, max_new_tokens=200))
    first = engine.poll(60.0)
    assert (len(first) == 4) is together
    assert len(first) == 4 or {completion.ticket for completion in first} == {0, 1}
    engine.abort(None)
    assert len(first) + len(engine.poll(60.0) if not together else []) == 4


def test_weights_in_shared_memory_change_in_the_middle_and_every_token_knows_its_own(tmp_path):
    """The log-probs of each version's tokens are those of that version's model over the whole text."""
    old, new = write_tiny_model(tmp_path / "old"), write_tiny_model(tmp_path / "new", seed=9)
    engine, requests = start(tmp_path / "old", max_batch_size=3), long_requests(4, short=1)
    engine.submit(range(4), requests)
    found = wait_for(engine, [0])
    assert engine.load_weights(shared_weights_of(new, version=1)).policy_version == 1
    found |= wait_for(engine, [1, 2, 3])
    assert found[0].token_versions == [0] * 5
    for ticket in (1, 2, 3):
        request, generation = requests[ticket], found[ticket]
        versions = generation.token_versions
        assert len(versions) == 400
        assert ticket == 3 or set(versions) == {0, 1}
        assert versions == sorted(versions)
        for version, model in enumerate((old, new)):
            held = [index for index, each in enumerate(versions) if each == version]
            exact = forward_logprobs(model, request, generation, temperature=1.0)[held]
            assert torch.allclose(exact, torch.tensor(generation.logprobs).double()[held], rtol=0, atol=TOLERANCE)
    # The other model is far off: the comparison above can fail.
    first, versions = found[1], found[1].token_versions
    wrong = forward_logprobs(new, requests[1], first, temperature=1.0) - torch.tensor(first.logprobs)
    assert wrong[: versions.index(1)].abs().max() > 100 * TOLERANCE


def test_a_refused_sync_does_not_disturb_what_is_sampled(model_path, tmp_path):
    engine, requests = start(model_path), long_requests(2)
    whole = engine.generate(requests)
    engine.submit([0, 1], requests)
    packed = weights_of(write_tiny_model(tmp_path, seed=9), version=1)
    packed.data[packed.tensors[1].offset] ^= 1
    with pytest.raises(WeightSyncError, match="was changed on the way"):
        engine.load_weights(packed)
    found = wait_for(engine, [0, 1])
    assert [found[0], found[1]] == whole


def test_a_sync_that_breaks_in_the_middle_fails_what_is_unfinished(model_path, tmp_path, monkeypatch):
    engine, model = start(model_path), write_tiny_model(tmp_path, seed=9)
    engine.submit([0, 1], long_requests(2))
    monkeypatch.setattr(engine, "_read_back", lambda *args, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.load_weights(weights_of(model, version=1))
    with pytest.raises(EngineError, match="load_weights: the weights are unusable: the sync of policy version 1"):
        engine.poll(10)
    with pytest.raises(EngineError, match="load weights again"):
        engine.submit([2], long_requests(1))
    monkeypatch.undo()
    engine.load_weights(weights_of(model, version=1))
    engine.submit([2], long_requests(1, max_new_tokens=3))
    assert wait_for(engine, [2])[2].token_versions == [1, 1, 1]


def decoder_of(engine):
    return engine._loop._model


def test_an_error_of_the_thread_is_polled_after_what_had_ended(model_path, monkeypatch):
    engine = start(model_path)
    step, calls = decoder_of(engine).step, []

    def fail_late(*arguments, **options):
        calls.append(1)
        if len(calls) > 20:
            raise RuntimeError("out of something")
        return step(*arguments, **options)

    monkeypatch.setattr(decoder_of(engine), "step", fail_late)
    engine.submit(range(3), long_requests(3, short=1))
    deadline = time.monotonic() + 20
    while len(calls) <= 20 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [completion.ticket for completion in engine.poll(10)] == [0]
    for _ in range(2):
        with pytest.raises(EngineError, match=r"engine 0 .*generate: RuntimeError: out of something"):
            engine.poll(10)
    with pytest.raises(EngineError, match="out of something"):
        engine.submit([5], long_requests(1))
    assert engine.abort(None) is None
    engine.load_weights(weights_of(engine._model, version=1))
    assert len(engine.generate(make_requests(2))) == 2


def test_a_thread_that_hangs_is_reported_when_the_request_is_due(model_path, monkeypatch):
    engine = start(model_path, generate_timeout_s=0.3)
    monkeypatch.setattr(rollout.embedded.engine, "STOP_TIMEOUT_S", 0.1)
    go_on = threading.Event()
    monkeypatch.setattr(decoder_of(engine), "step", lambda *arguments, **options: go_on.wait(30))
    engine.submit([0, 1], long_requests(2))
    begin = time.monotonic()
    with pytest.raises(EngineError, match=r"generate_timeout_s=0\.3 .* 2 requests are unfinished"):
        engine.poll(20)
    assert time.monotonic() - begin < 15
    # The next thread has nothing to do with it, and what it still says is dropped.
    engine.load_weights(weights_of(engine._model, version=1))
    engine.submit([7], long_requests(1, max_new_tokens=5))
    go_on.set()
    assert wait_for(engine, [7]).keys() == {7}
    engine.stop()


def test_sleep_refuses_and_stop_ends_while_requests_are_unfinished(model_path):
    for thread in decode_threads():  # of the engines of other tests
        thread.join(30)
    engine = start(model_path)
    engine.submit([0, 1], long_requests(2))
    with pytest.raises(EngineError, match="2 requests are unfinished; poll until they have ended, or abort them"):
        engine.sleep()
    with pytest.raises(ValueError, match=r"tickets \[1\] are in use"):
        engine.submit([1], long_requests(1))
    assert len(decode_threads()) == 1
    engine.stop()
    assert decode_threads() == []
    with pytest.raises(EngineError, match="not running"):
        engine.submit([2], long_requests(1))
    engine.start(model_path)
    engine.submit([2], long_requests(1, max_new_tokens=4))
    assert wait_for(engine, [2]).keys() == {2}
    engine.sleep()
    engine.wake()
    assert len(engine.generate(make_requests(2))) == 2
