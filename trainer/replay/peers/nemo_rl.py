"""NeMo-RL: `train_data_step<N>.jsonl` in its log directory, one row per response.

Written by `Logger.log_batched_dict_as_jsonl` at the end of each step of GRPO and PPO. S: tokens of the longest sequence
of the step, prompts included. A row is a batch of one, so every value is in a list of its own:

    token_ids             [[S]]
    token_loss_mask       [[S]]   1 on the tokens that the model sampled
    sample_loss_mask      [1]     0: the whole response does not count
    generation_logprobs   [[S]]   log-prob of token_ids[t] from the engine, at place t
    prev_logprobs         [[S]]   the same from the trainer, before the first optimizer step
    advantages            [[S]]
    rewards               [1]     with dynamic sampling of all responses, and `filtered_rewards` of those in the step

With `force_on_policy_ratio` NeMo-RL leaves out the trainer's forward pass and writes zeros: such a file is refused.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import torch

from trainer.replay.bundle import Bundle
from trainer.replay.peers.rows import Names, Problems, Response, Row, Source, bundle_from, number, rows, sequence_of

KIND = "train_data_step file of NeMo-RL"
NAMES = Names(mask="token_loss_mask", rollout_logprobs="generation_logprobs", old_logprobs="prev_logprobs")
PLACEHOLDER = (
    "prev_logprobs is 0 on every token: with loss_fn.force_on_policy_ratio=true NeMo-RL writes zeros in place of the "
    "trainer's log-probs. Run it with force_on_policy_ratio=false, or set grpo.seq_logprob_error_threshold"
)


def read_nemo_rl(path: Path) -> Bundle:
    """Read the step in the file `path`. Raises BundleError with everything that is wrong with it."""
    problems = Problems(path, kind=KIND)
    responses = []
    for batch in rows(path, problems):
        row = replace(batch, values={name: _only(value) for name, value in batch.values.items()})
        # With dynamic sampling one of the loops writes a row per reward, also for responses that it dropped.
        if row.values.get(NAMES.mask) == []:
            continue
        if (response := _response(row, problems)) is not None:
            responses.append(response)
    if not responses:
        problems.add("it has no response")
    sampled = torch.cat([torch.zeros(0), *(each.old_logprobs[each.mask] for each in responses)])
    if len(sampled) and not bool(sampled.any()):
        problems.add(PLACEHOLDER)
    step = re.search(r"step(\d+)", path.stem)
    source = Source(producer="NeMo-RL", step=None if step is None else int(step[1]))
    return bundle_from(responses, source, problems)


def _only(value: object) -> object:
    """The value of a batch of one."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _response(row: Row, problems: Problems) -> Response | None:
    sequence = sequence_of(row, NAMES, problems)
    if sequence is None:
        return None
    counts = number(row.values.get("sample_loss_mask")) != 0
    reward = number(row.values.get("filtered_rewards", row.values.get("rewards")))
    return sequence.response(torch.full_like(sequence.sampled, counts), reward=reward)
