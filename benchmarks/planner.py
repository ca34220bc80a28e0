"""The packing planner on made-up lengths, next to best-fit-decreasing and to verl's planner, in one run.

    python benchmarks/planner.py [--cap 16384] [--sequences 128 512 1024 4096] [--ranks 2 8 64] [--peer-limit 512]

Lengths are whole sequences of at most 8,192 tokens: uniform; log-normal with median 1,100, as in RL on mathematics;
bimodal, 80 % near 600 and 20 % near 6,500 tokens. Columns:

bins     all ranks; LB is ceil(tokens / cap), BFD best-fit-decreasing without ranks
imb %    estimated FLOPs of the dearest rank over the mean, minus 1
pace     FLOPs over all ranks if they wait for each other after every micro-batch, over FLOPs of perfect balance
ms       processor time, the shortest of --repeats

FLOPs are those of `trainer.batch.planner.DEFAULT_COST`, for both planners. verl's balances whole samples over ranks
with `get_seqlen_balanced_partitions` on `calculate_workload`, then `rearrange_micro_batches` splits every rank; the
count of the rank with most is then required of the others, as its all-reduce does. Its time is the first step and the
slowest rank, for ranks work at once; above --peer-limit sequences per rank it is left out, as it takes minutes.
verl is optional (pip install verl). Prints Markdown.
"""

from __future__ import annotations

import argparse
import importlib
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from trainer.batch.planner import DEFAULT_COST, best_fit_decreasing, plan

MAX_LENGTH = 8192
MIN_LENGTH = 64

Ranks = list[list[list[int]]]
"""[ranks][bins] indices."""


class Result(NamedTuple):
    """What a plan is worth."""

    bins: int
    imbalance: float
    pace: float
    milliseconds: float

    def columns(self) -> list[str]:
        """As cells of the table."""
        return [str(self.bins), f"{100 * self.imbalance:.1f}", f"{self.pace:.2f}", f"{self.milliseconds:,.1f}"]


def uniform(rng: random.Random) -> float:
    """Any length alike."""
    return rng.uniform(MIN_LENGTH, MAX_LENGTH)


def log_normal(rng: random.Random) -> float:
    """Median 1,100 tokens, 2 % cut."""
    return rng.lognormvariate(7, 1)


def bimodal(rng: random.Random) -> float:
    """Short answers, and a fifth that thinks at length."""
    return rng.gauss(600, 150) if rng.random() < 0.8 else rng.gauss(6500, 800)


DRAWS: dict[str, Callable[[random.Random], float]] = {
    "uniform": uniform,
    "log-normal": log_normal,
    "bimodal": bimodal,
}


def draw_lengths(draw: Callable[[random.Random], float], count: int, seed: int = 0) -> list[int]:
    """`count` lengths in tokens."""
    rng = random.Random(seed)  # noqa: S311
    return [min(MAX_LENGTH, max(MIN_LENGTH, int(draw(rng)))) for _ in range(count)]


def check(ranks: Ranks, lengths: Sequence[int], cap: int) -> None:
    """Raise unless the plan is one: every index once, no bin over the cap, equally many bins per rank."""
    bins = [indices for rank in ranks for indices in rank]
    if sorted(i for indices in bins for i in indices) != list(range(len(lengths))):
        raise ValueError("the plan loses or repeats sequences")
    if max(sum(lengths[i] for i in indices) for indices in bins) > cap or len({len(rank) for rank in ranks}) > 1:
        raise ValueError("the plan breaks the cap or gives ranks different numbers of bins")


def measure(planned: Sequence[tuple[Ranks, float]], lengths: Sequence[int], cap: int) -> Result:
    """Rate a plan that was made once or several times, each with its seconds."""
    ranks = planned[0][0]
    check(ranks, lengths, cap)
    # [ranks][bins], dearest bin first: the order within a rank is free.
    costs = [
        sorted((sum(DEFAULT_COST.of(lengths[i]) for i in indices) for indices in bins), reverse=True) for bins in ranks
    ]
    loads = [sum(row) for row in costs]
    return Result(
        bins=sum(len(bins) for bins in ranks),
        imbalance=max(loads) * len(loads) / sum(loads) - 1,
        pace=len(costs) * sum(max(row) for row in zip(*costs, strict=True)) / sum(loads),
        milliseconds=1e3 * min(seconds for _, seconds in planned),
    )


def ours(lengths: Sequence[int], cap: int, num_ranks: int) -> tuple[Ranks, float]:
    """Our plan and its seconds."""
    started = time.process_time()
    ranks = plan(lengths, [DEFAULT_COST.of(length) for length in lengths], cap=cap, num_ranks=num_ranks)
    return ranks, time.process_time() - started


class Peer:
    """verl's planner."""

    def __init__(self) -> None:
        self._balancing = importlib.import_module("verl.utils.seqlen_balancing")
        self._torch = importlib.import_module("torch")
        self._tensordict = importlib.import_module("tensordict")
        self.version = str(importlib.import_module("importlib.metadata").version("verl"))

    def plan(self, lengths: Sequence[int], cap: int, num_ranks: int) -> tuple[Ranks, float]:
        """verl's plan and its seconds: dealing samples, and the slowest rank."""
        started = time.process_time()
        workloads = self._balancing.calculate_workload(self._torch.tensor(lengths)).tolist()
        dealt = self._balancing.get_seqlen_balanced_partitions(workloads, k_partitions=num_ranks, equal_size=True)
        dealing = time.process_time() - started
        slowest = [0.0] * num_ranks
        count = None
        while True:
            split: Ranks = []
            for rank, indices in enumerate(dealt):
                batch = self._batch([lengths[i] for i in indices])
                started = time.process_time()
                _, bins = self._balancing.rearrange_micro_batches(batch, cap, min_num_micro_batch=count)
                slowest[rank] += time.process_time() - started
                split.append([[indices[i] for i in bin_] for bin_ in bins])
            most = max(len(bins) for bins in split)
            if all(len(bins) == most for bins in split):
                return split, dealing + max(slowest)
            count = most

    def _batch(self, lengths: Sequence[int]) -> Any:
        """The two entries that it reads, as small as they may be."""
        mask = self._torch.arange(max(lengths))[None] < self._torch.tensor(lengths)[:, None]
        return self._tensordict.TensorDict({"input_ids": mask, "attention_mask": mask}, batch_size=[len(lengths)])


def load_peer() -> Peer | None:
    """verl's planner, or None where verl is not installed."""
    try:
        return Peer()
    except ImportError:
        return None


def rows(arguments: argparse.Namespace, peer: Peer | None) -> list[list[str]]:
    """The body of the table."""
    found = []
    for name, draw in DRAWS.items():
        for count in arguments.sequences:
            lengths, cap = draw_lengths(draw, count), arguments.cap
            bound, tight = -(-sum(lengths) // cap), best_fit_decreasing(lengths, cap)
            for num_ranks in arguments.ranks:
                runs = [ours(lengths, cap, num_ranks) for _ in range(arguments.repeats)]
                mine = measure(runs, lengths, cap).columns()
                theirs = ["-"] * len(mine)
                if peer is not None and count / num_ranks <= arguments.peer_limit:
                    theirs = measure([peer.plan(lengths, cap, num_ranks)], lengths, cap).columns()
                both = [f"{a} / {b}" for a, b in zip(mine, theirs, strict=True)]
                found.append([name, str(count), str(bound), str(len(tight)), str(num_ranks), *both])
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cap", type=int, default=16384, help="tokens of a micro-batch")
    parser.add_argument("--sequences", type=int, nargs="+", default=[128, 512, 1024, 4096])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 64])
    parser.add_argument("--repeats", type=int, default=5, help="of ours; verl's runs once")
    parser.add_argument("--peer-limit", type=int, default=512, help="sequences per rank from which on verl is left out")
    arguments = parser.parse_args()
    peer = load_peer()
    lines = [
        f"cap {arguments.cap:,} tokens; ours / {'verl ' + peer.version if peer else 'verl, not installed'}",
        "",
        "| lengths | n | LB | BFD bins | ranks | bins | imb % | pace | ms |",
        "|---|" + "--:|" * 8,
    ]
    lines += ["| " + " | ".join(row) + " |" for row in rows(arguments, peer)]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
