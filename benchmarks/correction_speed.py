"""How long the correction and all of its diagnostics take, next to verl's, in one run.

    python benchmarks/correction_speed.py [--responses 512] [--length 8192] [--repeats 7] [--threads 1]

Ours: `correct_and_measure` (token TIS with C = 2 and five rejection criteria, all statistics) and `metrics`, and the
same with `correct` and `mismatch_stats` one after the other. verl's:
`compute_rollout_correction_and_rejection_mask` with the same weight and the options that make it compute the same
criteria, and `calculate_debug_metrics`, which holds its probability differences and Pearson correlation. verl is
optional (pip install verl); without it only our times are printed. Repeats are interleaved and medians compared. With
one thread times are processor time, so that other programs count little; with more they are wall time. The last tables
are what the tensor operations of one pass cost by themselves (less is not to be had without other operations), and what
a few small steps cost once their code has left the cache. Prints Markdown.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from algorithms.chunks import CHUNK_TOKENS
from algorithms.config import Bound, CustomConfig, Level, RejectConfig
from algorithms.correction import Correction, correct
from algorithms.diagnostics import StepContext, correct_and_measure, mismatch_stats
from algorithms.histograms import mismatch_histograms
from algorithms.segments import BLOCK, Segments

CONFIG = CustomConfig(
    level=Level.token,
    bound=Bound.truncate,
    high=2.0,
    reject=RejectConfig(token_ratio=[0.5, 2.0], geometric_ratio=[0.9, 1.1], token_k3=0.1, mean_k3=0.1, max_k3=1.0),
)
PEER_OPTIONS = "token_k1,seq_mean_k1,token_k3,seq_mean_k3,seq_max_k3"
PEER_THRESHOLDS = "0.5_2.0,0.9_1.1,0.1,0.1,1.0"
NOISE = 0.02
"""Standard deviation of Delta, nats: a rollout in a lower precision."""

SAME = (
    ("k1", "rollout_corr/kl"),
    ("k3", "rollout_corr/k3_kl"),
    ("chi2_token", "rollout_corr/chi2_token"),
    ("chi2_seq", "rollout_corr/chi2_seq"),
    ("ppl/train", "rollout_corr/training_ppl"),
    ("ppl/rollout", "rollout_corr/rollout_ppl"),
    ("ppl/log_diff", "rollout_corr/log_ppl_diff"),
    ("ppl/log_abs_diff", "rollout_corr/log_ppl_abs_diff"),
    ("ppl/ratio", "rollout_corr/ppl_ratio"),
    ("is/applied_mean", "rollout_corr/rollout_is_mean"),
    ("is/clip_frac_hi", "rollout_corr/rollout_is_ratio_fraction_high"),
    ("ess/applied_token", "rollout_corr/rollout_is_eff_sample_size"),
    ("k3_max", "rollout_corr/rollout_rs_token_k3_max"),
    ("rs/token_frac", "rollout_corr/rollout_rs_masked_fraction"),
    ("rs/seq_frac", "rollout_corr/rollout_rs_seq_masked_fraction"),
    ("rs/token_ratio_frac", "rollout_corr/rollout_rs_token_k1_masked_fraction"),
    ("rs/token_ratio_seq_frac", "rollout_corr/rollout_rs_token_k1_seq_masked_fraction"),
    ("rs/geometric_ratio_seq_frac", "rollout_corr/rollout_rs_seq_mean_k1_seq_masked_fraction"),
    ("rs/token_k3_frac", "rollout_corr/rollout_rs_token_k3_masked_fraction"),
    ("rs/mean_k3_seq_frac", "rollout_corr/rollout_rs_seq_mean_k3_seq_masked_fraction"),
    ("rs/max_k3_seq_frac", "rollout_corr/rollout_rs_seq_max_k3_seq_masked_fraction"),
    ("prob_diff_mean", "training/rollout_probs_diff_mean"),
    ("prob_diff_max", "training/rollout_probs_diff_max"),
    ("pearson", "training/rollout_actor_probs_pearson_corr"),
)
"""Ours (behind mismatch/) and verl's name. verl counts a token cut by the weight before rejection, we after."""

Metrics = dict[str, float | None]


class Packed(NamedTuple):
    """Responses as we take them."""

    old_logprobs: Tensor
    rollout_logprobs: Tensor
    response_mask: Tensor
    cu_seqlens: Tensor


def make_batch(lengths: Tensor, *, seed: int = 0) -> Packed:
    """Responses of these lengths with log-probs in (-2, 0), NOISE between the engines."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = int(lengths.sum())
    rollout = -2 * torch.rand(num_tokens, generator=generator)
    old = rollout + NOISE * torch.randn(num_tokens, generator=generator)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(torch.int32)
    return Packed(old.clamp(max=0), rollout, torch.ones(num_tokens, dtype=torch.bool), cu_seqlens)


def ours(batch: Packed) -> Metrics:
    _, stats = correct_and_measure(CONFIG, **batch._asdict())
    return stats.metrics()


def ours_in_two(batch: Packed) -> Metrics:
    correction = correct(CONFIG, **batch._asdict())
    return mismatch_stats(**batch._asdict(), correction=correction).metrics()


def peer_of(batch: Packed, lengths: Tensor) -> Callable[[], Metrics] | None:
    """verl's functions on the same responses, padded to the longest as it takes them; None without verl."""
    # verl imports every model class of transformers, and this import makes them importable on a CPU.
    importlib.import_module("rollout.hf.transformers")
    try:
        from verl.protocol import DataProto
        from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
        from verl.utils.debug.metrics import calculate_debug_metrics
    except ImportError:
        return None

    columns = torch.arange(int(lengths.max()))
    mask = columns < lengths.unsqueeze(1)
    old, rollout = (torch.zeros(mask.shape).masked_scatter_(mask, values) for values in batch[:2])
    floats = mask.float()
    tensors = {
        "old_log_probs": old,
        "rollout_log_probs": rollout,
        "response_mask": floats,
        "responses": mask.long(),
    }
    data = DataProto.from_dict(tensors=tensors)

    def peer() -> Metrics:
        _, _, metrics = compute_rollout_correction_and_rejection_mask(
            old, rollout, floats, "token", 2.0, False, PEER_OPTIONS, PEER_THRESHOLDS
        )
        return {**metrics, **calculate_debug_metrics(data)}

    return peer


def seconds(function: Callable[[], object]) -> float:
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    function()
    return clock() - start


def median(function: Callable[[], object], *, repeats: int) -> float:
    """Median seconds after one call that is not counted."""
    function()
    return statistics.median(seconds(function) for _ in range(repeats))


def write(line: str = "") -> None:
    sys.stdout.write(line + "\n")


def compare(arguments: argparse.Namespace) -> None:
    full = torch.full((arguments.responses,), arguments.length)
    generator = torch.Generator().manual_seed(1)
    ragged = torch.randint(1, arguments.length + 1, (arguments.responses,), generator=generator)
    write(f"## {arguments.responses} responses of up to {arguments.length} tokens, {arguments.threads} thread(s)\n")
    write("| lengths | response tokens | ours, ms | in two passes, ms | of it correct(), ms | verl, ms | ratio |")
    write("|---|---|---|---|---|---|---|")
    values: tuple[Metrics, Metrics] | None = None
    for name, lengths in (("all full", full), ("uniform", ragged)):
        batch = make_batch(lengths)
        peer = peer_of(batch, lengths)
        times: dict[str, list[float]] = {"ours": [], "in_two": [], "correct": [], "peer": []}
        for _ in range(arguments.repeats + 1):
            times["ours"].append(seconds(partial(ours, batch)))
            times["in_two"].append(seconds(partial(ours_in_two, batch)))
            times["correct"].append(seconds(partial(correct, CONFIG, **batch._asdict())))
            if peer is not None:
                times["peer"].append(seconds(peer))
        # The first of each pays for memory and caches.
        middle = {key: statistics.median(measured[1:]) for key, measured in times.items() if measured}
        row = [name, str(int(lengths.sum()))]
        row += [f"{1e3 * middle[key]:.1f}" for key in ("ours", "in_two", "correct")]
        row += ["-", "-"] if peer is None else [f"{1e3 * middle['peer']:.0f}", f"{middle['peer'] / middle['ours']:.1f}"]
        write(f"| {' | '.join(row)} |")
        if peer is not None and values is None:
            values = ours(batch), peer()
    write()
    if values is None:
        write("verl is not installed: no comparison.\n")
        return
    mine, theirs = values
    write(f"Metrics: {len(mine)} of ours, {len(theirs)} of verl's. The ones that are the same quantity:\n")
    write("| ours (mismatch/) | verl | ours | verl |")
    write("|---|---|---|---|")
    for own, other in SAME:
        write(f"| {own} | {other} | {mine[f'mismatch/{own}']:.7g} | {theirs[other]:.7g} |")
    write()


def growth(arguments: argparse.Namespace) -> None:
    write("## Growth with the number of tokens, responses of 1,024\n")
    write("| tokens | ours, ms | ns per token |")
    write("|---|---|---|")
    for exponent in range(10, 23, 2):
        batch = make_batch(torch.full((2 ** (exponent - 10),), 1024))
        took = median(partial(ours, batch), repeats=arguments.repeats)
        write(f"| {2**exponent} | {1e3 * took:.2f} | {1e9 * took / 2**exponent:.0f} |")
    write()


def demo(arguments: argparse.Namespace) -> None:
    """A micro-batch of 3,000 tokens in 16 responses, with everything that can be known about it."""
    batch = make_batch(torch.tensor([187] * 8 + [188] * 8))
    correction: Correction = correct(CONFIG, **batch._asdict())
    context = StepContext(
        advantages=torch.randn(3000), rewards=torch.rand(16), entropy=torch.rand(3000), lags=torch.zeros(16).long()
    )
    parts: dict[str, Callable[[], object]] = {
        "correct": lambda: correct(CONFIG, **batch._asdict()),
        "mismatch_stats": lambda: mismatch_stats(**batch._asdict(), correction=correction),
        "both in one pass with context": lambda: correct_and_measure(CONFIG, **batch._asdict(), context=context),
        "mismatch_stats with context": lambda: mismatch_stats(
            **batch._asdict(), correction=correction, context=context
        ),
        "mismatch_histograms": lambda: mismatch_histograms(**batch._asdict()),
        "metrics (once per step)": mismatch_stats(**batch._asdict(), correction=correction).metrics,
    }
    write("## A micro-batch of 3,000 tokens in 16 responses\n")
    write("| part | ms |")
    write("|---|---|")
    for name, function in parts.items():
        write(f"| {name} | {1e3 * median(function, repeats=10 * arguments.repeats):.2f} |")
    write()


def floor(arguments: argparse.Namespace) -> None:
    """The operations of `ours` without the calls around them: tokens of one piece, results written over old ones."""
    size = CHUNK_TOKENS
    single, double = torch.rand(size) - 1, torch.rand(size, dtype=torch.float64) - 1
    single_out, double_out = torch.empty_like(single), torch.empty_like(double)
    bits, bits_out = torch.full((2, size), -1, dtype=torch.int32)
    flags = torch.ones(size, dtype=torch.bool)
    bins, table = torch.randint(4000, (size,)), torch.zeros(4096, dtype=torch.float64)
    passes: list[tuple[str, int, Callable[[], object]]] = [
        ("float32 in, float32 out", 20, lambda: torch.sub(single, single_out, out=single_out)),
        ("masks and bins, int32", 12, lambda: torch.bitwise_and(bits, bits_out, out=bits_out)),
        ("masks, bool", 13, lambda: flags.logical_and_(flags)),
        ("bool to int32, and back", 7, lambda: bits_out.copy_(flags)),
        ("float32 to float64, and back", 9, lambda: double_out.copy_(single)),
        ("float64 in, float64 out", 4, lambda: torch.mul(double, 1.5, out=double_out)),
        ("exp2, float32", 2, lambda: torch.exp2(single, out=single_out)),
        ("exp2, float64", 1, lambda: torch.exp2(double, out=double_out)),
        ("sums of blocks, float64", 6, lambda: double.view(-1, BLOCK).sum(1)),
        ("sums of blocks, bool", 7, lambda: flags.view(torch.int64).view(-1, BLOCK // 8).sum(1)),
        ("sums and products, float64", 7, lambda: torch.dot(double, double_out)),
        ("maxima", 3, lambda: single.amax()),
        ("table of log-ratios", 2, lambda: table.scatter_add_(0, bins, double)),
    ]
    write(f"## The operations alone, {size} tokens in a cache\n")
    write("| operation | how many | ns per token, each | together |")
    write("|---|---|---|---|")
    total = 0.0
    for name, times, function in passes:
        each = 1e9 * median(function, repeats=20 * arguments.repeats) / size
        total += times * each
        write(f"| {name} | {times} | {each:.3f} | {times * each:.2f} |")
    write(f"| all | {sum(times for _, times, _ in passes)} | | {total:.2f} |")
    write()


def small_steps(arguments: argparse.Namespace) -> None:
    """What steps over the sequences of a piece cost, the more the longer ago their code was used last."""
    num = CHUNK_TOKENS // arguments.length
    cu_seqlens = torch.arange(0, num + 1, dtype=torch.int32) * arguments.length
    write(f"## The {num} sequences of a piece: `Segments`, about 30 calls on small tensors\n")
    write("| data touched before each | ms |")
    write("|---|---|")
    for mebibytes in (0, 8, 64):
        data = torch.zeros(mebibytes * 2**18)
        took = []
        for _ in range(10 * arguments.repeats):
            data.add_(1.0)
            took.append(seconds(lambda: Segments(cu_seqlens, num_tokens=num * arguments.length)))
        write(f"| {mebibytes} MiB | {1e3 * statistics.median(took):.3f} |")
    write()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", type=int, default=512)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    compare(arguments)
    growth(arguments)
    demo(arguments)
    floor(arguments)
    small_steps(arguments)


if __name__ == "__main__":
    main()
