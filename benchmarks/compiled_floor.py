"""What compiled loops would leave of the correction and its diagnostics, next to what they cost now, in one run.

    python benchmarks/compiled_floor.py [--responses 512] [--length 8192] [--repeats 7]

`correct_and_measure` is a chain of tensor operations, each of which reads and writes its results. Here the steps over
tokens of the same chain (token TIS with C = 2, five rejection criteria, all sums) are two functions that
`torch.compile` makes one C++ loop each, and the table of log-ratios, which stays as it is. A first function is needed
because responses are kept or rejected by sums over their tokens. Everything by response is left out: this is what is
not to be had without another design. Needs a C++ compiler. Weights are checked against the library. Processor time of
one thread, medians of interleaved repeats. Prints Markdown.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from typing import NamedTuple

import torch
from correction_speed import CONFIG, Packed, make_batch, ours
from torch import Tensor

from algorithms.bits import MAX_ROLLOUT_LOGPROB
from algorithms.chunks import sequence_chunks
from algorithms.config import MAX_LOG_RATIO
from algorithms.correction import Correction, correct
from algorithms.kl import LOG2_E, k3_interval
from algorithms.sketch import GROUP_BINS, LARGEST, SCALE, new_table

LOW, HIGH = -math.log(2), math.log(2)
TOKEN_K3, MAX_K3 = k3_interval(0.1), k3_interval(1.0)
BLOCK, LANES = 64, 16
"""Block sums are left side by side in lanes and added up outside: compiled, the sum across a vector of float64 costs
several times as much as the loop."""


class Piece(NamedTuple):
    """Inputs of a few whole responses, [n] each. Masks are int32: compiled code reads and writes a bool one by one."""

    old: Tensor
    rollout: Tensor
    response: Tensor
    kept_response: Tensor
    """Whether the criteria over responses keep the token's response."""


def blocks(values: Tensor) -> Tensor:
    return values.view(-1, BLOCK // LANES, LANES).sum(1)


def counts(flags: Tensor) -> Tensor:
    return flags.to(torch.int32).view(-1, BLOCK // LANES, LANES).sum(1, dtype=torch.int32)


def gap(old: Tensor, rollout: Tensor, response: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Delta, valid, response mask."""
    mask, delta = response != 0, old - rollout
    valid = (delta.abs() < math.inf) & (rollout <= MAX_ROLLOUT_LOGPROB) & mask
    return torch.where(valid, delta, 0.0), valid, mask


def outside(values: Tensor, low: float, high: float) -> Tensor:
    return (values < low) | (values > high)


def first(old: Tensor, rollout: Tensor, response: Tensor) -> list[Tensor]:
    """What the criteria over responses sum."""
    delta, valid, mask = gap(old, rollout, response)
    exact = delta.double()
    clamped = exact.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    sums = [blocks(exact), blocks(clamped), blocks((clamped * LOG2_E).exp2())]
    return [*sums, counts(mask), counts(valid), counts(outside(delta, *MAX_K3))]


def second(old: Tensor, rollout: Tensor, response: Tensor, kept_response: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Anchor, weight, keep, bin and log-ratio of each token; everything that is summed or maximised."""
    delta, valid, mask = gap(old, rollout, response)
    train, mu = torch.where(valid, old, 0.0), torch.where(valid, rollout, 0.0)
    rejected = [outside(delta, LOW, HIGH) & mask, outside(delta, *TOKEN_K3) & mask]
    keep = valid & ~rejected[0] & ~rejected[1] & (kept_response != 0)
    clamped = delta.double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = (clamped * LOG2_E).exp2().float()
    low = ratio.clamp(max=2.0)
    applied, cut = torch.where(keep, low, 0.0), torch.where(keep, ratio - low, 0.0)
    columns = [blocks(mu.double()), blocks(applied.double()), blocks(cut.double())]
    columns += [counts(flags) for flags in (keep, *rejected, cut != 0)]
    prob = (mu * LOG2_E).exp2()
    difference = ((train * LOG2_E).exp2() - prob).double()
    prob, weight = torch.where(valid, prob, 0.0).double(), applied.double()
    totals = [prob, difference, difference.abs(), prob * prob, difference * difference, prob * difference]
    maxima = [delta.amax(), delta.amin(), difference.abs().amax()]
    scaled = (delta.clamp(-LARGEST, LARGEST) * SCALE).view(torch.int32)
    bins = ((scaled >> 16) & 0xFFFF) + (1 - keep.to(torch.int32)) * GROUP_BINS
    per_token = [train, torch.where(mask, applied, 1.0), keep.to(torch.int32), bins.long(), delta.double()]
    return per_token, [*columns, *(total.sum() for total in totals), (weight * weight).sum(), *maxima]


def pieces(batch: Packed, correction: Correction) -> list[Piece]:
    """A batch as the library cuts it."""
    # A response without a kept token may count as rejected: nothing of it is applied either way.
    by_response = correction.keep.split(batch.cu_seqlens.diff().tolist())
    kept_response = torch.cat([part.any().expand_as(part) for part in by_response])
    columns = (batch.old_logprobs, batch.rollout_logprobs, batch.response_mask.int(), kept_response.int())
    chunks = sequence_chunks(batch.cu_seqlens, num_tokens=kept_response.shape[0])
    return [Piece(*(column[tokens] for column in columns)) for tokens, _ in chunks]


def write(line: str = "") -> None:
    sys.stdout.write(line + "\n")


class Clock:
    """Processor time by part, of each repeat."""

    def __init__(self) -> None:
        self.parts: list[dict[str, float]] = []
        self._last = 0.0

    def start(self) -> None:
        self.parts.append({})
        self._last = time.process_time()

    def stop(self, part: str) -> None:
        now = time.process_time()
        self.parts[-1][part] = self.parts[-1].get(part, 0.0) + now - self._last
        self._last = time.process_time()

    def medians(self) -> dict[str, float]:
        return {part: statistics.median(parts[part] for parts in self.parts) for part in self.parts[0]}


def measure(batch: Packed, *, repeats: int) -> tuple[float, dict[str, float]]:
    """Seconds of compiling, and of each part."""
    correction = correct(CONFIG, **batch._asdict())
    parts = pieces(batch, correction)
    began = time.perf_counter()
    # All pieces have one size here.
    sums = torch.compile(first, fullgraph=True, dynamic=False)
    rest = torch.compile(second, fullgraph=True, dynamic=False)
    sums(*parts[0][:3])
    results = [rest(*piece)[0] for piece in parts]
    compiling = time.perf_counter() - began
    weight, keep = (torch.cat([per_token[column] for per_token in results]) for column in (1, 2))
    if not (torch.equal(weight, correction.weight) and torch.equal(keep != 0, correction.keep)):
        raise SystemExit("weights or verdicts are not those of the library: this measures something else.")
    del results
    clock, table = Clock(), new_table(weight.device)
    for _ in range(repeats):
        clock.start()
        ours(batch)
        clock.stop("correct_and_measure and metrics, as it is")
        for piece in parts:
            columns = sums(*piece[:3])
            clock.stop("compiled: what criteria over responses sum")
            per_token, found = rest(*piece)
            clock.stop("compiled: everything else over tokens")
            for column in (*columns, *found):
                if column.dim() == 2:
                    column.sum(1)
            clock.stop("lanes of each block")
            for row, values in zip(table, (torch.ones_like(per_token[4]), per_token[4]), strict=True):
                row.scatter_add_(0, per_token[3], values)
            clock.stop("table of log-ratios")
    return compiling, clock.medians()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", type=int, default=512)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    batch = make_batch(torch.full((arguments.responses,), arguments.length))
    compiling, parts = measure(batch, repeats=arguments.repeats)
    per_token = {part: 1e9 * seconds / batch.old_logprobs.shape[0] for part, seconds in parts.items()}
    write(f"## {arguments.responses} responses of {arguments.length} tokens, compiled in {compiling:.0f} s\n")
    write("| part | ns per token |")
    write("|---|---|")
    for part, nanoseconds in per_token.items():
        write(f"| {part} | {nanoseconds:.2f} |")
    write(f"| all but the first | {sum(list(per_token.values())[1:]):.2f} |")
    write()


if __name__ == "__main__":
    main()
