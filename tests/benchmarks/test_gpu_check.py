"""The check of a GPU host, on a CPU: its rows hold for the code as it is, and fail for code that is broken."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from test_style import ROOT

sys.path.append(str(ROOT / "benchmarks"))

from gpu_check import attention, checks, full, full_engine, head, memory, speed, weights
from gpu_check import run as kit
from gpu_check.checks import Check
from gpu_check.host import Host
from gpu_check.models import QWEN_32B, TINY, sparse_model
from gpu_check.rows import NotRunError, Row, Verdict, append, judged, noted, read, summary, table
from torch.distributed.fsdp import FSDPModule

from rollout.engine import EngineNeeds
from rollout.sglang.config import SGLangConfig
from rollout.sglang.installation import server_environment
from trainer.compose.compose import resolve
from trainer.limits.model_shape import directory_shape
from trainer.policy import worker
from trainer.policy.stored import weight_files
from trainer.policy.trainable import Trainable
from trainer.scoring.attention import Segments, packed_attention
from trainer.scoring.logprob_head import token_logprobs


@pytest.fixture
def host(tmp_path: Path) -> Host:
    out, scratch = tmp_path / "out", tmp_path / "scratch"
    out.mkdir()
    scratch.mkdir()
    return Host(device=torch.device("cpu"), out=out, scratch=scratch, threads=2)


def failed(rows: Iterator[Row]) -> list[str]:
    return [row.what for row in rows if row.verdict is Verdict.fails]


def test_rows_come_back_and_make_a_table(tmp_path: Path) -> None:
    rows = [
        judged("1", "a | b", expected="1", measured="2", ok=False, reason="two\nlines"),
        noted("2", "c", measured="3"),
    ]
    for row in rows:
        append(tmp_path / "rows", row)
    assert read(tmp_path / "rows") == rows
    assert summary(rows) == "0 holds, 1 fails, 1 noted, 0 not run"
    assert "| 1 | a / b | 1 | 2 | fails: two lines |" in table(rows)
    assert judged("1", "a", expected="", measured="", ok=True, reason="of a failure").reason == ""


def test_a_sparse_model_of_32_billion_parameters_takes_no_disk(tmp_path: Path) -> None:
    path = sparse_model(tmp_path, QWEN_32B)
    files = weight_files(path)
    sizes = [file.stat() for file in set(files.values())]
    assert sum(found.st_size for found in sizes) > 65e9 and sum(found.st_blocks for found in sizes) * 512 < 2**20
    assert max(found.st_size for found in sizes) < 5e9
    name = "model.layers.63.mlp.down_proj.weight"
    with safe_open(files[name], framework="pt") as tensors:
        last = tensors.get_slice(name)
        assert last.get_shape() == [5120, 27648] and not last[:1].any()
    shape = directory_shape(path)
    assert shape.num_parameters == 32_763_876_352 and not shape.is_tied


@pytest.mark.parametrize(
    ("name", "recipe", "ranks"),
    [
        ("0.5B, 8 ranks", "gsm8k_grpo_qwen2.5_0.5b", 1),
        ("7B, 8 ranks", "dapo_qwen2.5_7b", 8),
        ("32B, 64 ranks", "dapo_qwen2.5_32b", 64),
    ],
)
def test_fake_ranks_have_the_numbers_of_the_recipes(name: str, recipe: str, ranks: int) -> None:
    source = "word_problems:one_step@train"
    given = (f"data.train_path={source}", f"data.eval_path={source}")
    [run] = resolve(ROOT / "recipes" / f"{recipe}.yaml", given, own_dir=None, multirun=False).runs
    config, setting = run.config, memory.RECIPES[name]
    assert config is not None and config.policy.num_workers == ranks
    assert setting.prompt_tokens == config.data.max_prompt_tokens  # type: ignore[attr-defined]
    assert setting.response_tokens == config.sampling.max_new_tokens
    assert setting.cap == config.batch.max_tokens_per_microbatch
    assert setting.prompts_per_step == config.batch.prompts_per_step
    assert setting.group_size == config.batch.group_size
    assert setting.mini_batch_prompts == config.batch.mini_batch_prompts
    assert setting.checkpoint_every == config.policy.activation_checkpoint_every
    assert setting.dtype is config.policy.dtype


def test_a_fake_rank_keeps_no_whole_gradient_and_says_so_when_it_does(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = list(memory.rank_memory(host, "7B, 8 ranks"))
    assert failed(iter(rows)) == [] and len(rows) == 5

    def without_reduction(self: Trainable[torch.nn.Module], loss: torch.Tensor) -> None:
        model = self.model
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(False)
        loss.backward()
        model.set_requires_gradient_sync(True)

    monkeypatch.setattr(Trainable, "backward", without_reduction)
    row = next(row for row in memory.rank_memory(host, "7B, 8 ranks") if "whole gradients" in row.what)
    assert row.verdict is Verdict.fails and float(row.measured) == 4.0


def test_the_head_is_held_against_float64(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    assert failed(head.head(host)) == []

    def shifted(*args: object) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropy = token_logprobs(*args)  # type: ignore[arg-type]
        return logprobs * 1.02, entropy

    monkeypatch.setattr(head, "token_logprobs", shifted)
    assert len(failed(head.head(host))) == len(head.CASES)


def test_attention_is_held_against_float64(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    assert failed(attention.attention(host)) == []

    def leaking(*args: object, segments: Segments) -> object:
        whole = Segments([sum(segments.roots), *(branch.length for branch in segments.branches)])
        return packed_attention(*args, segments=whole)  # type: ignore[arg-type]

    monkeypatch.setattr(attention, "packed_attention", leaking)
    assert len(failed(attention.attention(host))) == 4


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="on a CPU torch.compile needs a C++ compiler")
def test_gradients_of_compiled_layers_are_held_against_float32(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    assert speed.compiled_gradients("5", host, memory.SMALL).verdict is Verdict.holds

    def broken(decoder: torch.nn.Module) -> None:
        for layer in decoder.layers:  # type: ignore[union-attr]
            layer.register_forward_hook(lambda module, args, out: out * 1.05)

    monkeypatch.setattr(worker, "compile_layers", broken)
    assert speed.compiled_gradients("5", host, memory.SMALL).verdict is Verdict.fails


def test_a_flipped_bit_must_be_found(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_read_elsewhere", lambda *args: iter(()))  # a second process takes seconds
    assert failed(weights.publish(host, TINY)) == []
    monkeypatch.setattr(weights, "check_weights", lambda *args, **kwargs: None)
    assert failed(weights.publish(host, TINY)) == ["one flipped bit"]


def test_an_error_of_a_check_becomes_a_row_and_keeps_those_before(host: Host) -> None:
    def broken(_: Host) -> Iterator[Row]:
        yield noted("9", "before", measured="1")
        raise ValueError("it broke")

    def elsewhere(_: Host) -> Iterator[Row]:
        raise NotRunError("needs CUDA")
        yield

    rows = [row for run in (broken, elsewhere) for row in kit.rows_of(check_of(run), host=host)]
    assert rows == read(host.out / kit.ROWS)
    assert [row.verdict for row in rows] == [Verdict.noted, Verdict.fails, Verdict.not_run]
    assert "ValueError: it broke" in rows[1].measured and rows[2].reason == "needs CUDA"
    assert "it broke" in (host.out / "error_9.txt").read_text()


def check_of(run: object) -> Check:
    return Check(number=9, name="made up", cost_s=1, run=run)  # type: ignore[arg-type]


def hang(_: Host) -> Iterator[Row]:
    yield noted("9", "before", measured="1")
    time.sleep(600)


def test_a_process_of_a_gpu_check_can_be_started_anew() -> None:
    """An import may have touched the driver, so that a forked process could not use it; spawned ones import `_run`."""
    assert kit.START_METHODS["cuda"] == "spawn"
    assert kit._run.__module__ == "gpu_check.run"
    for check in (*checks.listed(), *full.listed()):
        assert pickle.loads(pickle.dumps(check)).name == check.name


def test_a_check_that_hangs_is_ended(host: Host) -> None:
    started = time.monotonic()
    assert kit.run_apart(check_of(hang), device="cpu", out=host.out, scratch=host.scratch, limit_s=3.0)
    assert time.monotonic() - started < 20
    rows = read(host.out / kit.ROWS)
    assert rows[-1].verdict is Verdict.fails and rows[-1].measured == "no end within 3 s"


def test_what_cannot_be_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kit.main(["--device", "cpu", "--checks", "77", "--out", str(tmp_path)]) == 2
    assert "there is no check [77] here" in capsys.readouterr().err
    monkeypatch.setattr(torch.version, "cuda", None)
    assert kit.main(["--device", "cuda", "--out", str(tmp_path)]) == 2
    assert "a build without CUDA" in capsys.readouterr().err


def test_a_device_that_does_not_answer_is_a_row(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*args: object, **kwargs: object) -> Host:
        raise RuntimeError("Found no NVIDIA driver")

    monkeypatch.setattr(kit, "open_host", absent)
    kit._run(check_of(hang), "cuda", host.out, host.scratch)
    [row] = read(host.out / kit.ROWS)
    assert row.verdict is Verdict.fails and "no NVIDIA driver" in row.measured


def test_without_time_nothing_is_run(tmp_path: Path) -> None:
    assert kit.main(["--device", "cpu", "--limit-seconds", "0", "--out", str(tmp_path)]) == 0
    rows = read(tmp_path / kit.ROWS)
    assert {row.verdict for row in rows} == {Verdict.not_run} and {int(row.check) for row in rows} == set(range(13))


def test_every_check_is_listed_once_and_cheap_ones_come_first() -> None:
    for listed in (checks.listed(), full.listed()):
        names = [(check.number, check.name) for check in listed]
        assert len(set(names)) == len(names)
        assert [check.cost_s for check in listed] == sorted(check.cost_s for check in listed)
    assert {check.number for check in checks.listed()} == set(range(13))
    assert set(checks.MEMORY_COSTS_S) == set(memory.RECIPES)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_the_command_writes_rows_and_a_table(tmp_path: Path, method: str) -> None:
    """With the processes of a CPU and with those of a GPU, which import the kit anew."""
    code = f"from gpu_check import run, __main__; run.START_METHODS['cpu'] = {method!r}; run.sys.exit(run.main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "--device", "cpu", "--checks", "11"],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}", "PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    out = tmp_path / "outputs" / "gpu_check"
    assert [row.verdict.value for row in read(out / kit.ROWS)] == ["holds", "not run", "not run", "not run"]
    text = (out / kit.TABLE).read_text()
    assert "device cpu" in text and "| 11 | gloo: sum in float64, objects, mesh | they work |" in text


@pytest.mark.sglang
def test_caches_are_cold_when_check_20_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every directory in which SGLang keeps compiled kernels is a fresh one of the check, also for its server."""
    from sglang.srt.environ import envs, third_party_cache_defaults

    of_sglang = {name for name in dir(type(envs)) if name.startswith("SGLANG_") and name.endswith("CACHE_DIR")}
    assert of_sglang | third_party_cache_defaults().keys() <= set(full_engine.CACHE_VARIABLES)
    for name in full_engine.CACHE_VARIABLES:
        monkeypatch.setenv(name, "/of/the/check")
    given = server_environment(SGLangConfig(), device="cuda", num_threads=None, needs=EngineNeeds())
    assert {given.get(name, "/of/the/check") for name in full_engine.CACHE_VARIABLES} == {"/of/the/check"}
