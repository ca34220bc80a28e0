"""Files of other trainers: what their own code wrote is read as they measured it, and what cannot be read is refused.

The files in peer_files/ were written by the code of the trainers, and numbers.json has their own metrics of them:
`benchmarks/bundle_peers.py --responses 16 --longest 8 --keep DIR`, on 2026-11-25, with verl 0.9.1 and TRL 1.16.0; those
of NeMo-RL 7ea279ab, prime-rl 559b4477, slime 624b824a and miles 31f1ca96 by `bundle_writers.py`, which the history has.
docs/measured/bundle.md says what ran.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from test_style import ROOT
from torch import Tensor

from algorithms.config import TISConfig
from algorithms.correction import correct
from algorithms.tokens import Tokens
from trainer.cli.commands import run
from trainer.replay.bundle import Bundle, BundleError, read_bundle
from trainer.replay.peers.recognise import read_any
from trainer.replay.peers.slime import Part, Rank, cp_places
from trainer.replay.results import replay_bundle

FILES = Path(__file__).parent / "peer_files"
NEMO = FILES / "train_data_step12.jsonl"
PRIME = FILES / "token_exports" / "step_12"
OF_PEER = {
    "verl 0.9.1": FILES / "verl.safetensors",
    "TRL 1.16": FILES / "trl.safetensors",
    "NeMo-RL": NEMO,
    "prime-rl": PRIME,
    "slime": FILES / "slime_12.pt",
    "miles": FILES / "miles",
}


def numbers(peer: str) -> dict[str, float]:
    """Metric of Parity -> the number that the peer computed."""
    rows = json.loads((FILES / "numbers.json").read_text(encoding="utf-8"))
    return {row["metric"]: row["value"] for row in rows if row["peer"] == peer}


def truncated_mean(bundle: Bundle, cap: float) -> float:
    """Mean weight of the sampled tokens under truncated importance sampling."""
    assert bundle.mask is not None
    ends = bundle.lengths.long().cumsum(0)
    tokens = Tokens(
        trainer_logprobs=bundle.old_logprobs,
        rollout_logprobs=bundle.rollout_logprobs,
        response_mask=bundle.mask.bool(),
        cu_seqlens=torch.cat([ends.new_zeros(1), ends]).int(),
    )
    correction = correct(TISConfig(cap=cap).spec(), tokens)
    return correction.weight[correction.keep].double().mean().item()


@pytest.mark.parametrize("peer", OF_PEER)
def test_what_a_peer_measured_comes_back(peer: str) -> None:
    bundle = read_any(OF_PEER[peer])
    replay = replay_bundle(bundle, ["tis"])
    found = replay.metrics | replay.scores[0].metrics | {"mean of min(rho, 3)": truncated_mean(bundle, 3.0)}
    wanted = numbers(peer)
    assert "mismatch/k3" in wanted and len(wanted) >= 2
    for metric, value in wanted.items():
        assert found[metric] == pytest.approx(value, rel=1e-6), metric


def sampled(bundle: Bundle) -> Tensor:
    """[tokens, 4] of the sampled tokens: both log-probs, advantage and token id, in an order that has no meaning."""
    assert bundle.mask is not None and bundle.advantages is not None and bundle.token_ids is not None
    columns = (bundle.rollout_logprobs, bundle.old_logprobs, bundle.advantages, bundle.token_ids.float())
    rows = torch.stack(columns, 1)[bundle.mask.bool()]
    return torch.tensor(sorted(map(tuple, rows.tolist())))


def test_trainers_that_wrote_one_step_are_read_as_one_step() -> None:
    """One random step went to all four: over ranks of data, context and tensor parallelism, padded, or packed."""
    slime = read_any(OF_PEER["slime"])
    assert len(slime.lengths) == 16 and 30 < len(sampled(slime)) < len(slime.old_logprobs)
    for peer in ("prime-rl", "miles"):
        assert torch.equal(sampled(read_any(OF_PEER[peer])), sampled(slime)), peer
    nemo = read_any(NEMO)
    assert nemo.mask is not None
    by_response = nemo.mask.split(nemo.lengths.tolist())
    assert [number for number, mask in enumerate(by_response) if not mask.any()] == [3]  # sample_loss_mask is 0
    assert slime.mask is not None
    left_out = int(slime.mask.split(slime.lengths.tolist())[3].sum())
    assert len(sampled(nemo)) == len(sampled(slime)) - left_out


@pytest.mark.parametrize("peer", ["NeMo-RL", "prime-rl", "slime", "miles"])
def test_step_and_rewards_are_those_of_the_file_and_groups_are_not_guessed(peer: str) -> None:
    bundle = read_any(OF_PEER[peer])
    assert bundle.metadata == {"producer": peer, "step": "12"}
    assert bundle.groups is None, "no file names them, and equal prompts may be of two groups"
    if peer in ("NeMo-RL", "slime"):
        assert bundle.rewards is not None and bundle.rewards.tolist() == [0.0, 1.0] * 8
    else:
        assert bundle.rewards is None


def test_a_file_is_replayed_and_written_as_a_bundle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = shutil.copy(NEMO, tmp_path)
    assert run(["replay", str(copy), "modes=tis", f"bundle={tmp_path / 'new' / 'b.safetensors'}"]) == 0
    assert "16 responses" in (said := capsys.readouterr().out) and "written by NeMo-RL (step 12)" in said
    found = json.loads((tmp_path / "train_data_step12_replay" / "replay.json").read_text(encoding="utf-8"))
    assert found["mismatch"]["mismatch/k3"] == pytest.approx(numbers("NeMo-RL")["mismatch/k3"], rel=1e-6)
    written, read = read_bundle(tmp_path / "new" / "b.safetensors"), read_any(NEMO)
    assert written.metadata == read.metadata
    for name, tensor in read.tensors():
        assert torch.equal(getattr(written, name), tensor), name


def test_a_directory_of_ranks_is_one_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = Path(shutil.copytree(FILES / "miles", tmp_path / "train_data"))
    assert run(["replay", str(place), "modes=tis"]) == 0
    assert "16 responses" in capsys.readouterr().out
    for path in list(place.glob("12_*.pt")):
        shutil.copy(path, place / path.name.replace("12_", "13_"))
    assert run(["replay", str(place)]) == 2
    assert "has several rollouts: write step=N with one of 12, 13" in capsys.readouterr().err
    assert run(["replay", str(place), "step=4"]) == 2
    assert "has no rollout 4; it has 12, 13" in capsys.readouterr().err
    assert run(["replay", str(place), "step=x", "bundel=a"]) == 2
    assert "must be a whole number" in (said := capsys.readouterr().err) and "Did you mean bundle?" in said
    assert run(["replay", str(place), "step=12", "modes=tis"]) == 0
    single = read_any(PRIME / "rank_1.jsonl")
    assert single.metadata["rank"] == "1" and len(single.lengths) == 8


def test_parts_of_ranks_go_where_they_belong() -> None:
    """Thirteen tokens over two ranks: chunks of four, of which rank 0 has the first and the last."""
    part = Part(
        place="", index=0, tokens=torch.arange(13), length=8, mask=torch.ones(8), rollout_logprobs=None,
        old_logprobs=None, advantages=None, reward=None, padded=13,
    )  # fmt: skip
    # The log-prob of response token t is predicted at place 4 + t of the sequence.
    assert cp_places(part, Rank(cp_rank=1, cp_size=2)).tolist() == list(range(8))
    part = Part(
        place="", index=0, tokens=torch.arange(16), length=14, mask=torch.ones(14), rollout_logprobs=None,
        old_logprobs=None, advantages=None, reward=None, padded=16,
    )  # fmt: skip
    assert cp_places(part, Rank(cp_rank=0, cp_size=2)).tolist() == [0, 1, 2, 11, 12, 13]
    assert cp_places(part, Rank(cp_rank=1, cp_size=2)).tolist() == list(range(3, 11))


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    shutil.copy(FILES / "miles" / "12_2.pt", tmp_path)
    with pytest.raises(BundleError, match=r"response 0, response 1, response 2 and 5 more: rank 0 of context"):
        read_any(tmp_path / "12_2.pt")
    shutil.copy(FILES / "miles" / "12_0.pt", tmp_path)
    bundle = read_any(tmp_path)
    assert len(bundle.lengths) == 8 and not bundle.old_logprobs.isnan().any()


def miles_file(**changed: Any) -> dict[str, Any]:
    """Two responses with the same words, as one rank without context parallelism writes them."""
    columns: dict[str, Any] = {
        "tokens": [torch.tensor([5, 6, 7]), torch.tensor([5, 6, 7])],
        "response_lengths": [2, 2],
        "loss_masks": [torch.ones(2, dtype=torch.int32), torch.ones(2, dtype=torch.int32)],
        "rollout_log_probs": [torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -2.0])],
        "log_probs": [torch.tensor([-1.1, -2.2]), torch.tensor([-1.1, -2.2])],
        "sample_indices": [None, None],
    } | changed
    columns = {name: value for name, value in columns.items() if value is not None}
    return {"rollout_id": 3, "rank": 0, "rollout_data": columns, "cp_rank": 0, "cp_size": 1, "qkv_format": "thd"}


def test_equal_words_are_two_responses_and_a_pipeline_stage_gives_what_it_has(tmp_path: Path) -> None:
    torch.save(miles_file(), tmp_path / "3_0.pt")
    torch.save(miles_file(log_probs=None) | {"rank": 1}, tmp_path / "3_1.pt")
    bundle = read_any(tmp_path)
    assert bundle.lengths.tolist() == [2, 2]
    assert bundle.old_logprobs.tolist() == pytest.approx([-1.1, -2.2] * 2)
    with pytest.raises(BundleError, match=r"response 0, response 1: no log_probs of the trainer.*--get-mismatch-metr"):
        read_any(tmp_path / "3_1.pt")


def test_a_number_that_is_missing_is_an_invalid_token(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (PRIME / "rank_0.jsonl").read_text(encoding="utf-8").splitlines()]
    rows[0]["trainer_logprobs"] = [None] * len(rows[0]["trainer_logprobs"])
    rows[1]["rl_weights"] = [0.0] * len(rows[1]["token_ids"])  # of another model: no token of the policy
    counted = sum(sum(row["loss_mask"]) for row in rows[2:])
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    metrics = replay_bundle(read_any(tmp_path / "a.jsonl"), ["tis"]).metrics
    assert metrics["mismatch/invalid_tokens"] == sum(rows[0]["loss_mask"]) > 0
    assert metrics["mismatch/num_tokens"] == counted + sum(rows[0]["loss_mask"])


def test_rows_of_dropped_responses_are_left_out(tmp_path: Path) -> None:
    """NeMo-RL with dynamic sampling: rewards of all responses, everything else of those that are in the step."""
    rows = [json.loads(line) for line in NEMO.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        row |= {"filtered_rewards": row["rewards"], "rewards": [9.0]}
    dropped = {name: [] for name in rows[0]} | {"rewards": [9.0], "idx": 16}
    (tmp_path / "train_data_step5.jsonl").write_text("\n".join(map(json.dumps, [*rows, dropped])), encoding="utf-8")
    bundle, whole = read_any(tmp_path / "train_data_step5.jsonl"), read_any(NEMO)
    assert bundle.rewards is not None and whole.rewards is not None
    assert torch.equal(bundle.rewards, whole.rewards) and bundle.number("step") == 5
    assert torch.equal(bundle.old_logprobs, whole.old_logprobs)


def test_all_that_is_wrong_with_the_rows_is_told_with_their_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.loads(line) for line in NEMO.read_text(encoding="utf-8").splitlines()]
    for number in range(8, 14):
        del rows[number]["prev_logprobs"]
    rows[2]["generation_logprobs"] = [["a"] * 13]
    rows[3]["advantages"] = [[0.5]]
    lines = [json.dumps(row) for row in rows]
    lines[0] = lines[0][:40]
    lines[1] = "[1, 2]"
    path = tmp_path / "broken.jsonl"
    path.write_text("\n".join([lines[4], *lines]) + "\n", encoding="utf-8")
    assert run(["replay", str(path)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    for words in (
        "line 2: is no JSON (",
        "line 3: is no JSON object",
        "line 4: generation_logprobs is no list of numbers",
        "line 5: the lists are not of one length: token_loss_mask has 13, generation_logprobs has 13, prev_logprobs",
        "line 10, line 11, line 12 and 3 more: no prev_logprobs: there are no log-probs of the trainer",
    ):
        assert words in said
    assert list(tmp_path.iterdir()) == [path]


def written(path: Path, content: bytes | str | dict[str, Any]) -> Path:
    if isinstance(content, dict):
        torch.save(content, path)
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


ZEROS = {"token_loss_mask": [[0, 1]], "generation_logprobs": [[0.0, -1.0]], "prev_logprobs": [[0.0, 0.0]]}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("1.jsonl", '{"input": "a", "output": "b", "gts": null, "score": 1.0, "step": 1}', "verl's rollout_data_dir"),
        ("gen.pkl", b"\x80\x04\x95\x00\x00", "a pickle, such as DataProto.save_to_disk of verl writes"),
        ("completions_00001.parquet", b"PAR1abcdPAR1", "TRL's log_completions writes texts and rewards"),
        ("rank_0.bin", b"\x91\x9f\xdc\x00", "trainer.enable_token_export=true"),
        ("train_data_step1.jsonl", json.dumps(ZEROS), "force_on_policy_ratio=true NeMo-RL writes zeros"),
        ("train_data_step1.jsonl", '{"token_loss_mask": [[0]], "content": ["a"]}', "no generation_logprobs: there are"),
        ("a.jsonl", '{"schema_version": 2, "trainer_logprobs": []}', "schema_version is 2, not 1"),
        ("a.jsonl", '{"prompt": "a"}', "of no trainer that is known: its first row has prompt"),
        ("12.pt", {"rollout_id": 12, "samples": [{"tokens": [1]}]}, "a rollout file, written before the trainer"),
        ("12.pt", {"format_version": 3, "samples": []}, "format_version is 3, not 2"),
        ("12.pt", {"weight": torch.zeros(2)}, "has neither samples nor rollout_data"),
        ("12.pt", miles_file(rollout_log_probs=None), "no rollout_log_probs: the engine's log-probs were not returned"),
        ("12.pt", miles_file(log_probs=[torch.zeros(1)] * 2), "log_probs has 1 entries, not 2"),
        ("12.pt", miles_file(loss_masks=[torch.zeros(2)] * 2), "the mask is 0 everywhere"),
        ("12.pt", b"PK\x03\x04 and no more", "is no torch file that can be read"),
        ("empty.jsonl", "", "is no safetensors file that can be read"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes | str | dict[str, Any], words: str
) -> None:
    path = written(tmp_path / name, content)
    assert run(["replay", str(path)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert words in said and name in said
    assert list(tmp_path.iterdir()) == [path]


class Planted:
    """An object whose pickle makes a directory when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_nothing_in_a_torch_file_is_executed(tmp_path: Path) -> None:
    torch.save(miles_file(raw_reward=[Planted(tmp_path / "ran"), 0.0]), tmp_path / "3_0.pt")
    with pytest.raises(BundleError, match=r"holds objects of posix\.mkdir: only tensors, numbers"):
        read_any(tmp_path / "3_0.pt")
    assert not (tmp_path / "ran").exists()


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "bundle.md").read_text("utf-8"), re.DOTALL)


def test_the_lines_of_the_docs_are_short_and_write_padded_tensors(tmp_path: Path) -> None:
    assert len(blocks()) == 4 and all(len(block.splitlines()) <= 30 for block in blocks())
    [code] = [block for block in blocks() if "def write_padded" in block]
    names: dict[str, Any] = {}
    exec(code, names)
    values = torch.arange(8.0).reshape(2, 4)
    names["write_padded"](
        tmp_path / "new" / "b.safetensors",
        mask=torch.tensor([[1, 0, 1, 0], [1, 0, 0, 0]]),
        rollout_logprobs=-values,
        old_logprobs=-values - 0.5,
        token_ids=values.long(),
        rewards=torch.tensor([1.0, 0.0]),
        groups=torch.tensor([4, 4]),
        producer="mine",
        step=7,
    )
    bundle = read_bundle(tmp_path / "new" / "b.safetensors")
    assert bundle.lengths.tolist() == [3, 1] and bundle.mask is not None and bundle.mask.tolist() == [1, 0, 1, 1]
    assert bundle.rollout_logprobs.tolist() == [0, -1, -2, -4] and bundle.number("step") == 7
    assert bundle.token_ids is not None and bundle.token_ids.tolist() == [0, 1, 2, 4]
    assert bundle.rewards is not None and bundle.rewards.tolist() == [1, 0]
