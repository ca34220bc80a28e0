"""vLLM's kernels behind the cut of truncated sampling, in Triton's interpreter (TRITON_INTERPRET=1).

They draw by the law of the kept tokens, from seed and place alone, and report the log-prob among the kept, and their
ids. tests/rollout/test_vllm_gpu.py runs this as a process of its own. The kernel that cuts does not run there.
"""

from __future__ import annotations

import torch
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs
from vllm.v1.worker.gpu.sample.output import SamplingMaskTensors

ROWS, VOCABULARY, KEPT = 600, 8, [1, 3, 5]
PROBABILITIES = torch.tensor([0.02, 0.3, 0.05, 0.2, 0.03, 0.25, 0.05, 0.1])


def main() -> None:
    cut = PROBABILITIES.log().masked_fill(PROBABILITIES < 0.15, -torch.inf).repeat(ROWS, 1)
    seeds, places = torch.arange(ROWS) % 20, torch.arange(ROWS) // 20

    def drawn(order: torch.Tensor) -> torch.Tensor:
        rows, temperature = torch.arange(ROWS), torch.ones(ROWS)
        options = {"apply_temperature": False, "is_drafting": False}
        return gumbel_sample(cut[order], rows, temperature, seeds[order], places[order], **options)

    tokens, mixed = drawn(torch.arange(ROWS)), torch.randperm(ROWS)
    assert torch.equal(drawn(mixed), tokens[mixed]), "a draw depends on the others"
    law = torch.zeros(VOCABULARY).index_copy(0, torch.tensor(KEPT), PROBABILITIES[KEPT])
    law /= law.sum()
    found = torch.bincount(tokens, minlength=VOCABULARY) / ROWS
    assert (found - law).abs().max() < 4 * (0.25 / ROWS) ** 0.5, found
    logprobs = compute_token_logprobs(cut, tokens[:, None])[:, 0]
    assert torch.allclose(logprobs, law.log()[tokens], atol=1e-5)
    starts, ones = torch.arange(ROWS + 1, dtype=torch.int32), torch.ones(ROWS, dtype=torch.int32)
    masks = SamplingMaskTensors.from_logits(cut, starts, ones, len(KEPT)).tolists()
    assert [masks.slice_request(row, 1).to_nested_list() for row in (0, ROWS - 1)] == [[KEPT]] * 2


if __name__ == "__main__":
    main()
