"""The embedded engine on tiny random models: exact log-probs, determinism, and weight syncs that fail loudly."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from packing_cases import pack
from safetensors.torch import load_file, save_file
from tiny_model import EOS_TOKEN_ID, VOCAB_SIZE, write_tiny_model

from rollout.config import DType
from rollout.engine import EngineError, EngineSetup, WeightSyncError
from rollout.group.worker import RolloutWorker
from rollout.seeded_draw import draw
from rollout.torch.config import TorchEngineConfig
from rollout.torch.engine import TorchEngine
from rollout.types import GenerateRequest, SamplingParams
from rollout.weights.packed_weights import TensorShape
from rollout.weights.shared_weights import WeightPublisher, WeightReader

TOLERANCE = 1e-5
"""Nats; float32 engine against a float32 forward over the whole sequence."""


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tiny matrices: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(path)
    return path


@pytest.fixture(scope="module")
def engine(model_path):
    return start(model_path)


def start(path: Path, **config) -> TorchEngine:
    engine = TorchEngine(
        TorchEngineConfig(**{"dtype": DType.float32, **config}), index=0, device="cpu", num_threads=None
    )
    engine.start(path)
    return engine


def make_requests(count=24, *, temperature=1.0, max_new_tokens=24, stop=(EOS_TOKEN_ID, 5, 9, 40), seed=0):
    """Prompts of 1..9 tokens, two samples each, so that a batch holds padding and shared prompts."""
    generator = torch.Generator().manual_seed(77)
    requests = []
    for index in range(count):
        if index % 2 == 0:
            length = 1 + (index // 2) % 9
            prompt = torch.randint(2, VOCAB_SIZE, (length,), generator=generator).tolist()
        requests.append(
            GenerateRequest(
                prompt_id=index // 2,
                sample_index=index % 2,
                prompt_token_ids=prompt,
                sampling=SamplingParams(
                    temperature=temperature,
                    max_new_tokens=max_new_tokens,
                    seed=1000 * seed + index,
                    stop_token_ids=stop,
                ),
            )
        )
    return requests


def forward_logprobs(model, request, generation, *, temperature):
    """[R] log-probs of the response from one forward over prompt and response, without cache or padding."""
    ids = torch.tensor([request.prompt_token_ids + generation.token_ids])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0].double()
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    first = len(request.prompt_token_ids)
    rows = torch.arange(first - 1, ids.shape[1] - 1)
    return logprobs[rows, ids[0, first:]]


def worst_difference(model, requests, generations, *, temperature):
    return max(
        (forward_logprobs(model, request, generation, temperature=temperature) - torch.tensor(generation.logprobs))
        .abs()
        .max()
        .item()
        for request, generation in zip(requests, generations, strict=True)
    )


def weights_of(model, *, version, dtype=torch.float32):
    return pack(model.named_parameters(), policy_version=version, dtype=dtype)


def publisher_of(model, *, dtype=torch.float32):
    shapes = [TensorShape(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in model.named_parameters()]
    return WeightPublisher(shapes, dtype=dtype)


def shared_weights_of(model, *, version, dtype=torch.float32):
    """As `weights_of`, in memory of "another process"; it stays until the last tensor is gone."""
    publisher = publisher_of(model, dtype=dtype)
    with WeightReader().opened(publisher.publish(model.named_parameters(), policy_version=version)) as packed:
        return packed


SOURCES = pytest.mark.parametrize("source", [weights_of, shared_weights_of])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("model_type", "tied"), [("qwen2", True), ("llama", False), ("qwen3", False)])
def test_logprobs_are_those_of_a_forward_over_the_whole_sequence(tmp_path, model_type, tied, temperature):
    model = write_tiny_model(tmp_path, model_type=model_type, tied=tied)
    requests = make_requests(temperature=temperature)
    generations = start(tmp_path).generate(requests)
    lengths = [len(generation.token_ids) for generation in generations]
    assert len(set(lengths)) > 5, "rows must end at different times for this test to mean anything"
    assert worst_difference(model, requests, generations, temperature=temperature) < TOLERANCE


@pytest.mark.parametrize("field", [{"output_attentions": True}, {"return_dict": False}])
def test_what_a_model_returns_by_its_config_changes_nothing(tmp_path, model_path, engine, field):
    write_tiny_model(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | field))
    assert start(tmp_path).generate(make_requests(4)) == engine.generate(make_requests(4))


def test_the_comparison_notices_a_wrong_temperature_shift_or_weight(tmp_path):
    model = write_tiny_model(tmp_path)
    requests = make_requests(temperature=0.7)
    generations = start(tmp_path).generate(requests)
    assert worst_difference(model, requests, generations, temperature=0.75) > 100 * TOLERANCE
    longer = [r for r, g in zip(requests, generations, strict=True) if len(g.token_ids) > 3]
    shifted = [replace(g, logprobs=[*g.logprobs[1:], g.logprobs[0]]) for g in generations if len(g.token_ids) > 3]
    assert worst_difference(model, longer, shifted, temperature=0.7) > 100 * TOLERANCE
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] += 0.5
    assert worst_difference(model, requests, generations, temperature=0.7) > 10 * TOLERANCE


def test_a_response_does_not_depend_on_the_requests_beside_it(engine, model_path):
    requests = make_requests()
    together = engine.generate(requests)
    alone = [engine.generate([request])[0] for request in requests]
    small_batches = start(model_path, max_batch_size=5).generate(requests)
    backwards = engine.generate(requests[::-1])[::-1]
    for other in (alone, small_batches, backwards):
        for mine, theirs in zip(together, other, strict=True):
            assert mine.token_ids == theirs.token_ids
            assert mine.finish_reason is theirs.finish_reason
            assert mine.logprobs == pytest.approx(theirs.logprobs, abs=TOLERANCE)


def test_seeds_decide_and_nothing_else_does(engine):
    once, again = engine.generate(make_requests()), engine.generate(make_requests())
    assert once == again
    torch.manual_seed(12345)
    assert engine.generate(make_requests()) == once
    other = engine.generate(make_requests(seed=1))
    assert sum(a.token_ids != b.token_ids for a, b in zip(once, other, strict=True)) > 12


def test_two_engines_agree_bit_for_bit(engine, model_path):
    assert start(model_path).generate(make_requests()) == engine.generate(make_requests())


def test_another_process_agrees_bit_for_bit(engine, model_path):
    script = """
import json, sys, torch
sys.path.insert(0, sys.argv[1])
torch.set_num_threads(int(sys.argv[3]))
from pathlib import Path
from test_torch_engine import make_requests, start
generations = start(Path(sys.argv[2])).generate(make_requests())
sys.stdout.write(json.dumps([[g.token_ids, [value.hex() for value in g.logprobs]] for g in generations]))
"""
    threads = str(torch.get_num_threads())
    command = [sys.executable, "-c", script, str(Path(__file__).parent), str(model_path), threads]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    mine = [[g.token_ids, [value.hex() for value in g.logprobs]] for g in engine.generate(make_requests())]
    assert json.loads(finished.stdout.splitlines()[-1]) == mine


def test_greedy_takes_the_most_likely_token_and_reports_the_untempered_logprob(tmp_path):
    model = write_tiny_model(tmp_path)
    requests = make_requests(8, temperature=0.0)
    # Greedy and sampled rows share a batch in evaluation.
    generations = start(tmp_path).generate([*requests, *make_requests(8)])[:8]
    assert worst_difference(model, requests, generations, temperature=1.0) < TOLERANCE
    for request, generation in zip(requests, generations, strict=True):
        ids = torch.tensor([request.prompt_token_ids + generation.token_ids])
        with torch.no_grad():
            best = model(input_ids=ids, use_cache=False).logits[0].argmax(dim=-1)
        assert best[len(request.prompt_token_ids) - 1 : -1].tolist() == generation.token_ids


def test_limits_and_stop_tokens_are_those_of_the_request(engine):
    base = make_requests(6, stop=())
    limits = [3, 7, 1, 12, 5, 9]
    requests = [
        replace(request, sampling=replace(request.sampling, max_new_tokens=limit))
        for request, limit in zip(base, limits, strict=True)
    ]
    free = engine.generate(requests)
    assert [len(generation.token_ids) for generation in free] == limits
    # Stopping row 3 at its fourth token must not touch the others.
    fourth = free[3].token_ids[3]
    other = next(token for token in range(VOCAB_SIZE) if token not in free[3].token_ids)
    requests[3] = replace(requests[3], sampling=replace(requests[3].sampling, stop_token_ids=(fourth, other)))
    stopped = engine.generate(requests)
    first = free[3].token_ids.index(fourth)
    assert stopped[3].token_ids == free[3].token_ids[: first + 1]
    assert [g.token_ids for i, g in enumerate(stopped) if i != 3] == [g.token_ids for i, g in enumerate(free) if i != 3]


def test_every_token_is_drawn_by_the_seed_of_its_sample_and_its_position(tmp_path):
    model = write_tiny_model(tmp_path)
    requests = make_requests(temperature=0.7)
    differing = 0
    for request, generation in zip(requests, start(tmp_path).generate(requests), strict=True):
        ids = torch.tensor([request.prompt_token_ids + generation.token_ids])
        first, last = len(request.prompt_token_ids) - 1, ids.shape[1] - 1
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, first:last]
        positions = torch.arange(first, last)
        seeds = torch.full_like(positions, request.sampling.seed)
        drawn = draw(torch.softmax(logits / 0.7, dim=-1), seeds=seeds, positions=positions)
        differing += int((drawn != torch.tensor(generation.token_ids)).sum())
    assert differing <= 1, "rounding alone may change a token"


def test_the_deadline_is_kept_and_named(model_path):
    late = start(model_path, generate_timeout_s=1e-6)
    with pytest.raises(
        EngineError,
        match=r"engine 0 .* generate: rollout.generate_timeout_s=1e-06 .* prompt 0/0 .* 4 requests are unfinished",
    ):
        late.generate(make_requests(4))


@pytest.mark.parametrize("dtype", [DType.float32, DType.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
@SOURCES
def test_a_sync_replaces_every_weight_and_sets_the_version(tmp_path, dtype, tied, source):
    write_tiny_model(tmp_path / "old", tied=tied)
    new = write_tiny_model(tmp_path / "new", seed=9, tied=tied)
    engine, requests = start(tmp_path / "old", dtype=dtype), make_requests()
    before = engine.generate(requests)
    torch_dtype = getattr(torch, dtype.name)
    packed = source(new, version=7, dtype=torch_dtype)
    assert ("lm_head.weight" in {spec.name for spec in packed.tensors}) is not tied
    report = engine.load_weights(packed)
    assert engine.policy_version == report.policy_version == 7
    assert report.in_place is (source is shared_weights_of)
    assert report.num_tensors == len(list(new.named_parameters()))
    assert report.num_bytes == sum(p.numel() for p in new.parameters()) * torch_dtype.itemsize
    after = engine.generate(requests)
    assert {generation.policy_version for generation in before} == {0}
    assert {generation.policy_version for generation in after} == {7}
    reference = start(tmp_path / "new", dtype=dtype)
    for mine, theirs, old in zip(after, reference.generate(requests), before, strict=True):
        assert (mine.token_ids, mine.logprobs) == (theirs.token_ids, theirs.logprobs)
        assert mine.logprobs != old.logprobs
    engine.load_weights(weights_of(new, version=7, dtype=torch_dtype))


def flip_byte(packed):
    packed.data[packed.tensors[1].offset + 2] ^= 1


def rename(packed):
    packed.tensors[0].name = "model.embed.weight"


def lose_tensor(packed):
    packed.tensors.pop()


def transpose(packed):
    spec = next(spec for spec in packed.tensors if spec.name.endswith("up_proj.weight"))
    spec.shape = spec.shape[::-1]


def grow_old(packed):
    packed.policy_version = 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip_byte, r"tensor model\.layers\.\S+ was changed on the way: .* digest [0-9a-f]{16}, .* have [0-9a-f]{16}"),
        (rename, r"unknown: model\.embed\.weight; missing: model\.embed_tokens\.weight"),
        (lose_tensor, r"policy version 3: .*unknown: none; missing: model\.norm\.weight"),
        (transpose, r"up_proj\.weight was sent as float32 \(64, 128\), the engine holds float32 \(128, 64\)"),
        (grow_old, r"version 1 were sent to an engine that already holds version 2"),
    ],
)
@SOURCES
def test_a_damaged_sync_is_named_and_changes_nothing(tmp_path, damage, message, source):
    model = write_tiny_model(tmp_path / "old")
    engine, requests = start(tmp_path / "old"), make_requests(8)
    engine.load_weights(source(model, version=2))
    before = engine.generate(requests)
    packed = source(write_tiny_model(tmp_path / "new", seed=9), version=3)
    damage(packed)
    with pytest.raises(WeightSyncError, match=message):
        engine.load_weights(packed)
    assert engine.policy_version == 2
    assert engine.generate(requests) == before


def logprobs_of(worker, requests):
    """Those of every response, in the order of the requests."""
    worker.submit(range(len(requests)), requests)
    answers = {}
    while len(answers) < len(requests):
        answers |= {completion.ticket: completion.generation.logprobs for completion in worker.poll(60)}
    return [answers[ticket] for ticket in range(len(requests))]


def test_weights_in_use_do_not_change_while_the_trainer_writes_the_next(tmp_path):
    old, new = write_tiny_model(tmp_path / "old"), write_tiny_model(tmp_path / "new", seed=9)
    setup = EngineSetup(
        config=TorchEngineConfig(dtype=DType.float32),
        index=0,
        seed=0,
        device="cpu",
        num_threads=1,
        log_dir=tmp_path,
        model_path=tmp_path / "old",
    )
    worker, publisher, requests = RolloutWorker(setup), publisher_of(old), make_requests(8)
    worker.start()
    outcomes = []
    for version, model in enumerate([old, new, old, new, old], start=1):
        shared = publisher.publish(model.named_parameters(), policy_version=version)
        if outcomes:
            assert logprobs_of(worker, requests) == outcomes[-1]
        assert worker.load_weights(shared).in_place
        held = worker._shared._regions[shared.address.region_id].data
        places = range(held.ctypes.data, held.ctypes.data + held.nbytes)
        assert all(parameter.data_ptr() in places for parameter in worker._engine._model.parameters())
        outcomes.append(logprobs_of(worker, requests))
    assert outcomes[0] == outcomes[2] == outcomes[4] != outcomes[1] == outcomes[3]
    assert len(publisher._pool._regions) == 2
    # From another machine: the engine's own memory again, and the shared memory is free.
    assert not worker.load_weights(weights_of(new, version=6)).in_place
    assert logprobs_of(worker, requests) == outcomes[1]
    assert all(region.try_lock() for region in publisher._pool._regions)
    worker.stop()


def test_weights_of_another_dtype_are_refused(engine, tmp_path):
    model = write_tiny_model(tmp_path)
    with pytest.raises(WeightSyncError, match=r"sent as bfloat16 .* holds float32 .*rollout\.dtype"):
        engine.load_weights(weights_of(model, version=1, dtype=torch.bfloat16))


def test_the_read_back_finds_a_tensor_that_was_overwritten(tmp_path):
    """Two parameters over one memory: each copy succeeds, but the second destroys the first."""
    model = write_tiny_model(tmp_path)
    engine = start(tmp_path)
    mlp = engine._model.model.layers[0].mlp
    mlp.up_proj.weight = torch.nn.Parameter(mlp.gate_proj.weight.data.view_as(mlp.gate_proj.weight))
    assert mlp.up_proj.weight.data_ptr() == mlp.gate_proj.weight.data_ptr()
    sent = {spec.name: spec.digest for spec in weights_of(model, version=4).tensors}
    name = "model.layers.0.mlp.gate_proj.weight"
    with pytest.raises(WeightSyncError, match=rf"tensor {name} was sent with digest {sent[name]} \(policy version 4\)"):
        engine.load_weights(weights_of(model, version=4))
    assert engine.policy_version == 0
    with pytest.raises(EngineError, match=rf"weights are unusable: tensor {name} is not what was sent"):
        engine.generate(make_requests(2))
    mlp.up_proj.weight = torch.nn.Parameter(mlp.up_proj.weight.clone())
    engine.load_weights(weights_of(model, version=4))
    assert len(engine.generate(make_requests(2))) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_p": 0.0}, r"prompt 0/0: top_p=0\.0"),
        ({"top_k": 0}, "top_k=0"),
        ({"min_p": 1.1}, r"min_p=1\.1"),
        ({"temperature": -1.0}, r"got -1\.0"),
        ({"max_new_tokens": 0}, "max_new_tokens >= 1, got 1.0 and 0"),
        ({"max_new_tokens": 512}, "exceed the engine's context of 512 tokens"),
        ({"prompt": []}, "the prompt has no tokens"),
        ({"prompt": [3, VOCAB_SIZE]}, r"token ids outside 0\.\.66"),
        ({"prompt": [-1]}, r"token ids outside 0\.\.66"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(engine, change, message):
    (request,) = make_requests(1)
    if "prompt" in change:
        request = replace(request, prompt_token_ids=change["prompt"])
    else:
        request = replace(request, sampling=replace(request.sampling, **change))
    with pytest.raises(ValueError, match=message):
        engine.generate([request])


def test_a_directory_that_is_no_model_or_lacks_tensors_is_refused(tmp_path):
    engine = TorchEngine(TorchEngineConfig(), index=3, device="cpu", num_threads=None)
    with pytest.raises(EngineError, match=r"engine 3 .*start: .* has no config\.json"):
        engine.start(tmp_path / "absent")
    write_tiny_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EngineError, match=r"lacks tensors of its architecture: model\.layers\.1\.mlp\.down_proj"):
        engine.start(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "hidden")
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    with pytest.raises(EngineError, match="could not be loaded"):
        engine.start(tmp_path)


def test_start_and_stop(model_path):
    engine = TorchEngine(TorchEngineConfig(), index=0, device="cpu", num_threads=None)
    with pytest.raises(EngineError, match=r"generate: the engine is not running; call start\(\) first"):
        engine.generate(make_requests(1))
    info = engine.start(model_path)
    assert (info.address, info.pids) == ("embedded", ())
    assert info.name == f"torch {torch.__version__}"
    assert info.start_s > 0
    assert engine.generate([]) == []
    engine.stop()
    engine.stop()
    with pytest.raises(EngineError, match="not running"):
        engine.load_weights([])
    slow = TorchEngine(TorchEngineConfig(start_timeout_s=1e-6), index=0, device="cpu", num_threads=None)
    with pytest.raises(EngineError, match=r"rollout\.start_timeout_s=1e-06"):
        slow.start(model_path)
