"""The layers of a mixture use the experts that they are given: outputs, gradients, what is computed again, counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from policy_cases import make_config
from routing_ranks import gradient_of_ranks
from tiny_model import BIASED, EXPERTS_PER_TOKEN, MIXTURES, NUM_EXPERTS, VOCAB_SIZE, write_tiny_model
from torch import Tensor

from rollout.model.router_tap import RouterTap
from rollout.routes import Routes
from rollout.types import FinishReason, Sample
from rollout.weights.experts import Mixture
from trainer.batch.packing import chosen_sequences, micro_batch
from trainer.batch.train_batch import MicroBatch
from trainer.policy.model import checkpoint_activations, decoder_layers, load_causal_lm
from trainer.scoring.forward import ScoringModel
from trainer.scoring.routing_replay import make_replayable

MIXTURE = Mixture(NUM_EXPERTS, EXPERTS_PER_TOKEN)
NUM_LAYERS = 2


@pytest.fixture(scope="module", params=MIXTURES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ScoringModel:
    path = tmp_path_factory.mktemp(request.param)
    write_tiny_model(path, model_type=request.param)
    return scoring(path)


def scoring(path: Path) -> ScoringModel:
    causal_lm = load_causal_lm(path).eval()
    causal_lm.set_experts_implementation("eager")  # the same bits whatever else is in the batch
    made = ScoringModel(causal_lm, chunk_tokens=512)
    make_replayable(decoder_layers(causal_lm.get_decoder()), MIXTURE)
    made.with_routes = True
    return made


def make_samples(lengths: Sequence[tuple[int, int]] = ((3, 5), (3, 4), (6, 2)), *, seed: int = 1) -> list[Sample]:
    """Samples of these prompts and responses; the first two share their prompt."""
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist() for length, _ in lengths]
    prompts[1] = prompts[0][: lengths[1][0]]
    return [
        Sample(
            prompt_id=min(index, 1) if index != 1 else 0,
            sample_index=index,
            token_ids=prompt + torch.randint(VOCAB_SIZE, (response,), generator=generator).tolist(),
            response_mask=[False] * prompt_length + [True] * response,
            rollout_logprobs=[0.0] * prompt_length + [-1.0] * response,
            token_versions=[0] * (prompt_length + response),
            finish_reason=FinishReason.stop,
        )
        for index, (prompt, (prompt_length, response)) in enumerate(zip(prompts, lengths, strict=True))
    ]


def experts_of(model: ScoringModel) -> list[torch.nn.Module]:
    """The experts of each layer that has some."""
    return [module for name, module in model.named_modules() if name.endswith(".mlp.experts")]


def own_routes(model: ScoringModel, sample: Sample) -> Routes:
    """The experts that the model chooses for the tokens of a sample that another token is predicted from."""
    chosen: list[Tensor] = []

    def record(experts: Tensor) -> Tensor:
        chosen.append(experts)
        return experts

    with torch.no_grad(), RouterTap(MIXTURE, record):
        model(micro_batch([replace(sample, routes=None)]), temperature=1.0)
    return Routes((torch.stack(chosen, dim=1)[:-1].numpy().astype(np.uint8),))


def routed(model: ScoringModel, samples: Sequence[Sample]) -> list[Sample]:
    return [replace(sample, routes=own_routes(model, sample)) for sample in samples]


def altered(sample: Sample, *, seed: int = 0) -> Sample:
    """A sample with other experts, drawn at random."""
    assert sample.routes is not None
    draws = np.random.default_rng(seed).permuted(
        np.broadcast_to(np.arange(NUM_EXPERTS), (len(sample.routes), NUM_LAYERS, NUM_EXPERTS)), axis=-1
    )
    return replace(sample, routes=Routes((draws[..., :EXPERTS_PER_TOKEN].astype(np.uint8),)))


def gradients(model: ScoringModel, micro: MicroBatch) -> tuple[Tensor, Tensor]:
    """Log-probs, and the gradient of their sum."""
    model.zero_grad()
    logprobs = model(micro, temperature=1.0).logprobs
    logprobs.sum().backward()
    return logprobs.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_own_routes_change_no_bit(model: ScoringModel) -> None:
    samples = make_samples()
    live = gradients(model, micro_batch(samples))
    replayed = gradients(model, micro_batch(routed(model, samples)))
    assert torch.equal(live[0], replayed[0])
    assert torch.equal(live[1], replayed[1])


def test_given_experts_are_used_and_counted(model: ScoringModel) -> None:
    samples = [altered(sample) for sample in routed(model, make_samples())]
    micro = micro_batch(samples)
    used: list[Tensor] = []

    def see(module: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
        used.append(args[1])

    hooks = [experts.register_forward_pre_hook(see) for experts in experts_of(model)]
    scores = model(micro, temperature=1.0)
    for hook in hooks:
        hook.remove()
    experts = torch.stack(used, dim=1)  # of the inputs: the shared prompt comes once, then its two branches
    shared, prompt, rest = samples[0].routes, 3, samples[2].routes
    assert shared is not None and rest is not None and samples[1].routes is not None
    wanted = torch.from_numpy(
        np.concatenate(
            [shared.whole()[:prompt], rest.whole(), shared.whole()[prompt:], samples[1].routes.whole()[prompt:]]
        )
    )
    known = torch.tensor([*range(3), *range(3, 10), *range(11, 15), *range(16, 19)])
    assert torch.equal(experts[known], wanted.long())
    assert not torch.equal(scores.logprobs, model(replace(micro, routes=None), temperature=1.0).logprobs)
    assert scores.route_counts is not None
    changed, pairs, rerouted, tokens = scores.route_counts.tolist()
    assert pairs == NUM_LAYERS * tokens == NUM_LAYERS * len(known)
    assert 0 < changed <= pairs and changed / NUM_LAYERS <= rerouted <= min(changed, tokens)


def test_router_learns_through_the_scores_of_given_experts(model: ScoringModel) -> None:
    micro = micro_batch([altered(sample) for sample in routed(model, make_samples())])
    name, router = next((n, p) for n, p in model.named_parameters() if n.endswith(".mlp.gate.weight"))
    gradients(model, micro)
    assert router.grad is not None, name
    place = np.unravel_index(int(router.grad.abs().argmax()), router.shape)
    slope, step = router.grad[place].item(), 1e-2
    sums = []
    for sign in (1, -1):
        with torch.no_grad():
            router[place] += sign * step
            sums.append(model(micro, temperature=1.0).logprobs.sum().item())
            router[place] -= sign * step
    assert slope == pytest.approx((sums[0] - sums[1]) / (2 * step), rel=0.03)


def test_layers_that_are_computed_again_use_their_own_routes(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, model_type="qwen3_moe")
    plain, again = scoring(tmp_path), scoring(tmp_path)
    checkpoint_activations(again.causal_lm.get_decoder(), every=1)
    micro = micro_batch([altered(sample) for sample in routed(plain, make_samples())])
    other = micro_batch([altered(sample, seed=7) for sample in routed(plain, make_samples(seed=3))])
    expected = gradients(plain, micro)
    scores = again(micro, temperature=1.0)
    again(other, temperature=1.0)  # between the forward and its backward
    scores.logprobs.sum().backward()
    found = torch.cat([p.grad.flatten() for p in again.parameters() if p.grad is not None])
    assert torch.equal(found, expected[1])


def test_some_sequences_of_a_micro_batch_keep_their_routes(model: ScoringModel) -> None:
    samples = [altered(sample) for sample in routed(model, make_samples())]
    few = chosen_sequences(micro_batch(samples), [1, 2])
    assert few.routes == (samples[1].routes, samples[2].routes)
    torch.testing.assert_close(
        model(few, temperature=1.0).logprobs,
        torch.cat([model(micro_batch([sample]), temperature=1.0).logprobs for sample in samples[1:]]),
        atol=1e-5,
        rtol=0,
    )


def test_a_token_without_a_route_gets_the_trainers_choice(model: ScoringModel) -> None:
    samples = make_samples()
    mixed = [samples[0], replace(samples[2], routes=altered(routed(model, samples[2:])[0]).routes)]
    scores = model(micro_batch(mixed), temperature=1.0)
    alone = model(micro_batch(samples[:1]), temperature=1.0)
    torch.testing.assert_close(scores.logprobs[: len(alone.logprobs)], alone.logprobs, atol=1e-5, rtol=0)
    assert scores.route_counts is not None and scores.route_counts[3] == len(samples[2].token_ids) - 1


@pytest.mark.slow
@pytest.mark.parametrize("family", [*BIASED, "qwen3_moe"])
def test_ranks_have_the_gradient_of_transformers(family: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, model_type=family)
    samples = routed(scoring(tmp_path), make_samples())
    config = make_config(tmp_path)
    config.policy.activation_checkpoint_every = 1
    # Of latent attention both differ from float64 by 1.5e-6.
    rounding = 2e-6 if family == "deepseek_v3" else 1e-6
    plain = load_causal_lm(tmp_path, attention="eager").eval()
    for sample in samples:
        token_ids = torch.from_numpy(sample.token_ids)
        logprobs = torch.log_softmax(plain(token_ids[None], use_cache=False).logits[0], dim=-1)[:-1]
        chosen = logprobs.gather(-1, token_ids[1:, None]).squeeze(-1)
        chosen[torch.from_numpy(sample.response_mask)[1:]].sum().backward()
    expected = torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None])
    for parts in ([samples], [samples[:2], samples[2:]]):
        found, counts = gradient_of_ranks(config, tmp_path, parts)
        assert (found - expected).norm() <= rounding * expected.norm()
        assert counts.tolist() == [0, NUM_LAYERS * 17, 0, 17]  # 3 of the shared prompt, 4 + 3 after it, 7


@pytest.mark.slow
def test_ranks_replay_what_one_does(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, model_type="qwen3_moe")
    samples = routed(scoring(tmp_path), make_samples())
    config = make_config(tmp_path)
    config.policy.activation_checkpoint_every = 1
    lives = [replace(sample, routes=None) for sample in samples]
    (live, _), (replayed, _) = (gradient_of_ranks(config, tmp_path, [each]) for each in (lives, samples))
    assert torch.equal(live, replayed)
    others = [altered(sample) for sample in samples]
    (one, counts), (two, _) = (
        gradient_of_ranks(config, tmp_path, parts) for parts in ([others], [others[:2], others[2:]])
    )
    assert counts[0] > 0 and (one - two).norm() <= 1e-6 * one.norm() < (one - live).norm()


def test_given_factors_have_their_numbers_and_the_trainers_gradient(model: ScoringModel) -> None:
    samples = routed(model, make_samples())
    given = [with_factors(sample, factor) for sample, factor in zip(samples, (0.3, 0.3, 0.9), strict=True)]
    seen: list[Tensor] = []
    hooks = [experts.register_forward_pre_hook(lambda _, args: seen.append(args[2])) for experts in experts_of(model)]
    _, gradient = gradients(model, micro_batch(given))
    for hook in hooks:
        hook.remove()
    known = torch.tensor([*range(3), *range(3, 10), *range(11, 15), *range(16, 19)])  # as in the test of experts
    for factors in seen:
        expected = torch.tensor([0.3] * 3 + [0.9] * 7 + [0.3] * 7)[:, None].expand(-1, EXPERTS_PER_TOKEN)
        torch.testing.assert_close(factors.detach()[known], expected, atol=1e-3, rtol=0)
    router = next(p for n, p in model.named_parameters() if n.endswith(".mlp.gate.weight"))
    assert router.grad is not None and router.grad.abs().max() > 0
    assert not torch.equal(gradient, gradients(model, micro_batch(samples))[1])


def with_factors(sample: Sample, factor: float) -> Sample:
    """A sample whose experts all have this factor."""
    assert sample.routes is not None
    shape = (len(sample.routes), NUM_LAYERS, EXPERTS_PER_TOKEN)
    return replace(sample, routes=Routes(sample.routes.parts, (np.full(shape, factor, np.float16),)))


def test_layers_without_experts_have_no_routes(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, model_type="qwen3_moe", sparse_step=2)
    mixed = scoring(tmp_path)
    samples = make_samples()
    replayed = routed(mixed, samples)
    assert replayed[0].routes is not None and replayed[0].routes.whole().shape[1] == 1
    assert torch.equal(gradients(mixed, micro_batch(samples))[1], gradients(mixed, micro_batch(replayed))[1])
    others = [replace(each, routes=other_experts(each.routes)) for each in replayed]
    scores = mixed(micro_batch(others), temperature=1.0)
    assert scores.route_counts is not None
    assert scores.route_counts.tolist()[2:] == [17, 17]


def other_experts(routes: Routes | None) -> Routes:
    """Experts of which none is among those of `routes`."""
    assert routes is not None
    rows = routes.whole().reshape(-1, EXPERTS_PER_TOKEN)
    left = [np.setdiff1d(np.arange(NUM_EXPERTS), row)[:EXPERTS_PER_TOKEN] for row in rows]
    return Routes((np.array(left, np.uint8).reshape(routes.whole().shape),))
