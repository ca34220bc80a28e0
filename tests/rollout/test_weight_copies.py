"""Weights for machines without a rank: Ray brings them there once, and all engines of the machine read that copy."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys
from pathlib import Path

import numpy as np
import ray
import torch
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rollout.group.actor_calls import copy_weights
from rollout.weights.packed_weights import TensorShape, check_weights
from rollout.weights.shared_weights import WeightPublisher

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 128 << 20})
other = cluster.add_node(num_cpus=1, object_store_memory=128 << 20)
ray.init(address=cluster.address, log_to_driver=False)


class Engine:
    def load(self, weights):
        check_weights(weights, held_version=0)
        self.data, at = weights.data, weights.data.__array_interface__["data"][0]
        for line in Path("/proc/self/maps").read_text().splitlines():
            (begin, end), (_, offset, device, inode, *_) = line.split()[0].split("-"), line.split()[1:]
            if int(begin, 16) <= at < int(end, 16):  # the file of the store, and the place in it
                break
        place = int(offset, 16) + at - int(begin, 16)
        return [ray.get_runtime_context().get_node_id(), device, int(inode), place, bool(weights.data.flags.writeable)]


shape = TensorShape("embed", torch.float32, (1 << 20, 4))
publisher = WeightPublisher([shape], dtype=torch.float32)
shared = publisher.publish([("embed", torch.rand(1 << 20, 4))], policy_version=1)
copies = copy_weights(shared, node=cluster.head_node.node_id)
there = NodeAffinitySchedulingStrategy(other.node_id, soft=False)
engines = [ray.remote(Engine).options(num_cpus=0, scheduling_strategy=there).remote() for _ in range(2)]
found = ray.get([engine.load.remote(copies) for engine in engines], timeout=100)
sys.stdout.write(json.dumps({"node": other.node_id, "found": found}))
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.slow
def test_all_engines_of_another_machine_read_one_copy() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    first, second = said["found"]
    assert first[0] == said["node"]
    assert first == second, "the same bytes of the same store"
    assert not first[-1], "what all of them read, none can write"
