"""Statistics of a step over several ranks: quantiles and tails are those of all tokens, and rank 0 alone has them."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from policy_cases import make_config
from test_packing import make_sample, pack_samples

from algorithms.correction import correct
from trainer.batch.train_batch import TokenScores
from trainer.policy.step import step_factor, step_loss
from trainer.policy.step_stats import StepStats

DEADLINE_S = 300.0
NUM_RANKS = 2
SORTED = ("k3_p99", "khat/token", "khat/seq")
"""Metrics that need all log-ratios in one place."""


def stats_of(rank: int) -> StepStats:
    """Statistics of one rank, whose log-ratios have heavy tails; they have not all as many."""
    config = make_config(Path("none"), num_workers=NUM_RANKS)
    samples = [make_sample(prompt_id=n // 4, index=n % 4, response=2 + n % 5) for n in range(37)]
    batch = pack_samples([samples], num_ranks=NUM_RANKS, max_tokens=20, policy_version=0)
    stats = StepStats(torch.device("cpu"))
    [mini] = batch.ranks[rank]
    generator = torch.Generator().manual_seed(rank)
    for micro in mini.micro_batches:
        noise = torch.randn(micro.rollout_logprobs.shape, generator=generator)
        micro.old_logprobs, micro.advantages = micro.rollout_logprobs + noise**3, torch.ones_like(noise)
        tokens = micro.tokens(micro.old_logprobs)
        correction = correct(config.correction.spec(), tokens)
        scores = TokenScores(logprobs=micro.old_logprobs, entropy=torch.zeros_like(noise), floor_delta=None)
        stats.add_loss(step_loss(config, micro, scores, correction, mini=mini).stats)
        stats.add_mismatch(micro, tokens, correction, batch.samples)
    stats.end_step(step_factor(config, torch.ones(4, dtype=torch.float64), mini), grad_norm=1.0)
    return stats


def metrics_of_rank(rank: int, meeting: Path, answer: Connection) -> None:
    """Send the metrics of one of the ranks, which meet at the file `meeting`."""
    dist.init_process_group("gloo", rank=rank, world_size=NUM_RANKS, init_method=f"file://{meeting}")
    answer.send(stats_of(rank).metrics())
    dist.destroy_process_group()


def test_rank_0_alone_sorts_the_log_ratios_of_all_ranks(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(NUM_RANKS)]
    ranks = [
        context.Process(target=metrics_of_rank, args=(rank, tmp_path / "meeting", theirs))
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(DEADLINE_S)
        process.kill()
    assert [process.exitcode for process in ranks] == [0] * NUM_RANKS
    of_first, *of_others = [ours.recv() for ours, _ in pipes]
    alone = stats_of(0)
    for rank in range(1, NUM_RANKS):
        alone.take(stats_of(rank))
    expected = alone.metrics_here()
    for name in SORTED:
        assert of_first[f"mismatch/{name}"] == expected[f"mismatch/{name}"] is not None
        assert [found[f"mismatch/{name}"] for found in of_others] == [None] * len(of_others)
    assert all(found["mismatch/k3"] == of_first["mismatch/k3"] for found in of_others)
