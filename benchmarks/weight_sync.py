"""One weight sync between two processes on the CPU: ours next to the usual ways of sending tensors, in one run.

    python benchmarks/weight_sync.py [--repeats 15] [--slow-repeats 5] [--layers 24] [--disk DIRECTORY]

The tensors are those of a Qwen2 model of 0.5B parameters (hidden size 896, 24 layers, vocabulary 151,936, tied), 290 of
them, 942 MiB in bfloat16, random. The sender has them in its memory; there is no gathering and no cast. The clock runs
from the call in the sender to the moment at which the receiver, another process, holds all of them as tensors and has
said so. Rounds alternate over all ways, in turn; the first rounds warm up and are not counted.
--slow-repeats 0 leaves out all but memcpy and ours.

memcpy                 every tensor copied once into memory that is there, in the sender, by one thread: the unit
memcpy, n threads      the same by as many threads as ours has on either side (`num_threads` of packed_weights.py)
ours                   publish: copy into shared memory with a digest per tensor; receiver: every digest made again and
                       compared, names checked, tensors used where they lie (as rollout/torch/engine.py on a CPU)
ours, without digests  the same with digests that cost nothing (for this table only: a run always verifies)
ours, and a copy       as the first, then every tensor is copied into memory of the receiver
pickle                 pickle.dumps of {name: tensor} into a file in /dev/shm, pickle.load
torch.save             torch.save into a file in /dev/shm, torch.load(weights_only=True)
base64 over HTTP       one POST on loopback with every tensor's bytes as base64 in JSON, http.client and http.server
safetensors            save_file in /dev/shm, or on disk without fsync; load_file
Ray, dict              ray.put of {name: tensor}, ray.get in an actor
Ray, flat              one buffer filled by copies, ray.put of it, ray.get in an actor, tensors as views

Only ours checks what has arrived. torch has one thread in both processes. Prints Markdown.
"""

from __future__ import annotations

import argparse
import base64
import gc
import http.client
import json
import multiprocessing
import os
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import ray
import torch
from safetensors.torch import load_file, save_file

import rollout.weights.packed_weights
from rollout.types import SharedWeights
from rollout.weights.packed_weights import TensorShape, check_weights, num_bytes_of, num_threads, plan_packing, unpack
from rollout.weights.shared_weights import WeightPublisher, WeightReader

Tensors = dict[str, torch.Tensor]
HIDDEN, HEADS_OUT, KV_OUT, INTERMEDIATE, VOCABULARY = 896, 896, 128, 4864, 151936
SHM = Path("/dev") / "shm"


class NoDigest:
    """Stands in for xxh3 where the price of digests is wanted."""

    def update(self, _: Any) -> None:
        """Look at nothing."""

    def hexdigest(self) -> str:
        """Agree with everybody."""
        return "0" * 16


@contextmanager
def without_digests() -> Iterator[None]:
    """All digests of this process agree inside the block, and cost nothing."""
    digest = rollout.weights.packed_weights.xxhash.xxh3_64
    rollout.weights.packed_weights.xxhash.xxh3_64 = NoDigest  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        rollout.weights.packed_weights.xxhash.xxh3_64 = digest  # type: ignore[misc]


def qwen2_tensors(num_layers: int) -> Tensors:
    """Random bfloat16 tensors under the names and in the shapes of Qwen2.5-0.5B."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(num_layers):
        at = f"model.layers.{layer}."
        for name, rows in (("q", HEADS_OUT), ("k", KV_OUT), ("v", KV_OUT)):
            shapes[f"{at}self_attn.{name}_proj.weight"] = (rows, HIDDEN)
            shapes[f"{at}self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"{at}self_attn.o_proj.weight"] = (HIDDEN, HEADS_OUT)
        shapes[f"{at}mlp.gate_proj.weight"] = shapes[f"{at}mlp.up_proj.weight"] = (INTERMEDIATE, HIDDEN)
        shapes[f"{at}mlp.down_proj.weight"] = (HIDDEN, INTERMEDIATE)
        shapes[f"{at}input_layernorm.weight"] = shapes[f"{at}post_attention_layernorm.weight"] = (HIDDEN,)
    shapes["model.norm.weight"] = (HIDDEN,)
    return {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}


class Receiver:
    """What the other process does; one method per way, each returns when all tensors are there."""

    def __init__(self) -> None:
        self.reader = WeightReader()
        self.own: Tensors = {}

    def ours(self, shared: SharedWeights) -> Tensors:
        with self.reader.opened(shared) as packed:
            check_weights(packed, held_version=0)
            return {spec.name: tensor for spec, tensor in unpack(packed)}

    def ours_bare(self, shared: SharedWeights) -> Tensors:
        with without_digests():
            return self.ours(shared)

    def ours_copied(self, shared: SharedWeights) -> Tensors:
        found = self.ours(shared)
        self.own = self.own or {name: torch.empty_like(tensor) for name, tensor in found.items()}
        for name, tensor in found.items():
            self.own[name].copy_(tensor)
        return self.own

    def pickled(self, path: str) -> Tensors:
        with open(path, "rb") as file:
            found: Tensors = pickle.load(file)  # noqa: S301
        return found

    def torch_saved(self, path: str) -> Tensors:
        found: Tensors = torch.load(path, weights_only=True)
        return found

    def safetensors(self, path: str) -> Tensors:
        return load_file(path)

    def http(self, listener: int) -> Tensors:
        found: Tensors = {}

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                for spec in orjson.loads(self.rfile.read(int(self.headers["Content-Length"]))):
                    raw = bytearray(base64.b64decode(spec["data"]))
                    found[spec["name"]] = torch.frombuffer(raw, dtype=torch.bfloat16).view(spec["shape"])
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        with HTTPServer(("127.0.0.1", listener), Handler) as server:
            server.handle_request()
        return found


def receive(connection: Connection) -> None:
    """Main of the receiving process: (method, argument) -> a sample of what it holds then."""
    torch.set_num_threads(1)
    receiver = Receiver()
    for method, argument in iter(connection.recv, None):
        found = getattr(receiver, method)(argument)
        name = "model.norm.weight"
        connection.send((len(found), found[name].float().sum().item()))
        del found
        gc.collect()
        connection.recv()  # the memory is free again, outside of the measured time
        connection.send("ready")


@ray.remote(num_cpus=0)
class RayReceiver:
    """The receiving process where Ray carries the tensors."""

    def tensors(self, found: Tensors) -> tuple[int, float]:
        """Ray has fetched the argument before."""
        return len(found), found["model.norm.weight"].float().sum().item()

    def flat(self, data: np.ndarray, layout: list[Any]) -> tuple[int, float]:
        """Views of the one buffer."""
        flat = torch.from_numpy(data)
        found = {
            spec.name: flat[start : start + spec.num_bytes].view(torch.bfloat16).view(spec.shape)
            for start, spec in layout
        }
        return self.tensors(found)


class Sender:
    """The sending process: every way as a method that returns (number of tensors, a sum) from the receiver."""

    def __init__(self, tensors: Tensors, disk: Path) -> None:
        self.tensors = tensors
        self.disk = disk
        self.shapes = [TensorShape(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
        self.own = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        self.publisher = WeightPublisher(self.shapes, dtype=torch.bfloat16)
        self.version = 0
        context = multiprocessing.get_context("spawn")
        self.wire, theirs = context.Pipe()
        self.process = context.Process(target=receive, args=(theirs,), daemon=True)
        self.process.start()
        self.actor: Any = RayReceiver.remote() if ray.is_initialized() else None  # type: ignore[attr-defined]

    def ask(self, method: str, argument: Any) -> tuple[int, float]:
        self.wire.send((method, argument))
        answer: tuple[int, float] = self.wire.recv()
        return answer

    def settle(self) -> None:
        """Let the receiver give up what it holds."""
        self.wire.send("next")
        self.wire.recv()

    def memcpy(self) -> tuple[int, float]:
        return self.copied(self.tensors)

    def memcpy_threads(self) -> tuple[int, float]:
        waiting = iter(list(self.tensors))
        with ThreadPoolExecutor(num_threads()) as pool:
            for _ in range(num_threads()):
                pool.submit(self.copied, waiting)
        return self.copied([])

    def copied(self, names: Iterable[str]) -> tuple[int, float]:
        for name in names:
            self.own[name].copy_(self.tensors[name])
        return len(self.own), self.own["model.norm.weight"].float().sum().item()

    def publish(self) -> SharedWeights:
        self.version += 1
        return self.publisher.publish(self.tensors.items(), policy_version=self.version)

    def ours(self) -> tuple[int, float]:
        return self.ask("ours", self.publish())

    def ours_copied(self) -> tuple[int, float]:
        return self.ask("ours_copied", self.publish())

    def ours_bare(self) -> tuple[int, float]:
        with without_digests():
            return self.ask("ours_bare", self.publish())

    def pickled(self) -> tuple[int, float]:
        with tempfile.NamedTemporaryFile(dir=SHM) as file:
            file.write(pickle.dumps(self.tensors))
            file.flush()
            return self.ask("pickled", file.name)

    def torch_saved(self) -> tuple[int, float]:
        with tempfile.NamedTemporaryFile(dir=SHM) as file:
            torch.save(self.tensors, file)
            file.flush()
            return self.ask("torch_saved", file.name)

    def safetensors_shm(self) -> tuple[int, float]:
        return self.safetensors(SHM)

    def safetensors_disk(self) -> tuple[int, float]:
        return self.safetensors(self.disk)

    def safetensors(self, directory: Path) -> tuple[int, float]:
        with tempfile.TemporaryDirectory(dir=directory) as folder:
            path = os.path.join(folder, "model.safetensors")
            save_file(self.tensors, path)
            return self.ask("safetensors", path)

    def http(self) -> tuple[int, float]:
        with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as probe:
            port = probe.server_port
        self.wire.send(("http", port))
        body = [
            {
                "name": name,
                "shape": tuple(tensor.shape),
                "data": base64.b64encode(tensor.view(torch.uint8).numpy().data).decode(),
            }
            for name, tensor in self.tensors.items()
        ]
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("POST", "/", body=json.dumps(body).encode())
        connection.getresponse().read()
        answer: tuple[int, float] = self.wire.recv()
        return answer

    def ray_dict(self) -> tuple[int, float]:
        answer: tuple[int, float] = ray.get(self.actor.tensors.remote(ray.put(self.tensors)))
        return answer

    def ray_flat(self) -> tuple[int, float]:
        plan = plan_packing(self.shapes, dtype=torch.bfloat16)
        layout = [(spec.offset, spec) for spec in plan]
        data = np.empty(num_bytes_of(plan), dtype=np.uint8)
        for start, spec in layout:
            data[start : start + spec.num_bytes] = self.tensors[spec.name].view(-1).view(torch.uint8).numpy()
        answer: tuple[int, float] = ray.get(self.actor.flat.remote(ray.put(data), layout))
        return answer


WAYS: dict[str, tuple[str, bool]] = {
    "memcpy": ("memcpy", False),
    f"memcpy, {num_threads()} threads": ("memcpy_threads", False),
    "**ours**": ("ours", False),
    "ours, without digests": ("ours_bare", False),
    "ours, and a copy in the receiver": ("ours_copied", False),
    "torch.save in /dev/shm": ("torch_saved", True),
    "safetensors in /dev/shm": ("safetensors_shm", True),
    "safetensors on disk": ("safetensors_disk", True),
    "Ray, one flat buffer": ("ray_flat", True),
    "Ray, dict of tensors": ("ray_dict", True),
    "pickle in /dev/shm": ("pickled", True),
    "base64 over HTTP": ("http", True),
}
"""Name in the table -> method of Sender, and whether it is one of the slow ones."""


def measure(sender: Sender, name: str, expected: tuple[int, float]) -> float:
    """Seconds of one sync. Raises if the tensors that arrived are others."""
    method, _ = WAYS[name]
    way: Callable[[], tuple[int, float]] = getattr(sender, method)
    gc.collect()
    started = time.perf_counter()
    found = way()
    seconds = time.perf_counter() - started
    sys.stderr.write(f"{name}: {seconds:.3f} s\n")
    if found != expected:
        raise ValueError(f"{name}: {found} arrived, expected {expected}")
    if method not in ("memcpy", "memcpy_threads", "ray_dict", "ray_flat"):
        sender.settle()
    return seconds


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--slow-repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()))
    arguments = parser.parse_args()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    torch.set_num_threads(1)
    ways = {name: way for name, way in WAYS.items() if arguments.slow_repeats > 0 or not way[1]}
    if arguments.slow_repeats > 0:
        ray.init(address="local", include_dashboard=False, log_to_driver=False, object_store_memory=4 << 30)
    tensors = qwen2_tensors(arguments.layers)
    expected = len(tensors), tensors["model.norm.weight"].float().sum().item()
    sender = Sender(tensors, arguments.disk)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for name in ways:
        for _ in range(1 if WAYS[name][1] else 3):
            measure(sender, name, expected)
    for _ in range(arguments.repeats):
        for name, (_, slow) in ways.items():
            if not slow:
                seconds[name].append(measure(sender, name, expected))
    for _ in range(arguments.slow_repeats):
        for name in ways:
            seconds[name].append(measure(sender, name, expected))
    sender.wire.send(None)
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    floor = statistics.median(seconds["memcpy"])
    rows = [
        f"| {name} | {len(values)} | {statistics.median(values):.3f} | {min(values):.3f}-{max(values):.3f} "
        f"| {statistics.median(values) / floor:.2f} |"
        for name, values in seconds.items()
    ]
    head = [f"{len(tensors)} tensors, {num_bytes / 2**20:.1f} MiB", ""]
    head += ["| way | runs | median, s | range, s | times memcpy |", "|---|--:|--:|--:|--:|"]
    sys.stdout.write("\n".join([*head, *rows, ""]))
    ray.shutdown()


if __name__ == "__main__":
    main()
