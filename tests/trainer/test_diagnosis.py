"""parity diagnose: what a bundle says without a model, slips of log-probs, refusals, and a run from end to end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from algorithms.truncation import kept_tokens
from rollout.config import DType
from trainer.cli.commands import run
from trainer.diagnose import tensors
from trainer.diagnose.alignment import aligned
from trainer.diagnose.case import misfit
from trainer.diagnose.diagnosis import Diagnosis, Settings, diagnose
from trainer.diagnose.evidence import evidence_of
from trainer.diagnose.logprob_scorer import LogprobScorer, OtherWeightsError, _logprobs
from trainer.diagnose.results import answer, part_rows, write_diagnosis
from trainer.diagnose.rungs import precision
from trainer.diagnose.scoring import EditKind, Prompt, Scoring, TensorEdit
from trainer.diagnose.without_model import diagnose_numbers
from trainer.replay.bundle import Bundle, BundleError, write_bundle

LENGTHS = [9, 12, 7, 14]
TOKENS = sum(LENGTHS)


def save_model(path: Path, *, seed: int = 0, layers: int = 2) -> Path:
    """A random model whose distributions are far from even."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.25,
    )
    Qwen2ForCausalLM(config).save_pretrained(path)
    return path


def numbers(**changed: Any) -> Bundle:
    generator = torch.Generator().manual_seed(0)
    trainer = -3 * torch.rand(TOKENS, generator=generator)
    noise = 0.01 * torch.randn(TOKENS, generator=generator)
    found: dict[str, Any] = {
        "lengths": torch.tensor(LENGTHS),
        "old_logprobs": trainer,
        "rollout_logprobs": trainer + noise,
    }
    return Bundle(**(found | changed))


def with_tokens(
    path: Path, *, temperature: float = 1.0, edit: TensorEdit | None = None, prompts: tuple[int, ...] = (3, 5, 4, 6)
) -> tuple[Bundle, LogprobScorer]:
    """A bundle whose engine has another temperature or a wrong tensor, and a scorer for it."""
    generator = torch.Generator().manual_seed(1)
    vocab = json.loads((path / "config.json").read_text())["vocab_size"]
    bundle = numbers(
        token_ids=torch.randint(vocab, (TOKENS,), generator=generator),
        prompt_ids=torch.randint(vocab, (sum(prompts),), generator=generator),
        prompt_lengths=torch.tensor(prompts),
        metadata={"producer": "test", "temperature": "1.0"},
    )
    scorer = LogprobScorer([[path]], evidence_of(bundle, max_tokens=1000))
    wrong = Scoring(temperature=temperature)
    trainer, engine = scorer.score([Scoring(), wrong if edit is None else wrong.with_edits(edit)])
    made = Bundle(**(dict(bundle.tensors()) | {"rollout_logprobs": engine, "old_logprobs": trainer}))
    return made, LogprobScorer([[path]], evidence_of(made, max_tokens=1000))


def slipped(values: Tensor, *, by: int) -> Tensor:
    return torch.cat([each.roll(by) for each in values.split(LENGTHS)])


@pytest.mark.parametrize("by", [1, -1])
def test_a_shift_is_found_without_a_model(by: int) -> None:
    whole = numbers()
    bundle = numbers(rollout_logprobs=slipped(whole.rollout_logprobs, by=by))
    found = diagnose_numbers(evidence_of(bundle, max_tokens=999))
    assert [part.name for part in found.faults] == ["shift"]
    assert found.unexplained.k3 < 0.01 * found.k3
    assert "slip by a token at" in answer(found)


def test_nothing_is_named_without_a_model_where_numbers_only_scatter() -> None:
    found = diagnose_numbers(evidence_of(numbers(), max_tokens=999))
    assert not found.parts
    assert found.unexplained.k3 == found.k3
    assert "token_ids" in found.notes[0]


def test_the_age_of_weights_has_its_part_without_a_model() -> None:
    versions = torch.full((TOKENS,), 5)
    versions[: LENGTHS[0]] = 3
    trainer = numbers().old_logprobs.clone()
    engine = numbers().rollout_logprobs.clone()
    engine[: LENGTHS[0]] += 0.5
    found = diagnose_numbers(
        evidence_of(numbers(versions=versions, rollout_logprobs=engine, old_logprobs=trainer), max_tokens=999)
    )
    [part] = found.parts
    assert part.name == "stale weights"
    assert "2 optimizer steps old" in part.what
    assert part.k3 > 0.9 * found.k3


def test_a_token_in_the_middle_makes_the_rest_slip() -> None:
    trainer = numbers().old_logprobs.double()
    engine = torch.cat([trainer[:4], torch.tensor([-9.0]), trainer[4:-1]])
    moved, slips = aligned(engine, trainer, [TOKENS], torch.ones(TOKENS, dtype=torch.bool))
    assert slips == 1
    there = ~moved.isnan()
    assert int(there.sum()) == TOKENS - 1
    assert torch.equal(moved[there], trainer[there])


def test_rows_that_fit_do_not_slip() -> None:
    one = numbers()
    mask = torch.ones(TOKENS, dtype=torch.bool)
    moved, slips = aligned(one.rollout_logprobs.double(), one.old_logprobs.double(), LENGTHS, mask)
    assert slips == 0
    assert torch.equal(moved, one.rollout_logprobs.double())


def test_tokens_of_tools_do_not_slip() -> None:
    trainer = numbers().old_logprobs.double()
    engine, mask = trainer.clone(), torch.ones(TOKENS, dtype=torch.bool)
    mask[2:7], engine[2:7] = False, 0.0
    moved, slips = aligned(engine, trainer, LENGTHS, mask)
    assert slips == 0
    assert torch.equal(moved, engine)


def test_the_misfit_is_half_the_square_and_then_linear() -> None:
    deltas = torch.tensor([0.0, 0.5, -0.5, 1.0, 3.0, -3.0])
    assert misfit(deltas).tolist() == [0.0, 0.125, 0.125, 0.5, 2.5, 2.5]


def test_the_definition_is_the_model_s_own_log_prob(tmp_path: Path) -> None:
    path = save_model(tmp_path / "model")
    bundle, scorer = with_tokens(path)
    model = scorer._load(path)
    first = torch.cat([scorer.evidence.prompts[0], scorer.evidence.responses[0]])
    with torch.inference_mode():
        logprobs = torch.log_softmax(model(first[None]).logits[0].double(), -1)
    at = len(scorer.evidence.prompts[0])
    wanted = logprobs[at - 1 : -1].gather(-1, first[at:, None])[:, 0]
    assert torch.allclose(scorer.evidence.trainer[: LENGTHS[0]], wanted, atol=1e-5)
    assert torch.allclose(bundle.old_logprobs[: LENGTHS[0]].double(), wanted, atol=1e-5)


def test_a_scoring_changes_what_it_says_and_is_undone(tmp_path: Path) -> None:
    _, scorer = with_tokens(save_model(tmp_path / "model"))
    plain = scorer.score([Scoring()])[0]
    name = next(name for name in scorer.tensors() if name.endswith("v_proj.weight"))
    ways = {
        "tensor": Scoring().with_edits(TensorEdit(name=name, kind=EditKind.scaled, factor=0.0)),
        "positions": Scoring().with_body(gap=3),
        "prompt": Scoring().with_body(prompt=Prompt.without_first),
        "bfloat16": Scoring().with_body(arithmetic=DType.bfloat16, rounded=DType.bfloat16),
        "top_p": Scoring(top_p=0.5),
    }
    ways |= {"head": Scoring(head=DType.bfloat16), "restarts": Scoring().with_body(restarts=True)}
    for what, way in ways.items():
        assert not torch.allclose(scorer.score([way])[0], plain, atol=1e-6), what
    for same in (Scoring().with_body(prefix=0), Scoring()):
        assert torch.allclose(scorer.score([same])[0], plain, atol=1e-5)


def other_side(bundle: Bundle) -> Bundle:
    """Engine and trainer exchanged."""
    sides = {"rollout_logprobs": bundle.old_logprobs, "old_logprobs": bundle.rollout_logprobs}
    return Bundle(**(dict(bundle.tensors()) | sides), metadata=bundle.metadata)


def explained(path: Path, bundle: Bundle, settings: Settings | None = None) -> Diagnosis:
    scorer = LogprobScorer([[path]], evidence_of(bundle, max_tokens=1000))
    return diagnose(scorer, Settings(temperature=1.0) if settings is None else settings, progress=lambda text: None)


@pytest.mark.parametrize("few_tensors", [64, 0])
def test_a_wrong_tensor_is_found_by_its_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few_tensors: int
) -> None:
    """Also where only the best of the ranking are tried, as in large models."""
    monkeypatch.setattr(tensors, "FEW_TENSORS", few_tensors)
    monkeypatch.setattr(tensors, "TRIED", 5)
    path, name = save_model(tmp_path / "model"), "model.layers.1.mlp.up_proj.weight"
    bundle, _ = with_tokens(path, edit=TensorEdit(name=name, kind=EditKind.scaled, factor=0.7))
    found = explained(path, bundle)
    assert found.faults[0].name == "scaled tensor"
    named = [found.faults[0].what, *found.faults[0].alike]
    assert any(name in each for each in named)
    assert any("1.mlp.down_proj" in each for each in named)  # which is the same


def test_the_gradient_is_that_of_the_log_probs(tmp_path: Path) -> None:
    """The order of the tokens is that of the evidence, whatever the lengths of the responses."""
    _, scorer = with_tokens(save_model(tmp_path / "model"))
    logprobs, _ = scorer.forward(Scoring())
    assert torch.allclose(logprobs.detach().double(), scorer.score([Scoring()])[0], atol=1e-5)


def test_the_side_at_fault_is_named(tmp_path: Path) -> None:
    path = save_model(tmp_path / "model")
    bundle, _ = with_tokens(path, temperature=1.3)
    assert [(part.side, part.name) for part in explained(path, bundle).faults] == [("engine", "temperature")]
    found = explained(path, other_side(bundle))
    assert [(part.side, part.name) for part in found.faults] == [("trainer", "temperature")]
    assert found.unexplained.k3 < 0.01 * found.k3


@pytest.mark.parametrize("side", ["engine", "trainer"])
def test_other_ids_are_named_on_either_side(tmp_path: Path, side: str) -> None:
    path = save_model(tmp_path / "model")
    bundle, _ = with_tokens(path)
    parts = bundle.rollout_logprobs.split(LENGTHS)
    slid = [torch.cat([each[:3], torch.full((1,), -7.0).to(each), each[3:-1]]) for each in parts]
    bundle = Bundle(**(dict(bundle.tensors()) | {"rollout_logprobs": torch.cat(slid)}), metadata=bundle.metadata)
    found = explained(path, bundle if side == "engine" else other_side(bundle))
    assert (found.faults[0].side, found.faults[0].name) == (side, "other tokens")


def test_a_fault_that_nobody_knows_is_not_called_arithmetic(tmp_path: Path) -> None:
    path = save_model(tmp_path / "model")
    bundle, _ = with_tokens(path)
    strange = bundle.rollout_logprobs + torch.randn(TOKENS, generator=torch.Generator().manual_seed(3))
    bundle = Bundle(**(dict(bundle.tensors()) | {"rollout_logprobs": strange}), metadata=bundle.metadata)
    for each in (bundle, other_side(bundle)):
        found = explained(path, each)
        assert found.unexplained.k3 > 0.5 * found.k3


def test_a_trainer_in_16_bits_is_no_fault_of_the_engine(tmp_path: Path) -> None:
    path = save_model(tmp_path / "model")
    model = Qwen2ForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    model.float().save_pretrained(path)  # 16-bit numbers, so that only the arithmetic differs
    bundle, scorer = with_tokens(path)
    rounded = Scoring().computed_in(DType.bfloat16)
    coarse = scorer.score([rounded])[0]
    bundle = Bundle(**(dict(bundle.tensors()) | {"old_logprobs": coarse}), metadata=bundle.metadata)
    assert not explained(path, bundle, Settings(temperature=1.0, trainer_dtype=DType.bfloat16)).faults
    undeclared = explained(path, bundle)
    assert [part.name for part in undeclared.faults] == ["arithmetic"]


def test_truncation_is_a_fault_only_of_a_trainer_that_does_not_know_the_kept_tokens(tmp_path: Path) -> None:
    """The engine draws from, and reports, what top-p keeps; the trainer scores the same, or the whole vocabulary."""
    path = save_model(tmp_path / "model")
    bundle, scorer = with_tokens(path)
    [engine] = scorer.score([Scoring(top_p=0.6)])
    whole = Bundle(**(dict(bundle.tensors()) | {"rollout_logprobs": engine}), metadata=bundle.metadata)
    assert [part.name for part in explained(path, whole).faults] == ["truncation"]
    model = Qwen2ForCausalLM.from_pretrained(path)
    kept = []
    for prompt, response in zip(scorer.evidence.prompts, scorer.evidence.responses, strict=True):
        with torch.inference_mode():
            logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        limits = {"top_k": torch.tensor([64]), "top_p": torch.tensor([0.6]), "min_p": torch.tensor([0.0])}
        rows = kept_tokens(logits.softmax(-1), **{name: each.expand(len(logits)) for name, each in limits.items()})
        kept.append(rows.scatter(1, response[:, None], True))  # these tokens were drawn at random
    mask = torch.cat(kept)
    known = {"support_sizes": mask.sum(-1), "support_ids": mask.nonzero()[:, 1]}
    evidence = evidence_of(Bundle(**(dict(bundle.tensors()) | known)), max_tokens=1000)
    among = LogprobScorer([[path]], evidence).score([Scoring()])[0]
    sides = {"old_logprobs": among, "rollout_logprobs": among + 1e-7, **known}
    found = explained(path, Bundle(**(dict(bundle.tensors()) | sides), metadata=bundle.metadata))
    assert not found.faults and found.k3 < 1e-12
    assert not torch.allclose(among, bundle.old_logprobs.double(), atol=0.1)
    parts = evidence.of_responses([2, 0], most=5)
    assert parts.supports is not None and parts.supports.sizes.tolist() == [
        *mask[21:26].sum(-1).tolist(), *mask[:5].sum(-1).tolist()
    ]  # fmt: skip
    found_parts = LogprobScorer([[path]], parts).score([Scoring()])[0]
    assert torch.allclose(found_parts, among[[*range(21, 26), *range(5)]], atol=1e-5)


def test_prompts_of_one_token_are_read(tmp_path: Path) -> None:
    path = save_model(tmp_path / "model")
    bundle, scorer = with_tokens(path, prompts=(1, 1, 2, 3))
    plain, prefix = scorer.score([Scoring(), Scoring().with_body(prefix=0)])
    assert torch.allclose(plain, prefix, atol=1e-5)
    assert not explained(path, bundle).faults


def test_an_unwritten_temperature_is_that_of_the_trainer(tmp_path: Path) -> None:
    path = save_model(tmp_path / "model")
    bundle, scorer = with_tokens(path)
    hot, hotter = scorer.score([Scoring(temperature=0.7), Scoring(temperature=0.9)])
    made = Bundle(**(dict(bundle.tensors()) | {"rollout_logprobs": hotter, "old_logprobs": hot}))
    found = explained(path, made, Settings())
    assert found.notes[0] == "nobody wrote the temperature down; the trainer's log-probs have 0.7"
    assert found.faults[0].what.startswith("has log-probs at temperature 0.9")


def test_other_tensors_and_ids_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    path = save_model(tmp_path / "model")
    bundle, _ = with_tokens(path)
    ids = bundle.token_ids.clone() if bundle.token_ids is not None else torch.empty(0)
    ids[0] = 64
    wrong = Bundle(**(dict(bundle.tensors()) | {"token_ids": ids}))
    with pytest.raises(OtherWeightsError, match="ids from 0 to 64"):
        LogprobScorer([[path]], evidence_of(wrong, max_tokens=999))
    smaller = tmp_path / "smaller"
    Qwen2ForCausalLM(Qwen2Config(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                 num_attention_heads=2, num_key_value_heads=1)).save_pretrained(smaller)  # fmt: skip
    with pytest.raises(OtherWeightsError, match="another model"):
        LogprobScorer([[path, smaller]], evidence_of(bundle, max_tokens=999))


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    path, other = save_model(tmp_path / "model", seed=0), save_model(tmp_path / "other", seed=7)
    bundle, _ = with_tokens(path, temperature=1.01)
    scorer = LogprobScorer([[other]], evidence_of(bundle, max_tokens=999))
    with pytest.raises(OtherWeightsError, match="weights that sampled"):
        diagnose(scorer, Settings(temperature=1.0), progress=lambda text: None)


@pytest.mark.parametrize("with_older", [True, False])
def test_newer_weights_than_those_of_the_step_are_refused(tmp_path: Path, with_older: bool) -> None:
    """Both sides had the weights before; the engine's temperature alone makes K3."""
    path, newer = save_model(tmp_path / "model"), tmp_path / "newer"
    bundle, _ = with_tokens(path, temperature=1.02)
    model = Qwen2ForCausalLM.from_pretrained(path)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.004 * torch.randn_like(weight))
    model.save_pretrained(newer)
    models = [newer, path] if with_older else [newer]
    scorer = LogprobScorer([models], evidence_of(bundle, max_tokens=999))
    with pytest.raises(OtherWeightsError, match="those of the weights model" if with_older else "neither with the"):
        diagnose(scorer, Settings(temperature=1.0), progress=lambda text: None)


def test_responses_are_chosen_evenly_among_those_that_count() -> None:
    found = evidence_of(numbers(), max_tokens=20)
    assert found.lengths == [LENGTHS[0], LENGTHS[2]]
    assert found.num_tokens == TOKENS
    mask = torch.ones(TOKENS)
    mask[: LENGTHS[0]] = 0  # the first response was left out of the loss
    assert evidence_of(numbers(mask=mask.to(torch.uint8)), max_tokens=20).lengths == [LENGTHS[1], LENGTHS[2]]
    assert evidence_of(numbers(), max_tokens=5).lengths == [5]


def test_a_bundle_without_a_number_is_refused() -> None:
    with pytest.raises(BundleError, match="finite"):
        evidence_of(numbers(rollout_logprobs=torch.full((TOKENS,), float("nan"))), max_tokens=10)


def test_prompts_must_fit_their_lengths(tmp_path: Path) -> None:
    ids = torch.tensor([1, 1, 1])
    with pytest.raises(BundleError, match="sum of prompt_lengths"):
        write_bundle(numbers(prompt_lengths=torch.tensor([1, 1, 1, 1]), prompt_ids=ids), tmp_path / "b")
    with pytest.raises(BundleError, match="at least 1"):
        write_bundle(numbers(prompt_lengths=torch.tensor([0, 1, 1, 1]), prompt_ids=ids), tmp_path / "b")
    with pytest.raises(BundleError, match="belong together"):
        write_bundle(numbers(prompt_ids=ids), tmp_path / "b")


def test_the_command_answers_and_writes_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save_model(tmp_path / "model")
    bundle, _ = with_tokens(path, temperature=1.3)
    write_bundle(bundle, tmp_path / "b.safetensors")
    assert run(["diagnose", str(tmp_path / "b.safetensors"), f"model={path}", f"out={tmp_path / 'out'}"]) == 0
    shown = capsys.readouterr().out
    assert "log-probs at temperature 1.3, not 1" in shown
    record = json.loads((tmp_path / "out" / "diagnosis.json").read_text())
    assert record["parts"][0]["name"] == "temperature"
    assert record["answer"] in shown
    assert "Where K3 comes from" in (tmp_path / "out" / "diagnosis.html").read_text()


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_the_command_answers_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str], noise: float) -> None:
    """Shares have no interval then, and without a difference there are no shares."""
    bundle = numbers()
    write_bundle(numbers(rollout_logprobs=bundle.old_logprobs + noise), tmp_path / "b.safetensors")
    assert run(["diagnose", str(tmp_path / "b.safetensors"), f"out={tmp_path / 'out'}"]) == 0
    record = json.loads((tmp_path / "out" / "diagnosis.json").read_text())
    assert record["answer"] in capsys.readouterr().out
    assert record["unexplained_share"] == {
        "k3": record["k3"], "share": 1.0 if noise else None, "low": None, "high": None
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "source is missing"),
        (["nowhere"], "must be a bundle or the directory of a run"),
        (["{bundle}", "modle=x"], "Did you mean model"),
        (["{bundle}", "model=nowhere"], "must be a directory that transformers can load"),
        (["{bundle}", "older=nowhere"], "older= needs model="),
        (["{bundle}", "trainer_dtype=half"], "must be one of float32, bfloat16, float16"),
        (["{bundle}", "temperature=0"], "must be a number > 0"),
        (["{bundle}", "tokens=none"], "must be a whole number >= 1"),
        (["{bundle}", "step=3"], "is not a word of parity diagnose here"),
        (["{bundle}", "model="], "must be a directory"),
        (["{bundle}", "device=gpu"], "must be cpu, cuda"),
    ],
)
def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], text: str) -> None:
    write_bundle(numbers(), tmp_path / "b.safetensors")
    assert run(["diagnose", *[word.format(bundle=tmp_path / "b.safetensors") for word in words]]) == 2
    assert text in capsys.readouterr().err


def test_a_small_fault_does_not_hide_what_is_configured(tmp_path: Path) -> None:
    """Only where all parts are small is nothing explained."""
    _, scorer = with_tokens(save_model(tmp_path / "model"), temperature=1.4)
    found = diagnose(scorer, Settings(temperature=1.0), progress=lambda text: None)
    [fault], left = found.parts, replace(found.unexplained, share=0.06)
    large = replace(fault, name="arithmetic", what="computes in bfloat16", share=0.91, is_declared=True, is_fault=False)
    small = replace(fault, share=0.03)
    assert "computes in bfloat16: 91%" in answer(replace(found, parts=(large, small), unexplained=left))
    assert answer(replace(found, parts=(small,), unexplained=left)).endswith("No cause that was tried explains it.")


def test_parts_add_up_in_the_table(tmp_path: Path) -> None:
    _, scorer = with_tokens(save_model(tmp_path / "model"), temperature=1.4)
    found = diagnose(scorer, Settings(temperature=1.0), progress=lambda text: None)
    assert sum(part.k3 for part in found.parts) + found.unexplained.k3 == pytest.approx(found.k3)
    assert [row[0] for row in part_rows(found)] == ["cause", "temperature", "not explained", "all"]
    result, page = write_diagnosis(found, tmp_path, title="a test")
    assert result.is_file() and page.is_file()


def test_a_narrower_type_is_tried_only_where_the_definition_computes_in_float32() -> None:
    names = [candidate.name for candidate in precision(None, Scoring())]  # type: ignore[arg-type]
    assert names.count("arithmetic") == 4, "two types, each with a narrow and with a float32 head"
    narrow = Scoring().computed_in(DType.bfloat16)
    assert "arithmetic" not in [candidate.name for candidate in precision(None, narrow)]  # type: ignore[arg-type]


def test_scorings_of_one_head_do_not_share_what_differs() -> None:
    logits, targets = torch.randn(50, 20, generator=torch.Generator().manual_seed(0)), torch.zeros(50, dtype=torch.long)
    scorings = [Scoring(temperature=each, top_p=0.9) for each in (0.5, 2.0, 2.0)]
    together = [*_logprobs(logits, targets, scorings)]
    for found, scoring in zip(together, scorings, strict=True):
        assert found.equal(*_logprobs(logits, targets, [scoring]))
