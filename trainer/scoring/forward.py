"""MicroBatch -> log-probs and entropy of its response tokens, each predicted from the token before it.

The full-vocabulary logits of at most `chunk_tokens` tokens exist at a time, in the forward and in the backward
pass: `trainer/scoring/logprob_head.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear
from transformers import PreTrainedModel

from trainer.batch.train_batch import MicroBatch, TokenScores, TokenSupports
from trainer.scoring.attention import Segments
from trainer.scoring.logprob_head import HeadOptions, cut_outside, token_logprobs
from trainer.scoring.routing_replay import Replay, replay_of

FLOOR_ELEMENTS = 2**23
"""Logits (tokens x vocabulary) on which the head's rounding is measured: 32 MiB in float32."""
FLOOR_VOCAB_ROWS = 8192
"""Head rows converted at a time: bounds the memory of the measurement."""


def states_before(decoder: nn.Module, micro: MicroBatch, replay: Replay | None = None) -> Tensor:
    """Hidden state [R, H] from which each response token is predicted, sequences not seeing each other.

    `replay` are the routes of the decoder's inputs, of a decoder that takes them.
    """
    inputs = micro.inputs
    routes = {} if replay is None else {"replay": replay}
    hidden: Tensor = decoder(
        input_ids=inputs.token_ids[None],
        position_ids=inputs.position_ids[None],
        use_cache=False,  # with a cache, packed sequences would attend to each other
        segments=Segments(inputs.roots, inputs.branches),
        **routes,
    ).last_hidden_state[0]
    # The gradient of the last token of a shared prompt is a sum over the responses. The backward of hidden[...] on a
    # CPU, and of index_select on a GPU, adds in an order that differs from run to run; that of an embedding does not.
    return embedding(inputs.before_response, hidden)


def head_floor(
    hidden: Tensor,
    targets: Tensor,
    head: nn.Linear,
    *,
    engine_dtype: torch.dtype,
    temperature: float,
    supports: TokenSupports | None = None,
) -> Tensor:
    """Log-prob error that the engine's head arithmetic alone causes: [F] float64.

    The same hidden states go through the head twice: in `engine_dtype` with a float32 log-softmax, as an engine does,
    and in float32, or in float64 for an engine in float32. The second rounds a thousandth of the first. Everything
    else being equal, K3 of the difference is the smallest mismatch that two correct engines can show.
    """
    finer = torch.float64 if engine_dtype == torch.float32 else torch.float32
    num_tokens = max(1, FLOOR_ELEMENTS // head.weight.shape[0])
    hidden, targets = hidden[:num_tokens].detach(), targets[:num_tokens]
    bias = None if head.bias is None else head.bias.detach()
    weight = head.weight.detach()
    rounded = linear(hidden.to(engine_dtype), weight.to(engine_dtype), None if bias is None else bias.to(engine_dtype))
    exact = torch.cat([hidden.to(finer) @ rows.to(finer).T for rows in weight.split(FLOOR_VOCAB_ROWS)], dim=-1)
    if bias is not None:
        exact = exact + bias.to(finer)
    deltas = []
    for logits in (rounded.float(), exact):
        if supports is not None:
            cut_outside(logits, supports.taken(torch.arange(len(logits), device=logits.device)))
        logprobs = torch.log_softmax(logits / temperature, dim=-1)
        deltas.append(logprobs.gather(-1, targets[:, None]).squeeze(-1).double())
    return deltas[0] - deltas[1]


class ScoringModel(nn.Module):
    """A causal language model whose forward scores tokens instead of returning logits.

    It is the FSDP root: head and embedding are gathered for the whole of forward and backward, and the head
    runs inside, chunk by chunk.
    """

    causal_lm: PreTrainedModel

    def __init__(
        self, causal_lm: PreTrainedModel, *, chunk_tokens: int, fp32_head: bool = False, exact: bool = False
    ) -> None:
        """`exact`: `causal_lm` computes in exact arithmetic, and its head does too."""
        super().__init__()
        self.causal_lm = causal_lm
        self.chunk_tokens = chunk_tokens
        self.fp32_head = fp32_head
        self.exact = exact
        self.with_routes = False
        """True if the layers take routes, and the micro-batches of a run bring them."""

    def forward(
        self,
        micro: MicroBatch,
        *,
        temperature: float,
        entropy_grad: bool = False,
        engine_dtype: torch.dtype | None = None,
    ) -> TokenScores:
        """Score the response tokens of `micro`; with `engine_dtype` also measure what the engine's head rounds."""
        head = self.causal_lm.get_output_embeddings()
        replay = replay_of(micro, micro.token_ids.device) if self.with_routes else None
        hidden = states_before(self.causal_lm.get_decoder(), micro, replay)
        targets = micro.token_ids[micro.response_index]
        options = HeadOptions(
            temperature=temperature,
            chunk_tokens=self.chunk_tokens,
            entropy_grad=entropy_grad,
            float32=self.fp32_head,
            exact=self.exact,
        )
        logprobs, entropy = token_logprobs(hidden, targets, head.weight, head.bias, options, micro.supports)
        zeros = torch.zeros(micro.token_ids.shape, dtype=torch.float32, device=hidden.device)
        # The sum of nothing keeps an empty micro-batch attached to the graph: backward runs on every rank. Of one row,
        # in float32: a sum of float16 overflows, and infinity times 0 is not 0.
        anchor = zeros + hidden[:1].sum(dtype=torch.float32) * 0
        floor = None
        if engine_dtype is not None:
            with torch.no_grad():
                floor = head_floor(
                    hidden,
                    targets,
                    head,
                    engine_dtype=engine_dtype,
                    temperature=temperature,
                    supports=micro.supports,
                )
        return TokenScores(
            logprobs=anchor.index_put((micro.response_index,), logprobs),
            entropy=zeros.index_put((micro.response_index,), entropy),
            floor_delta=floor,
            route_counts=None if replay is None else replay.counts(),
        )
