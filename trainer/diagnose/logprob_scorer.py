"""`Scoring` -> log-probs of the response tokens, with a transformers model.

R: response tokens, C: scorings, V: vocabulary.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from rollout.config import DType, Quantization
from rollout.model.router_tap import RouterTap, routers
from rollout.routes import Routes
from rollout.weights.experts import mixture_of
from rollout.weights.packed_weights import DTYPES
from rollout.weights.quantization import on_grid, round_inputs
from trainer.diagnose.evidence import Evidence
from trainer.diagnose.scoring import Body, EditKind, Prompt, Scoring, TensorEdit
from trainer.policy.model import decoder_layers, load_causal_lm
from trainer.rundir.run_dir import StartError
from trainer.scoring.logprob_head import cut_outside
from trainer.scoring.routing_replay import Replay, make_replayable, replay

BATCH_TOKENS = 2048
"""Padded tokens that are read at a time."""
CHUNK_ELEMENTS = 1 << 24
"""Logits (tokens x vocabulary) that exist at a time."""
KEPT_MODELS = 3
"""Models in memory beside the numbers of the weights: each takes as much as its type does."""
KEPT_BODIES = 3
"""Hidden states of so many bodies are kept: those of the best explanation so far are needed again and again."""


_Kind = tuple[DType, Quantization]


class OtherWeightsError(StartError):
    """A model does not have the weights that the tokens were sampled from, or cannot read them."""


class LogprobScorer:
    """The tokens of the evidence under any scoring, with a few models in memory: one per type and format."""

    def __init__(self, models: Sequence[Sequence[Path]], evidence: Evidence, *, device: str = "cpu") -> None:
        """`models`: of each step of the evidence, directories of the weights that sampled, and of older ones.

        A step with fewer than others has its oldest in their place.

        Raises OtherWeightsError if they cannot read the tokens of the evidence, or are of different models.
        """
        self.evidence = evidence
        most = max(map(len, models))
        paths = [[*each, *[each[-1]] * (most - len(each))] for each in models]
        self.names = [", ".join(dict.fromkeys(path.name for path in each)) for each in zip(*paths, strict=True)]
        self._device = torch.device(device)
        self._path = paths[-1][0]
        self._models: OrderedDict[_Kind, PreTrainedModel] = OrderedDict()
        self._held: dict[_Kind, dict[str, object]] = {}
        """Kind of model -> name -> what the parameter holds at present."""
        loaded = {path: _parameters(self._load(path)) for path in dict.fromkeys(itertools.chain(*paths))}
        self._sources = [[loaded[path] for path in each] for each in paths]
        self._targets = torch.cat(evidence.responses).to(self._device)
        self.mixture = mixture_of(self._model(Body()).config.to_dict())
        """None for a dense model."""
        self._check(loaded)
        self._hidden: OrderedDict[Body, Tensor] = OrderedDict()

    def of_responses(self, numbers: Sequence[int], *, most: int) -> LogprobScorer:
        """A scorer of some responses, cut to `most` tokens, with the same models."""
        other = copy(self)
        other.evidence = self.evidence.of_responses(numbers, most=most)
        other._targets = torch.cat(other.evidence.responses).to(self._device)
        other._hidden = OrderedDict()
        return other

    def take_routes(self, body: Body) -> None:
        """Estimate what the engine chose, where nobody wrote it down: the experts that `body` chooses."""
        routes = [Routes((experts.numpy().astype(np.int32),)) for experts in self.chosen(body)]
        self.evidence = replace(self.evidence, routes=routes)

    def chosen(self, body: Body) -> list[Tensor]:
        """[tokens, L, K] int64, in ascending order: the experts for each prompt and response, under `body`."""
        assert self.mixture is not None
        layers: list[Tensor] = []

        def record(experts: Tensor) -> Tensor:
            layers.append(experts.sort(dim=-1).values.cpu())
            return experts

        model, found = self._model(body), {}
        with torch.inference_mode(), RouterTap(self.mixture, record):
            for numbers, _ in self._read(model, body, list(range(len(self.evidence.lengths)))):
                rows = torch.stack(layers, dim=1).unflatten(0, (len(numbers), -1))
                layers.clear()
                for number, row in zip(numbers, rows, strict=True):
                    found[number] = row[: len(self.evidence.prompts[number]) + self.evidence.lengths[number]]
        return [found[number] for number in range(len(found))]

    @property
    def num_weights(self) -> int:
        """Number of weights: those that sampled, and older ones."""
        return len(self.names)

    def tensors(self, source: int = 0) -> dict[str, Tensor]:
        """Name -> tensor of the weights `source` of the first step, float32; tied ones have one name."""
        return self._sources[self.evidence.steps[0]][source]

    def score(self, scorings: Sequence[Scoring]) -> Tensor:
        """[C, R] float64, nats; NaN for a token that has no log-prob under the scoring, because it is shifted."""
        found = torch.empty(len(scorings), len(self._targets), dtype=torch.float64)
        for body in dict.fromkeys(each.body for each in scorings):
            of_body = [number for number, each in enumerate(scorings) if each.body == body]
            hidden, model = self._states(body), self._model(body)
            for head in dict.fromkeys(scorings[number].head for number in of_body):
                numbers = [number for number in of_body if scorings[number].head is head]
                for rows, logits in self._logits(model, body, hidden, head):
                    targets = self._targets[rows]
                    for number, logprobs in zip(
                        numbers, _logprobs(logits, targets, [scorings[each] for each in numbers]), strict=True
                    ):
                        found[number, rows] = logprobs.cpu()
        for number, scoring in enumerate(scorings):
            if scoring.shift:
                found[number] = self._shifted(found[number], scoring.shift)
        return found

    def forward(self, scoring: Scoring) -> tuple[Tensor, dict[str, Tensor]]:
        """(log-probs [R], the parameters), with a graph behind them: float32, one step, no truncation, no shift."""
        model = self._model(scoring.body)
        parameters = _parameters(model)
        for each in parameters.values():
            each.requires_grad_(True)
        logits = model.get_output_embeddings()(self._all_states(model, scoring.body)).float()  # type: ignore[misc]
        self._cut(logits, torch.arange(len(logits), device=self._device))
        logprobs = torch.log_softmax(logits / scoring.temperature, -1).gather(-1, self._targets[:, None])[:, 0]
        return logprobs, parameters

    @torch.inference_mode()
    def _logits(
        self, model: PreTrainedModel, body: Body, hidden: Tensor, head: DType
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield (rows, their logits [rows, V] float32), some rows of one step at a time."""
        dtype, end = DTYPES[head.name], 0
        layer: Any = model.get_output_embeddings()
        for step, responses in itertools.groupby(range(len(self.evidence.lengths)), self.evidence.steps.__getitem__):
            self._hold(model, body, step)  # the hidden states may be kept ones, and the head is computed now
            weight = layer.weight.to(dtype)
            bias = None if layer.bias is None else layer.bias.to(dtype)
            begin, end = end, end + sum(self.evidence.lengths[number] for number in responses)
            size = max(1, CHUNK_ELEMENTS // len(weight))
            for first in range(begin, end, size):
                rows = slice(first, min(first + size, end))
                logits = torch.nn.functional.linear(hidden[rows].to(dtype), weight, bias).float()
                self._cut(logits, torch.arange(rows.start, rows.stop, device=self._device))
                yield rows, logits

    def _cut(self, logits: Tensor, places: Tensor) -> None:
        """Keep the logits [M, V] of the tokens at `places` [M] within their supports, in place."""
        if self.evidence.supports is not None:
            cut_outside(logits, self.evidence.supports.to(self._device).taken(places))

    def can_read(self, prompt: Prompt) -> bool:
        """True if every prompt has a token left, and the model has the token that comes before it."""
        shortest = min(len(each) for each in self.evidence.prompts)
        return shortest > 1 and (prompt is not Prompt.with_bos or self._bos is not None)

    @property
    def _bos(self) -> int | None:
        bos = self._model(Body()).config.bos_token_id
        return bos if isinstance(bos, int) else None

    def _load(self, path: Path, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        model = load_causal_lm(path, dtype=dtype, attention=None)
        return model.eval().requires_grad_(False).to(self._device)

    def _check(self, loaded: Mapping[Path, dict[str, Tensor]]) -> None:
        """Raise OtherWeightsError if a model cannot be meant."""
        kept = [] if self.evidence.supports is None else [self.evidence.supports.token_ids]
        tokens = torch.cat([*self.evidence.prompts, *self.evidence.responses, *kept])
        embeddings: Any = self._model(Body()).get_input_embeddings()
        vocabulary = len(embeddings.weight)
        if int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary:
            raise OtherWeightsError(
                f"model={self._path} has {vocabulary:,} tokens, and the bundle has ids from {int(tokens.min())} to "
                f"{int(tokens.max()):,}: give the model that sampled them"
            )
        if self.evidence.routes is not None:
            self._check_routes(self.evidence.routes)
        shapes = {name: each.shape for name, each in loaded[self._path].items()}
        for path, tensors in loaded.items():
            if {name: each.shape for name, each in tensors.items()} != shapes:
                raise OtherWeightsError(f"older={path} has other tensors than {self._path}: it is another model")

    def _check_routes(self, routes: Sequence[Routes]) -> None:
        """Raise OtherWeightsError if the routes are not of this model."""
        layers = len(routers(self._model(Body())))
        wanted = (layers, self.mixture.per_token) if self.mixture is not None else None
        for each in routes:
            shapes = {part.shape[1:] for part in each.parts}
            wrong = shapes - {wanted} or (each.problem(self.mixture.number) if self.mixture is not None else "")
            if wrong:
                raise OtherWeightsError(
                    f"the routes of the bundle have {wrong}, and model={self._path} has (layers, experts of a token) "
                    f"{wanted}: give the model that sampled them"
                )

    def _model(self, body: Body) -> PreTrainedModel:
        """The model for the arithmetic of `body`, whatever it holds."""
        kind = (body.arithmetic, body.quantization)
        if kind not in self._models:
            while len(self._models) >= KEPT_MODELS:
                oldest, _ = self._models.popitem(last=False)
                del self._held[oldest]
            model = self._load(self._path, dtype=DTYPES[body.arithmetic.name])
            round_inputs(model, body.quantization)
            if (mixture := mixture_of(model.config.to_dict())) is not None:
                make_replayable(decoder_layers(model.get_decoder()), mixture)
            self._models[kind], self._held[kind] = model, {}
        self._models.move_to_end(kind)
        return self._models[kind]

    def _states(self, body: Body) -> Tensor:
        """Hidden states [R, H] from which the response tokens are predicted."""
        if body not in self._hidden:
            model = self._model(body)  # not in inference mode: a gradient may be wanted later
            with torch.inference_mode():
                self._hidden[body] = self._all_states(model, body)
            while len(self._hidden) > KEPT_BODIES:
                self._hidden.popitem(last=False)
        self._hidden.move_to_end(body)
        return self._hidden[body]

    def _all_states(self, model: PreTrainedModel, body: Body) -> Tensor:
        """Hidden states [R, H], response after response, of a model that holds the weights of `body`."""
        parts: dict[int, Tensor] = {}
        for numbers, states in self._read(model, body, list(range(len(self.evidence.lengths)))):
            pieces = states.split([self.evidence.lengths[number] for number in numbers])
            parts |= dict(zip(numbers, pieces, strict=True))
        return torch.cat([parts[number] for number in range(len(parts))])

    def _hold(self, model: PreTrainedModel, body: Body, step: int) -> None:
        """Put the weights of `body` at a step into `model`; only those that change are copied."""
        held = self._held[body.arithmetic, body.quantization]
        edits = {edit.name: edit for edit in body.edits}
        with torch.no_grad():
            for name, parameter in _parameters(model).items():
                edit = edits.get(name)
                key = (step, body.weights, body.share, edit, body.rounded, body.quantization)
                if held.get(name) != key:
                    parameter.copy_(self._numbers(name, body, edit, self._sources[step]))
                    held[name] = key

    def _numbers(self, name: str, body: Body, edit: TensorEdit | None, sources: Sequence[dict[str, Tensor]]) -> Tensor:
        tensor = sources[0][name]
        if body.weights:
            tensor = torch.lerp(tensor, sources[body.weights][name], body.share)
        match edit:
            case TensorEdit(kind=EditKind.scaled):
                tensor = tensor * edit.factor
            case TensorEdit(kind=EditKind.exchanged):
                tensor = sources[body.weights][edit.other]
            case TensorEdit(kind=EditKind.older):
                tensor = sources[edit.source][name]
        return on_grid(name, tensor, body.quantization).to(DTYPES[body.rounded.name])

    def _read(self, model: PreTrainedModel, body: Body, responses: Sequence[int]) -> Iterator[tuple[list[int], Tensor]]:
        """Yield (numbers of responses, hidden states before their tokens, one response after the other)."""
        for step, numbers in itertools.groupby(responses, self.evidence.steps.__getitem__):
            self._hold(model, body, step)
            yield from self._read_step(model, body, list(numbers))

    def _read_step(
        self, model: PreTrainedModel, body: Body, responses: Sequence[int]
    ) -> Iterator[tuple[list[int], Tensor]]:
        prompts = {number: self._prompt(body.prompt, self.evidence.prompts[number]) for number in responses}
        if body.prefix is not None:
            for number in responses:
                yield [number], self._read_with_cache(model, body, number, prompts[number])
            return
        for numbers in _batches([len(prompts[n]) + self.evidence.lengths[n] for n in responses]):
            batch = [responses[number] for number in numbers]
            ids = [torch.cat([prompts[number], self.evidence.responses[number]]) for number in batch]
            longest = max(map(len, ids))
            tokens, positions = (torch.zeros(len(batch), longest, dtype=torch.int64) for _ in range(2))
            for row, (number, each) in enumerate(zip(batch, ids, strict=True)):
                tokens[row, : len(each)] = each
                positions[row, : len(each)] = _positions(body, len(prompts[number]), len(each))
            # What comes after a response does not reach it: attention looks back only.
            routes = self._replay(body, batch, range(longest))
            states = self._decoder(model, tokens, positions, routes=routes).last_hidden_state
            yield (
                batch,
                torch.cat(
                    [
                        states[row, len(prompts[number]) - 1 : len(prompts[number]) - 1 + self.evidence.lengths[number]]
                        for row, number in enumerate(batch)
                    ]
                ),
            )

    def _read_with_cache(self, model: PreTrainedModel, body: Body, number: int, prompt: Tensor) -> Tensor:
        """[L, H]: the prompt is read first, perhaps with other weights, then the response `number` behind it."""
        response = self.evidence.responses[number]
        positions = _positions(body, len(prompt), len(prompt) + len(response))[None]
        cache = DynamicCache()

        def routes(begin: int, end: int) -> Replay | None:
            return self._replay(body, [number], range(begin, min(end, positions.shape[1])))

        step = self.evidence.steps[number]
        self._hold(model, replace(body, weights=body.prefix or 0, share=1.0), step)
        # The last token of the prompt predicts the first one of the response: it is read with the response.
        tokens = torch.cat([prompt, response])[None]
        first = len(prompt) - 1
        if first:
            self._decoder(model, tokens[:, :first], positions[:, :first], cache, routes(0, first))
        self._hold(model, body, step)
        found = self._decoder(model, tokens[:, first:], positions[:, first:], cache, routes(first, tokens.shape[1]))
        return found.last_hidden_state[0, : len(response)]

    def _replay(self, body: Body, responses: Sequence[int], places: range) -> Replay | None:
        """What the engine chose for the tokens at `places` of these responses; None for the model's own choice."""
        if not body.replays or self.evidence.routes is None or body.prompt is not Prompt.whole:
            return None
        routes = [self.evidence.routes[number] for number in responses]
        number = torch.full((len(routes), len(places)), -1)
        first = 0
        for row, each in enumerate(routes):
            known = torch.arange(first, first + len(each))[places.start : places.stop]
            number[row, : len(known)] = known
            first += len(each)
        return replay(routes, number.flatten(), self._device)

    def _decoder(
        self,
        model: PreTrainedModel,
        tokens: Tensor,
        positions: Tensor,
        cache: Any = None,
        routes: Replay | None = None,
    ) -> Any:
        seen = 0 if cache is None else cache.get_seq_length()
        return model.get_decoder()(
            input_ids=tokens.to(self._device),
            # Without a mask transformers takes positions with a gap for several sequences.
            attention_mask=torch.ones(len(tokens), seen + tokens.shape[1], dtype=torch.int64, device=self._device),
            position_ids=positions.to(self._device),
            past_key_values=cache,
            use_cache=cache is not None,
            **({} if routes is None else {"replay": routes}),
        )

    def _prompt(self, kind: Prompt, prompt: Tensor) -> Tensor:
        match kind:
            case Prompt.without_first:
                return prompt[1:]
            case Prompt.without_last:
                return prompt[:-1]
            case Prompt.first_twice:
                return torch.cat([prompt[:1], prompt])
            case Prompt.with_bos:
                return torch.cat([torch.tensor([self._bos]), prompt])
        return prompt

    def _shifted(self, logprobs: Tensor, shift: int) -> Tensor:
        """Each response by itself, NaN where the other token is not in it."""
        parts = []
        for each in logprobs.split(self.evidence.lengths):
            moved = torch.full_like(each, float("nan"))
            if shift > 0:
                moved[shift:] = each[:-shift]
            else:
                moved[:shift] = each[-shift:]
            parts.append(moved)
        return torch.cat(parts)


def _parameters(model: PreTrainedModel) -> dict[str, Tensor]:
    return dict(model.named_parameters())


def _positions(body: Body, prompt: int, total: int) -> Tensor:
    positions = torch.arange(total)
    positions[prompt:] += body.gap - (prompt if body.restarts else 0)
    return positions.clamp_min(0)


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Places of sequences that are read together: similar lengths, at most BATCH_TOKENS with the padding."""
    batch: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        if batch and lengths[batch[0]] * (len(batch) + 1) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(place)
    yield batch


def _logprobs(logits: Tensor, targets: Tensor, scorings: Sequence[Scoring]) -> Iterator[Tensor]:
    """Yield the log-probs [rows] float64 of the tokens `targets` under each scoring, all of one head."""
    last: tuple[float, Tensor] | None = None
    ordered: tuple[float, Tensor] | None = None
    for scoring in scorings:
        if last is None or last[0] != scoring.temperature:
            last = (scoring.temperature, torch.log_softmax(logits / scoring.temperature, -1))
        logprobs = last[1]
        own = logprobs.gather(-1, targets[:, None])[:, 0]
        if scoring.top_p < 1 or scoring.top_k or scoring.min_p > 0:
            if ordered is None or ordered[0] != scoring.temperature:
                ordered = (scoring.temperature, logprobs.sort(-1, descending=True).values.exp())
            own = own - _kept_mass(ordered[1], scoring).log()
        yield own.double()


def _kept_mass(ordered: Tensor, scoring: Scoring) -> Tensor:
    """[rows]: probability of the tokens that a truncated sampler keeps; `ordered` [rows, V] are falling."""
    kept = torch.ones_like(ordered, dtype=torch.bool)
    if scoring.top_k:
        kept[:, scoring.top_k :] = False
    if scoring.top_p < 1:
        kept &= ordered.cumsum(-1) - ordered < scoring.top_p
    if scoring.min_p > 0:
        kept &= ordered >= scoring.min_p * ordered[:, :1]
    kept[:, 0] = True
    return (ordered * kept).sum(-1)
