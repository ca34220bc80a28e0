"""What it costs to ask an SGLang server for samples one by one, and to sync it the three ways: processor time.

    python benchmarks/sglang_requests.py [--samples 256] [--rounds 3]

One server on the CPU, started by the engine, on a random Qwen2 model (hidden 64, 2 layers, vocabulary 512). The same
requests, with the same seeds, go to it as one batched POST /generate and one by one through the engine's stream, in
turn; answers are compared. Counted is the processor time of the server's processes and of this one, which other work on
the machine does not change much. Then the same weights, 16 MiB of float32, are synced as
our own servers get them (shared memory), and as a server without Parity gets them (base64 over HTTP).

Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rollout.config import DType, SGLangConfig
from rollout.sglang.engine import SGLangEngine
from rollout.sglang.replies import body_of
from rollout.types import GenerateRequest, SamplingParams
from rollout.weights.packing import TensorShape
from rollout.weights.shared_weights import WeightPublisher, WeightReader

EOS, VOCABULARY = 1, 512
PROMPT_TOKENS, RESPONSE_TOKENS = 32, 32
TIMEOUT_S = 600.0


def write_model(path: Path, *, intermediate: int) -> torch.nn.Module:
    """A random Qwen2 in float32; most of its bytes are in `intermediate`."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=intermediate,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=EOS,
        bos_token_id=0,
    )
    model: torch.nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(path)  # type: ignore[operator]
    return model


@contextmanager
def engine_on(directory: Path, pids: list[int]) -> Iterator[SGLangEngine]:
    config = SGLangConfig(dtype=DType.float32, start_timeout_s=TIMEOUT_S, sync_timeout_s=TIMEOUT_S)
    engine = SGLangEngine(config, index=0, seed=0, device="cpu", log_dir=directory / "logs", num_threads=1)
    pids += engine.start(directory / "model").pids
    try:
        yield engine
    finally:
        engine.stop()


def processor_s(pids: list[int]) -> float:
    """Of the server's processes and of this one."""
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in [*pids, psutil.Process().pid])


def measure(pids: list[int], work: Callable[[], object]) -> float:
    """Processor seconds."""
    before = processor_s(pids)
    work()
    return processor_s(pids) - before


def make_requests(count: int) -> list[GenerateRequest]:
    """Groups of eight; no stop token but the model's own."""
    return [
        GenerateRequest(
            prompt_id=index // 8,
            sample_index=index % 8,
            prompt_token_ids=[2 + (index // 8 + position) % (VOCABULARY - 2) for position in range(PROMPT_TOKENS)],
            sampling=SamplingParams(temperature=1.0, max_new_tokens=RESPONSE_TOKENS, seed=index),
        )
        for index in range(count)
    ]


def compare_requests(engine: SGLangEngine, pids: list[int], *, count: int, rounds: int) -> None:
    """Rows: batched and one by one."""
    requests = make_requests(count)
    bodies = [body_of(request) for request in requests]
    batch = {
        "input_ids": [body["input_ids"] for body in bodies],
        "sampling_params": [body["sampling_params"] for body in bodies],
        "return_logprob": True,
    }
    server = engine._server
    assert server is not None
    answers: dict[str, list[list[int]]] = {}

    def batched() -> None:
        reply = server.client().call("/generate", body=batch, timeout_s=TIMEOUT_S)
        answers["batched"] = [one["output_ids"] for one in reply]

    def streamed() -> None:
        answers["one by one"] = [one.token_ids for one in engine.generate(requests)]

    found: dict[str, list[float]] = {"batched": [], "one by one": []}
    batched()
    for _ in range(rounds):
        found["batched"].append(measure(pids, batched))
        found["one by one"].append(measure(pids, streamed))
        assert answers["batched"] == answers["one by one"]
    say(f"\n{count} samples of {RESPONSE_TOKENS} tokens at most, answers equal; median of {rounds} rounds.\n")
    say("| requests | processor time, s | per sample, ms |\n|---|--:|--:|")
    for name, values in found.items():
        cpu = statistics.median(values)
        say(f"| {name} | {cpu:.2f} | {1e3 * cpu / count:.1f} |")


def compare_syncs(engine: SGLangEngine, pids: list[int], model: torch.nn.Module, *, rounds: int) -> None:
    """Rows: shared memory, and base64 over HTTP."""
    named = list(model.named_parameters())
    shapes = [TensorShape(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named]
    publisher, reader = WeightPublisher(shapes, dtype=torch.float32), WeightReader()
    found: dict[bool, list[float]] = {True: [], False: []}
    version = 0
    for _ in range(rounds + 1):
        for maps_memory in found:
            version += 1
            engine._weights._maps_memory = maps_memory
            with reader.opened(publisher.publish(named, policy_version=version)) as packed:
                found[maps_memory].append(measure(pids, partial(engine.load_weights, packed)))
            reader.release()
    size = sum(tensor.nbytes for _, tensor in named) / 2**20
    say(f"\n{size:.0f} MiB, verified; median of {rounds} rounds.\n")
    say("| weights through | processor time, s |\n|---|--:|")
    for maps_memory, values in found.items():
        way = "shared memory" if maps_memory else "base64 over HTTP"
        say(f"| {way} | {statistics.median(values[1:]):.2f} |")


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        # 6 matrices of 64 x 10,880 are most of the bytes. An aligned width: SGLang on a CPU pads others.
        model = write_model(directory / "model", intermediate=10_880)
        assert json.loads((directory / "model" / "config.json").read_text("utf-8"))["vocab_size"] == VOCABULARY
        pids: list[int] = []
        with engine_on(directory, pids) as engine:
            used = sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)
            say(f"Start: {used:.0f} s of processor time in the {len(pids)} processes that stay.")
            compare_requests(engine, pids, count=arguments.samples, rounds=arguments.rounds)
            compare_syncs(engine, pids, model, rounds=arguments.rounds)


if __name__ == "__main__":
    main()
