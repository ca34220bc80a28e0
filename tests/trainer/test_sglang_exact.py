"""rollout.exact=true with a real SGLang server on a CPU: its log-probs are those of the trainer in every bit."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from packing_cases import pack
from test_exact_bits import TEMPERATURE, differing, load
from tiny_model import EOS_TOKEN_ID, write_tiny_model

from rollout.collect.requests import make_sample
from rollout.config import DType
from rollout.engine import wait_for
from rollout.sglang.config import SGLangConfig
from rollout.sglang.cpu.platform import PLATFORM_NAME
from rollout.sglang.engine import SGLangEngine
from rollout.types import Completion, GenerateRequest, SamplingParams
from trainer.scoring.exact_attention import EXACT_ATTENTION
from trainer.scoring.forward import ScoringModel

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

DTYPES = {DType.float32: torch.float32, DType.bfloat16: torch.bfloat16}


@contextmanager
def served(path: Path, logs: Path, *, dtype: DType) -> Iterator[SGLangEngine]:
    engine = SGLangEngine(
        SGLangConfig(dtype=dtype, exact=True), index=0, seed=0, device="cpu", log_dir=logs, num_threads=2
    )
    try:
        engine.start(path)
        yield engine
    finally:
        engine.stop()


def requests(*, longest: int = 40) -> list[GenerateRequest]:
    """Prompts of 1 to 69 tokens, some with three responses; every second one with truncated sampling."""
    draw, found = random.Random(0), []
    for number in range(16):
        prompt = [draw.randrange(2, 67) for _ in range(draw.randrange(1, 70))]
        for index in range(draw.choice([1, 1, 3])):
            sampling = SamplingParams(
                temperature=TEMPERATURE, max_new_tokens=draw.randrange(1, longest), seed=draw.randrange(1000)
            )
            if number % 2:
                sampling.top_k, sampling.top_p, sampling.with_supports = 9, 0.9, True
            found.append(
                GenerateRequest(prompt_id=number, sample_index=index, prompt_token_ids=prompt, sampling=sampling)
            )
    return found


SERVED = (
    ("llama", DType.float32), ("qwen3", DType.bfloat16), ("qwen3_moe", DType.float32), ("qwen3_moe", DType.bfloat16),
    ("qwen2_moe", DType.float32), ("olmoe", DType.bfloat16), ("mixtral", DType.bfloat16),
)  # fmt: skip


@pytest.mark.parametrize(("model_type", "dtype"), SERVED)
def test_trainer_and_server_have_the_same_bits(tmp_path: Path, model_type: str, dtype: DType) -> None:
    """Before and after a weight sync, whatever is in the server's batch, in its prefix cache, or was retracted."""
    paths = [tmp_path / name for name in ("first", "second")]
    models = [
        write_tiny_model(path, model_type=model_type, seed=seed, tied_experts=True) for seed, path in enumerate(paths)
    ]
    for file in tmp_path.glob("*/*config.json"):  # no response ends before its time
        file.write_text(file.read_text().replace(f'"eos_token_id": {EOS_TOKEN_ID}', '"eos_token_id": null'))
    trainers = [
        ScoringModel(load(path, DTYPES[dtype], EXACT_ATTENTION, exact=True), chunk_tokens=50, exact=True)
        for path in paths
    ]
    with served(paths[0], tmp_path / "logs", dtype=dtype) as engine:
        asked = requests()
        first = [make_sample(*pair) for pair in zip(asked, engine.generate(asked), strict=True)]
        tokens, different = differing(trainers[0], first, size=7)
        assert tokens > 300 and different == 0
        alone = engine.generate(asked[:1])  # with its prompt in the cache, and nothing beside it
        assert make_sample(asked[0], alone[0]) == first[0]
        assert differing(trainers[1], first, size=7)[1] > tokens / 2, "other weights would not be seen"
        long, shortest = requests(longest=400), 0
        long[shortest].sampling.max_new_tokens = 8
        renewal = pack(models[1].named_parameters(), policy_version=1, dtype=DTYPES[dtype])
        engine.submit(range(len(long)), long)
        ended: list[Completion] = []
        wait_for([shortest], engine.poll, others=ended)  # its end says that the others are in their middle
        engine.load_weights(renewal)
        late = sorted(set(range(len(long))) - {shortest} - {completion.ticket for completion in ended})
        second = [
            make_sample(long[ticket], generation)
            for ticket, generation in zip(late, wait_for(late, engine.poll, others=[]), strict=True)
        ]
    mixed = [sample for sample in second if len(set(sample.response_versions)) == 2]
    for sample in second:  # what was sampled before the sync has other weights
        sample.response_mask &= sample.token_versions == 1
        sample.rollout_logprobs[~sample.response_mask] = 0
    renewed = [sample for sample in second if sample.response_mask.any()]
    tokens, different = differing(trainers[1], [each for each in renewed if each.supports is None], size=5)
    assert mixed and tokens > 100 and different == 0


REFUSED = """
from rollout.sglang.cpu.torchvision import make_torchvision_importable

make_torchvision_importable()
from sglang.srt.layers.activation import GeluAndMul
from torch import nn

from rollout.sglang.cpu.exact import make_exact

make_exact(nn.Sequential(GeluAndMul(), GeluAndMul(), nn.Conv1d(1, 1, 1)))
"""


def test_what_has_no_exact_form_is_refused_by_name() -> None:
    """The server then ends at its start, and the error of the engine quotes its log."""
    environment = os.environ | {"SGLANG_PLATFORM": PLATFORM_NAME, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", REFUSED], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert "ValueError: rollout.exact=true has no exact form of GeluAndMul, Conv1d in SGLang" in done.stderr
