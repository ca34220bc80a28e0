"""Batched attention against SGLang's own `torch_native` loop on the same forwards: real pool and layers, no server."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollout.engine import EngineNeeds
from rollout.sglang.config import SGLangConfig
from rollout.sglang.cpu.platform import ATTENTION_BACKEND, PLATFORM_NAME
from rollout.sglang.cpu.torchvision import make_torchvision_importable
from rollout.sglang.installation import server_args

pytestmark = pytest.mark.sglang

MAX_REQUESTS, MAX_POSITIONS, NUM_SLOTS, NUM_LAYERS, HEAD_SIZE = 24, 192, 4096, 2, 16
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2}
"""Outputs are of size 1: a few units in the last place of the type."""


@dataclass
class Driver:
    """Both backends on one cache; plays the part of SGLang's scheduler."""

    native: Any
    batched: Any
    layers: list[Any]
    req_to_token: torch.Tensor
    num_heads: int
    num_kv_heads: int
    dtype: torch.dtype
    mode: Any
    free: list[int]
    lens: dict[int, int] = field(default_factory=dict)
    """Row of `req_to_token` -> tokens that are in the cache."""
    worst: float = 0.0
    singles: int = 0
    """Forwards over prompts of which every sequence gets one token."""

    def run(self, rows: list[int], new: list[int], *, is_decode: bool) -> None:
        """One forward of `new` tokens per sequence; compares all outputs."""
        prefixes = torch.tensor([self.lens.get(row, 0) for row in rows])
        counts = torch.tensor(new)
        slots = []
        for row, count in zip(rows, new, strict=True):
            own = [self.free.pop(random.randrange(len(self.free))) for _ in range(count)]
            start = self.lens.get(row, 0)
            self.req_to_token[row, start : start + count] = torch.tensor(own, dtype=torch.int32)
            self.lens[row] = start + count
            slots += own
        batch = SimpleNamespace(
            forward_mode=self.mode.DECODE if is_decode else self.mode.EXTEND,
            req_pool_indices=torch.tensor(rows),
            seq_lens=prefixes + counts,
            extend_prefix_lens=prefixes,
            extend_seq_lens=counts,
            out_cache_loc=torch.tensor(slots),
            encoder_lens=None,
            encoder_out_cache_loc=None,
        )
        self.native.init_forward_metadata(batch)
        self.batched.init_forward_metadata(batch)
        assert bool(self.batched._blocks) == (is_decode or max(new) == 1)
        self.singles += not is_decode and max(new) == 1
        for layer in self.layers:
            q = torch.randn(len(slots), self.num_heads * HEAD_SIZE).to(self.dtype)
            k = torch.randn(len(slots), self.num_kv_heads, HEAD_SIZE).to(self.dtype)
            v = torch.randn(len(slots), self.num_kv_heads, HEAD_SIZE).to(self.dtype)
            name = "forward_decode" if is_decode else "forward_extend"
            expected = getattr(self.native, name)(q, k, v, layer, batch)
            found = getattr(self.batched, name)(q, k, v, layer, batch)
            assert found.shape == expected.shape and found.dtype == expected.dtype
            self.worst = max(self.worst, (found.float() - expected.float()).abs().max().item())

    def end(self, row: int) -> None:
        """Free the slots that no other sequence shares."""
        own = set(self.req_to_token[row, : self.lens.pop(row)].tolist())
        for other, length in self.lens.items():
            own -= set(self.req_to_token[other, :length].tolist())
        self.free += sorted(own)

    def share(self, row: int, other: int, count: int) -> None:
        """A new sequence that begins with the first tokens of another: a hit in the prefix cache."""
        self.req_to_token[row, :count] = self.req_to_token[other, :count]
        self.lens[row] = count


@pytest.fixture
def make_driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("SGLANG_PLATFORM", PLATFORM_NAME)
    make_torchvision_importable()
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from rollout.sglang.cpu.attention import BatchedAttention

    def make(*, num_heads: int = 4, num_kv_heads: int = 2, dtype: torch.dtype, windows: tuple[int, ...]) -> Driver:
        random.seed(0)
        torch.manual_seed(0)
        pool = MHATokenToKVPool(
            size=NUM_SLOTS,
            page_size=1,
            dtype=dtype,
            head_num=num_kv_heads,
            head_dim=HEAD_SIZE,
            layer_num=NUM_LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
        req_to_token = torch.zeros(MAX_REQUESTS, MAX_POSITIONS, dtype=torch.int32)
        runner = SimpleNamespace(
            device="cpu", req_to_token_pool=SimpleNamespace(req_to_token=req_to_token), token_to_kv_pool=pool
        )
        layers = [
            RadixAttention(num_heads, HEAD_SIZE, HEAD_SIZE**-0.5, num_kv_heads, index, sliding_window_size=window)
            for index, window in enumerate(windows)
        ]
        return Driver(
            native=TorchNativeAttnBackend(runner),
            batched=BatchedAttention(runner),
            layers=layers,
            req_to_token=req_to_token,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            dtype=dtype,
            mode=ForwardMode,
            free=list(range(1, NUM_SLOTS)),
        )

    return make


def serve(driver: Driver, *, num_steps: int) -> int:
    """Random traffic: groups with shared prefixes, prompts in chunks, ends, retractions, rows used again."""
    waiting: list[tuple[int, int]] = []
    num_decodes = 0
    for _ in range(num_steps):
        running = [row for row in driver.lens if row not in {row for row, _ in waiting}]
        unused = [row for row in range(MAX_REQUESTS) if row not in driver.lens]
        if waiting or (unused and random.random() < 0.4):
            if not waiting:
                random.shuffle(unused)
                lengths = random.choice([[1], [1, 2, 7, 20, 60]])
                for row in unused[: random.randrange(1, 6)]:
                    if running and random.random() < 0.5:
                        other = random.choice(running)
                        driver.share(row, other, random.randrange(1, driver.lens[other] + 1))
                    waiting.append((row, random.choice(lengths)))
            # The last prompt of the batch may be cut, and goes on in the next forward.
            rows, new = [row for row, _ in waiting], [count for _, count in waiting]
            cut = random.randrange(1, new[-1] + 1)
            rest = new[-1] - cut
            driver.run(rows, [*new[:-1], cut], is_decode=False)
            waiting = [(rows[-1], rest)] if rest else []
            continue
        if not running:
            continue
        if random.random() < 0.2:
            random.shuffle(running)
        for _ in range(random.choice([1, 1, 2, 5])):
            running = [row for row in running if driver.lens[row] < MAX_POSITIONS]
            if running:
                driver.run(running, [1] * len(running), is_decode=True)
                num_decodes += 1
        for row in list(driver.lens):
            if driver.lens[row] == MAX_POSITIONS or (random.random() < 0.1 and row in running):
                # An end and a retraction are the same to the backend: the row is given to another prompt.
                driver.end(row)
    return num_decodes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (6, 2)])
def test_equals_the_loop_over_sequences(
    make_driver: Any, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, num_heads: int, num_kv_heads: int
) -> None:
    # A small bound, so that a batch has many blocks.
    monkeypatch.setattr("rollout.sglang.cpu.attention.BLOCK_NUMBERS", 4096)
    driver = make_driver(num_heads=num_heads, num_kv_heads=num_kv_heads, dtype=dtype, windows=(-1, -1))
    assert serve(driver, num_steps=120) > 60
    assert driver.singles > 10
    assert 0 < driver.worst < TOLERANCE[dtype]


def test_equals_the_loop_where_some_layers_have_a_sliding_window(make_driver: Any) -> None:
    driver = make_driver(dtype=torch.float32, windows=(-1, 9))
    serve(driver, num_steps=60)
    assert 0 < driver.worst < TOLERANCE[torch.float32]


def test_a_number_that_is_not_finite_stays_within_its_sequence(make_driver: Any) -> None:
    from rollout.sglang.cpu.attention import attend, plan_blocks

    driver = make_driver(dtype=torch.float32, windows=(-1, -1))
    driver.run([0, 1], [40, 3], is_decode=False)
    pool = driver.batched.token_to_kv_pool
    pool.v_buffer[0][driver.req_to_token[0, 5].long()] = torch.nan
    blocks = plan_blocks(
        driver.req_to_token,
        torch.tensor([0, 1]),
        lens=torch.tensor([40, 3]),
        numbers_per_key=driver.num_kv_heads * HEAD_SIZE,
    )
    assert len(blocks) == 1
    query = torch.randn(2, driver.num_heads, HEAD_SIZE)
    found = attend(query, pool.k_buffer[0], pool.v_buffer[0], blocks, scale=0.25)
    assert found[0].isnan().all() and found[1].isfinite().all()


def test_blocks_pad_little(make_driver: Any) -> None:
    from rollout.sglang.cpu.attention import plan_blocks

    make_driver(dtype=torch.float32, windows=(-1, -1))
    lens = torch.tensor([3000, 5, 6, 7, 2900])
    table = torch.arange(5 * 4000, dtype=torch.int32).view(5, 4000)
    blocks = plan_blocks(table, torch.arange(5), lens=lens, numbers_per_key=512)
    assert [block.rows.tolist() for block in blocks] == [[1, 2, 3], [4], [0]]
    assert sum(len(block.slots) for block in blocks) == int(lens.sum()) + 3
    assert blocks[0].slots[:7].tolist() == [4000, 4001, 4002, 4003, 4004, 4004, 4004]


def test_it_is_the_default_on_a_cpu_and_an_option_of_the_engine_overrides_it() -> None:
    def chosen(engine_args: dict[str, Any], device: str) -> object:
        config = SGLangConfig(engine_args=engine_args)
        found = server_args(config, Path("model"), device=device, random_seed=0, needs=EngineNeeds())
        return found.get("attention_backend")

    assert chosen({}, "cpu") == ATTENTION_BACKEND
    assert chosen({"attention_backend": "torch_native"}, "cpu") == "torch_native"
    assert chosen({}, "cuda") is None


def test_the_slot_before_an_extension_is_found_without_a_kernel(make_driver: Any) -> None:
    """SGLang asks for it where a page has more than one slot."""
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    from rollout.sglang.cpu.srt_platform import last_slots

    table = torch.arange(60, dtype=torch.int32).view(3, 20)
    rows, prefixes = torch.tensor([2, 0, 1]), torch.tensor([20, 0, 7])
    assert last_slots(table, rows, prefixes).tolist() == [59, -1, 26]
    assert last_slots(table, rows, prefixes).tolist() == get_last_loc_torch(table, rows, prefixes).tolist()
