"""Bundles: what is written is read, what does not fit is refused, and a dump says the same as a bundle of it."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from policy_cases import save_policy
from safetensors.torch import load_file, save_file
from test_replay import STEP, close_samples, config_of, replayed, trained
from test_routing import scoring
from test_style import ROOT
from tiny_model import EXPERTS_PER_TOKEN, NUM_EXPERTS, write_tiny_model
from torch import Tensor

from algorithms.kl import k1, k3
from rollout.config import Routing
from rollout.routes import Routes
from rollout.types import Sample
from trainer.batch.route_tensors import routes_of
from trainer.cli.commands import run
from trainer.config.train import TrainConfig
from trainer.replay import bundle_step
from trainer.replay.bundle import FORMAT, Bundle, BundleError, read_bundle, routes_note, write_bundle
from trainer.replay.bundle_step import bundle_of
from trainer.replay.modes import of_bundle
from trainer.replay.results import replay_bundle
from trainer.text.plain import size

LENGTHS = [3, 1, 5, 2]
TOKENS = sum(LENGTHS)


def tensors(**changed: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.rand(TOKENS, generator=generator)
    found: dict[str, Any] = {
        "lengths": torch.tensor(LENGTHS, dtype=torch.int32),
        "rollout_logprobs": rollout,
        "old_logprobs": rollout + 0.2 * torch.randn(TOKENS, generator=generator) - 0.5,
        "advantages": torch.randn(TOKENS, generator=generator),
        "rewards": torch.tensor([1.0, 0.0, 1.0, 0.0]),
        "groups": torch.tensor([7, 7, 9, 9]),
    } | changed
    return {name: each for name, each in found.items() if each is not None}


def supports(size: int) -> dict[str, Tensor]:
    """Supports of `size` tokens each."""
    ids = torch.arange(max(0, size) * TOKENS, dtype=torch.int32)
    return {"support_sizes": torch.full((TOKENS,), size, dtype=torch.int32), "support_ids": ids}


def routes(size: int) -> dict[str, Tensor | None]:
    """Routes of `size` tokens, of which every response should have as many as it has tokens."""
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    return {"route_lengths": lengths, "routes": torch.zeros(size, 2, 3, dtype=torch.uint8)}


def deltas(made: dict[str, Tensor]) -> Tensor:
    return made["old_logprobs"].double() - made["rollout_logprobs"].double()


def test_a_bundle_is_read_as_it_was_written(tmp_path: Path) -> None:
    metadata = {"producer": "my trainer", "step": "12", "temperature": "0.7"}
    more = {"mask": torch.ones(TOKENS, dtype=torch.uint8), "versions": torch.full((TOKENS,), 3), **supports(3)}
    written = Bundle(**tensors(**more), metadata=metadata)
    write_bundle(written, tmp_path / "b.safetensors")
    found = read_bundle(tmp_path / "b.safetensors")
    assert found.metadata == metadata
    assert found.number("step") == 12
    assert found.number("version") is None
    assert dict(found.tensors()).keys() == dict(written.tensors()).keys()
    for name, tensor in written.tensors():
        assert torch.equal(getattr(found, name), tensor.to(getattr(found, name).dtype)), name


def test_the_mismatch_of_a_bundle_is_that_of_its_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tensors()
    for tokens in (1 << 17, 4):  # all at once, and response by response
        monkeypatch.setattr(bundle_step, "MICRO_TOKENS", tokens)
        metrics = replay_bundle(Bundle(**made), ["tis", "recompute"]).metrics
        assert metrics["mismatch/num_tokens"] == TOKENS
        assert metrics["mismatch/k3"] == pytest.approx(float(k3(deltas(made)).mean()), rel=1e-6)
        assert metrics["mismatch/k1"] == pytest.approx(float(k1(deltas(made)).mean()), rel=1e-6)
        weights = deltas(made).exp()
        assert metrics["mismatch/is/raw_mean"] == pytest.approx(float(weights.mean()), rel=1e-6)
        ess = float(weights.sum() ** 2 / weights.square().sum()) / TOKENS
        assert metrics["mismatch/ess/raw_token"] == pytest.approx(ess, rel=1e-6)


def test_masked_tokens_do_not_count_and_broken_ones_are_counted() -> None:
    made = tensors()
    mask = torch.ones(TOKENS, dtype=torch.uint8)
    mask[[0, 4]] = 0
    made["old_logprobs"][[0, 4]] = math.nan  # of tools: nobody scored them
    made["rollout_logprobs"][7] = math.nan
    metrics = replay_bundle(Bundle(**made, mask=mask), ["tis"]).metrics
    assert metrics["mismatch/num_tokens"] == TOKENS - 2
    assert metrics["mismatch/invalid_tokens"] == 1
    rest = [n for n in range(TOKENS) if n not in (0, 4, 7)]
    assert metrics["mismatch/k3"] == pytest.approx(float(k3(deltas(made)[rest]).mean()), rel=1e-6)


def test_lags_are_those_of_the_versions() -> None:
    made = tensors(versions=torch.tensor([5] * 3 + [4] * 1 + [5] * 5 + [3] * 2))
    metrics = replay_bundle(Bundle(**made, metadata={"version": "5"}), ["tis"]).metrics
    assert metrics["mismatch/by_lag/0/k3"] == pytest.approx(float(k3(deltas(made)[[0, 1, 2, *range(4, 9)]]).mean()))
    assert metrics["mismatch/by_lag/1/k3"] == pytest.approx(float(k3(deltas(made)[3])))
    assert metrics["mismatch/by_lag/2/k3"] == pytest.approx(float(k3(deltas(made)[9:]).mean()))


def test_the_policy_after_a_step_is_not_the_one_before() -> None:
    made = tensors()
    moved = Bundle(**made, logprobs=made["old_logprobs"] + 0.4)
    for name in ("recompute", "tis", "bypass"):
        still, after = (replay_bundle(each, [name]) for each in (Bundle(**made), moved))
        assert after.metrics["mismatch/k3"] == still.metrics["mismatch/k3"]
        assert after.scores[0].metrics["loss/policy"] != still.scores[0].metrics["loss/policy"]
        assert any("no pi_old" in fact for fact in after.facts()) is (name == "bypass")
    [recompute] = replay_bundle(moved, ["recompute"]).scores
    assert recompute.metrics["loss/approx_kl"] == pytest.approx(float(k3(torch.tensor(0.4))), rel=1e-4)


@pytest.mark.parametrize("mini_batch_prompts", [None, 2])
def test_a_bundle_of_a_dump_says_what_the_dump_says(tmp_path: Path, mini_batch_prompts: int | None) -> None:
    model_path = save_policy(tmp_path / "model")
    config = config_of(model_path, mini_batch_prompts=mini_batch_prompts)
    (tmp_path / "run").mkdir()
    trained(config, model_path, tmp_path / "run")
    replay = replayed(config, tmp_path / "run")
    write_bundle(bundle_of(replay.step, replay.dump.description, replay.modes[0].config), tmp_path / "b.safetensors")
    bundle = read_bundle(tmp_path / "b.safetensors")
    assert bundle.metadata["producer"] == "parity"
    assert bundle.number("step") == replay.dump.description.step
    found = replay_bundle(bundle, of_bundle())
    if mini_batch_prompts is not None:  # the bundle has the first of two optimizer steps
        assert found.metrics["mismatch/num_tokens"] == bundle.lengths.sum()
        return
    expected = {score.name: score.metrics for score in replay.scores}
    assert {score.name for score in found.scores} == expected.keys() - {"run"}
    for score in found.scores:
        for key in ("k3", "ess/raw_token", "ess/applied_seq", "kept_frac", "is/applied_mean", "eff_lr_pos"):
            wanted = expected[score.name][f"mismatch/{key}"]
            assert score.metrics[f"mismatch/{key}"] == (wanted if wanted is None else pytest.approx(wanted, rel=1e-6))


def test_without_advantages_nothing_is_said_of_the_loss() -> None:
    replay = replay_bundle(Bundle(**tensors(advantages=None)), of_bundle())
    titles, *rows = replay.mode_rows()
    assert len(rows) > 15
    assert {row[titles.index(name)] for row in rows for name in ("loss", "lr A>0", "lr A<0")} == {"-"}
    assert any("no advantages" in fact for fact in replay.facts())


@pytest.mark.parametrize(
    ("changed", "metadata", "words"),
    [
        ({"old_logprobs": None}, {}, "the tensor old_logprobs is missing"),
        ({"logits": torch.zeros(3)}, {}, "logits is not known; a bundle has rollout_logprobs, old_logprobs"),
        ({"advantages": torch.zeros(4)}, {}, "advantages has 4 entries, the sum of lengths is 11"),
        ({"rewards": torch.zeros(11)}, {}, "rewards has 11 entries, the number of lengths is 4"),
        ({"old_logprobs": torch.zeros(1, 11)}, {}, r"old_logprobs must have one dimension, not shape [1, 11]"),
        ({"lengths": torch.tensor([11.0])}, {}, "lengths must be of type torch.int32 or one of its kind"),
        ({"lengths": torch.tensor([12, -1])}, {}, "lengths must be of one response at least, and none below 0"),
        ({"lengths": torch.tensor([], dtype=torch.int32)}, {}, "lengths must be of one response at least"),
        ({"support_sizes": torch.ones(TOKENS).int()}, {}, "support_sizes and support_ids belong together"),
        ({**supports(2), "support_ids": torch.ones(9).int()}, {}, "support_ids has 9 entries, the sum of support_si"),
        (supports(-1), {}, "support_sizes must be at least 0"),
        (routes(TOKENS), {}, "routes need prompt_lengths and prompt_ids beside them"),
        (routes(TOKENS) | {"routes": torch.zeros(TOKENS)}, {}, "routes must have three dimensions, not shape [11]"),
        (routes(TOKENS) | {"route_lengths": None}, {}, "route_lengths and routes belong together"),
        (routes(TOKENS - 1), {}, "routes has 10 entries, the sum of route_lengths is 11"),
        (routes(TOKENS) | {"route_weights": torch.zeros(11, 2, 1)}, {}, "route_weights must have the shape of routes"),
        ({}, {"step": "twelve"}, "step in the metadata must be a number, not 'twelve'"),
        ({}, {"format": "parity-bundle-9"}, f"is no bundle: its metadata have no format={FORMAT}"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: dict[str, Any], metadata: dict[str, str], words: str
) -> None:
    path = tmp_path / "b.safetensors"
    save_file(tensors(**changed), path, metadata={"format": FORMAT} | metadata)
    with pytest.raises(BundleError, match=re.escape(words)):
        read_bundle(path)
    assert run(["replay", str(path)]) == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [path]


def test_all_that_is_wrong_is_told_at_once_and_nothing_is_executed(tmp_path: Path) -> None:
    path = tmp_path / "b.safetensors"
    save_file({"old_logprobs": torch.zeros(2), "x": torch.zeros(2)}, path, metadata={"format": FORMAT})
    with pytest.raises(BundleError, match=r"lengths is missing; .*rollout_logprobs is missing; x is not known"):
        read_bundle(path)
    path.write_bytes(b"cos\nsystem\n(S'touch /tmp/never'\ntR.")
    with pytest.raises(BundleError, match="is no safetensors file that can be read"):
        read_bundle(path)
    with pytest.raises(BundleError, match="was not written: advantages has 4 entries"):
        write_bundle(Bundle(**tensors(advantages=torch.zeros(4))), tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_the_writer_of_the_docs_writes_a_bundle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, *_ = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "bundle.md").read_text(), re.DOTALL)
    assert len(code.splitlines()) <= 30
    names: dict[str, Any] = {}
    exec(code, names)
    responses = [
        {
            "rollout_logprobs": [-0.5, -1.0], "old_logprobs": [-0.4, -1.1], "advantages": [1.0, 1.0],
            "reward": 1.0, "group": 3,
        },
        {"rollout_logprobs": [-0.2], "old_logprobs": [-0.2], "advantages": [-1.0], "reward": 0.0, "group": 3},
    ]  # fmt: skip
    names["write_bundle"](tmp_path / "b.safetensors", responses, producer="mine")
    assert run(["replay", str(tmp_path / "b.safetensors"), "modes=tis,mis", f"out={tmp_path / 'out'}"]) == 0
    out = capsys.readouterr().out
    assert "2 responses, 3 response tokens, written by mine" in out
    found = json.loads((tmp_path / "out" / "replay.json").read_text())
    expected = k3(torch.tensor([0.1, -0.1, 0.0], dtype=torch.float64)).mean()
    assert found["mismatch"]["mismatch/k3"] == pytest.approx(float(expected), rel=1e-5)
    assert [mode["name"] for mode in found["modes"]] == ["tis", "mis"]
    assert sum(found["by_position"]["counts"]) == 3
    assert "By probability of the token" in (tmp_path / "out" / "replay.html").read_text()


def test_wrong_words_beside_a_bundle_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "b.safetensors"
    write_bundle(Bundle(**tensors()), path)
    assert run(["replay", str(path), "other"]) == 2
    assert "must be a bundle or the directory of a run, got " in capsys.readouterr().err
    assert run(["replay", str(path), "step=3", "modes=tsi,run"]) == 2
    said = capsys.readouterr().err
    for words in ("step is not a word of parity replay here", "Did you mean tis?", "got 'run'"):
        assert words in said
    assert set(load_file(path)) == set(tensors())


def test_a_report_of_a_bundle_names_the_command_that_writes_its_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_bundle(Bundle(**tensors()), tmp_path / "b.safetensors")
    assert run(["report", str(tmp_path / "b.safetensors")]) == 2
    assert f"Of a bundle parity replay {tmp_path / 'b.safetensors'} writes the page" in capsys.readouterr().err


def mixture_run(path: Path, routing: Routing) -> tuple[TrainConfig, Path, list[Sample]]:
    """A step of a mixture that replays routes which no router chose, written down in the directory that comes back."""
    write_tiny_model(path / "model", model_type="qwen3_moe")
    config = config_of(path / "model")
    config = replace(config, policy=replace(config.policy, routing=routing))
    samples, draw = close_samples(), np.random.default_rng(0)
    for sample in samples:
        shape = (len(sample.response_mask) - 1, 2, NUM_EXPERTS)
        experts = draw.permuted(np.broadcast_to(np.arange(NUM_EXPERTS, dtype=np.uint8), shape), axis=-1)
        factors = draw.random((*shape[:2], EXPERTS_PER_TOKEN)).astype(np.float16)
        chosen = experts[..., :EXPERTS_PER_TOKEN]
        sample.routes = Routes((chosen,), (factors,)) if routing is Routing.weights else Routes((chosen,))
    (path / "run").mkdir()
    trained(config, path / "model", path / "run", samples=samples)
    return config, path / "run", samples


@pytest.mark.parametrize("routing", [Routing.replay, Routing.weights])
def test_what_was_written_down_is_scored_with_the_engine_s_routes_to_the_bit(tmp_path: Path, routing: Routing) -> None:
    config, run_dir, samples = mixture_run(tmp_path, routing)
    by_key = {(each.prompt_id, each.sample_index): each for each in samples}
    replay = replayed(config, run_dir)
    model = scoring(tmp_path / "model")
    [recorded] = replay.step.ranks[0]
    for micro, scores in zip(recorded.mini.micro_batches, recorded.scores, strict=True):
        assert micro.routes is not None
        assert list(micro.routes) == [by_key[key].routes for key in micro.sample_keys]
        with torch.no_grad():
            again = model(micro, temperature=1.0).logprobs
            live = model(replace(micro, routes=None), temperature=1.0).logprobs
        assert torch.equal(again, scores.logprobs)
        assert not torch.equal(live, scores.logprobs)
    written = bundle_of(replay.step, replay.dump.description, replay.modes[0].config)
    write_bundle(written, tmp_path / "b.safetensors")
    bundle = read_bundle(tmp_path / "b.safetensors")
    found = routes_of(dict(bundle.tensors()))
    assert found is not None and bundle.metadata["routing"] == routing.name
    keys = [key for micro in recorded.mini.micro_batches for key in micro.sample_keys]
    assert list(found) == [by_key[key].routes for key in keys]
    assert routes_note(bundle) is None


def test_routes_are_in_a_bundle_if_asked_for_and_missing_ones_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, run_dir, _ = mixture_run(tmp_path, Routing.replay)
    words = ["replay", str(run_dir), f"step={STEP}", "modes=tis"]
    assert run([*words, f"bundle={tmp_path / 'whole.safetensors'}", "routes=true"]) == 0
    whole = read_bundle(tmp_path / "whole.safetensors")
    assert whole.routes is not None
    assert f"Routes take {size(whole.routes.nbytes)}" in capsys.readouterr().out
    assert run([*words, f"bundle={tmp_path / 'few.safetensors'}"]) == 0
    assert read_bundle(tmp_path / "few.safetensors").routes is None
    assert "routes=true" in capsys.readouterr().out
    assert run(["replay", str(tmp_path / "few.safetensors"), "modes=tis"]) == 0
    assert "has no routes" in capsys.readouterr().out
    assert run([*words, "routes=true"]) == 2
    assert "bundle" in capsys.readouterr().err
