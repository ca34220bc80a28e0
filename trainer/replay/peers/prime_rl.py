"""prime-rl: `token_exports/step_<N>/rank_<rank>.jsonl` in its run directory, with `trainer.enable_token_export = true`.

Written by `TokenExporter` during the training forward, before the optimizer step: one row per sequence, one file per
rank of data parallelism. S: tokens of the sequence, prompt included. Lists [S]:

    token_ids
    loss_mask             the tokens that train
    inference_logprobs    log-prob of token_ids[t] from the engine, at place t; null: not finite
    trainer_logprobs      the same from the trainer, with the weights of this step
    advantages
    rl_weights, ref_kl_weights   null: the default. Where both are 0 another model sampled the token (distillation),
                          and prime-rl's own `mismatch_kl` leaves it out; so does the mask here

Training is asynchronous: the weights that sampled may be some steps older than those of `trainer_logprobs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from trainer.replay.bundle import Bundle
from trainer.replay.peers.rows import (
    Names,
    Problems,
    Response,
    Row,
    Source,
    bundle_from,
    floats,
    number,
    rows,
    sequence_of,
)

KIND = "token export of prime-rl"
NAMES = Names(mask="loss_mask", rollout_logprobs="inference_logprobs", old_logprobs="trainer_logprobs")
SCHEMA = 1
"""Value of `schema_version`; others are refused."""


def read_prime_rl(paths: Sequence[Path]) -> Bundle:
    """Read the step in the files `paths`, one per rank. Raises BundleError with everything that is wrong with them."""
    problems = Problems(paths[0] if len(paths) == 1 else paths[0].parent, kind=KIND)
    responses: list[Response] = []
    steps: set[int] = set()
    for path in paths:
        for row in rows(path, problems):
            named = row if len(paths) == 1 else replace(row, place=f"{path.name} {row.place}")
            step = number(row.values.get("step"))
            steps |= set() if step is None else {int(step)}
            if (response := _response(named, problems)) is not None:
                responses.append(response)
    if len(steps) > 1:
        problems.add(f"its rows are of several steps: {', '.join(map(str, sorted(steps)))}")
    if not responses:
        problems.add("it has no sequence")
    source = Source(producer="prime-rl", step=min(steps, default=None), more=_rank(paths))
    return bundle_from(responses, source, problems)


def _rank(paths: Sequence[Path]) -> dict[str, str]:
    """The rank of a file that stands alone: the bundle is then a part of the step."""
    return {"rank": paths[0].stem.removeprefix("rank_")} if len(paths) == 1 else {}


def _response(row: Row, problems: Problems) -> Response | None:
    if (schema := row.values.get("schema_version", SCHEMA)) != SCHEMA:
        problems.add(f"schema_version is {schema!r}, not {SCHEMA}", place=row.place)
        return None
    sequence = sequence_of(row, NAMES, problems)
    return None if sequence is None else sequence.response(_by_policy(row, len(sequence.sampled)))


def _by_policy(row: Row, length: int) -> Tensor:
    """[S] bool, the tokens that the policy sampled, as the weights of the parts of the loss say."""
    rl, ref_kl = (floats(row.values.get(name)) for name in ("rl_weights", "ref_kl_weights"))
    found = torch.ones(length, dtype=torch.bool)
    if rl is not None and len(rl) == length:
        found = rl.nan_to_num(nan=1.0) != 0
    if ref_kl is not None and len(ref_kl) == length:
        found = found | (ref_kl.nan_to_num(nan=0.0) != 0)
    return found
