"""The decoder against the model's own forward without a cache: prompts of several lengths, then single tokens."""

import json

import pytest
import torch
from tiny_model import VOCAB_SIZE, write_tiny_model
from transformers import AutoModelForCausalLM, PretrainedConfig

from rollout.engine import EngineError
from rollout.model.limits import altered_logits, check_attention
from rollout.torch.config import TorchEngineConfig
from rollout.torch.engine import TorchEngine
from rollout.torch.kv_cache import SLOT_ATTENTION, KVSlots, Prefill, Step
from rollout.torch.model import Decoder

TOLERANCE = 1e-5
"""Largest difference of a float32 logit."""
PROMPTS = [[5, 9, 11, 40, 3], [7], [20, 21, 22]]
PROMPT_OF_SLOT = [0, 0, 1, 2]
NUM_STEPS = 90
"""More than the columns that memory starts with, so that it has to grow."""


def load(path, model_type="qwen2", *, tied=True, seed=0):
    write_tiny_model(path, model_type=model_type, tied=tied, seed=seed)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=SLOT_ATTENTION)
    return model.eval().requires_grad_(False)


def plain_logits(path, sequences):
    """[N, V] after the last token of each sequence, one forward per sequence without cache, padding or slots."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        return torch.stack([model(input_ids=torch.tensor([each]), use_cache=False).logits[0, -1] for each in sequences])


def read_prompts(decoder, slots):
    longest = max(map(len, PROMPTS))
    padded = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in PROMPTS])
    lengths = torch.tensor([len(prompt) for prompt in PROMPTS])
    prompt_of_slot = torch.tensor(PROMPT_OF_SLOT)
    forward = Prefill(slots, first_slot=0, prompt_of_slot=prompt_of_slot, longest=longest)
    with torch.inference_mode():
        return decoder.prefill(padded, lengths, forward).logits[prompt_of_slot]


def read_tokens(decoder, slots, tokens, positions):
    with torch.inference_mode():
        forward = Step(slots, positions=positions, longest=int(positions.max()) + 1, dtype=decoder.dtype)
        return decoder.step(tokens, positions, forward).logits


@pytest.mark.parametrize(("model_type", "tied"), [("qwen2", True), ("llama", False), ("qwen3", False)])
def test_logits_are_those_of_the_models_own_forward(tmp_path, model_type, tied):
    decoder = Decoder(load(tmp_path, model_type, tied=tied))
    slots = KVSlots(num_slots=6, max_columns=200)
    sequences = [list(PROMPTS[index]) for index in PROMPT_OF_SLOT]
    logits = [read_prompts(decoder, slots)]
    drawn = torch.randint(VOCAB_SIZE, (NUM_STEPS, len(sequences)), generator=torch.Generator().manual_seed(1))
    compared = {0: list(map(list, sequences))}
    for step, tokens in enumerate(drawn, start=1):
        positions = torch.tensor([len(sequence) for sequence in sequences])
        for sequence, token in zip(sequences, tokens.tolist(), strict=True):
            sequence.append(token)
        logits.append(read_tokens(decoder, slots, tokens, positions))
        if step in (1, 2, NUM_STEPS):
            compared[step] = list(map(list, sequences))
    for step, seen in compared.items():
        assert (logits[step] - plain_logits(tmp_path, seen)).abs().max() < TOLERANCE


@pytest.mark.parametrize("positions", [[5, 5, 1, 3], [5, 5, 5, 5]])
def test_half_precision_is_attended_to_in_float32_on_a_cpu(positions):
    """With a mask and without: attention to what was stored, no more rounded than its inputs and its output."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(4, heads, 6, 8, generator=generator).bfloat16() for heads in (4, 2, 2))
    slots = KVSlots(num_slots=4, max_columns=20)
    Prefill(slots, first_slot=0, prompt_of_slot=torch.arange(4), longest=5).attend(
        0, *(tensor[:, :, :5] for tensor in (query, key, value)), None
    )
    assert {memory.dtype for memory in slots.reserve(0, key, key, columns=5)} == {torch.bfloat16}
    step = Step(slots, positions=torch.tensor(positions), longest=6, dtype=torch.bfloat16)
    found = step.attend(0, *(tensor[:, :, 5:] for tensor in (query, key, value)), None)
    assert found.dtype == torch.bfloat16
    for row, position in enumerate(positions):
        keys, values = (
            torch.cat([tensor[row, :, :position], tensor[row, :, 5:]], dim=1).float() for tensor in (key, value)
        )
        scores = query[row, :, 5:].float() @ keys.repeat_interleave(2, 0).mT * 8**-0.5
        expected = scores.softmax(-1) @ values.repeat_interleave(2, 0)
        assert torch.equal(found[row], expected.bfloat16())


def test_moved_slots_go_on_as_if_nothing_had_happened(tmp_path):
    decoder = Decoder(load(tmp_path))
    slots = KVSlots(num_slots=4, max_columns=40)
    read_prompts(decoder, slots)
    with torch.inference_mode():
        slots.move(torch.tensor([3]), torch.tensor([0]), columns=3)
    logits = read_tokens(decoder, slots, torch.tensor([8, 8, 8]), torch.tensor([3, 5, 1]))
    expected = plain_logits(tmp_path, [[*PROMPTS[2], 8], [*PROMPTS[0], 8], [*PROMPTS[1], 8]])
    assert (logits - expected).abs().max() < TOLERANCE


def test_a_decoder_takes_new_weights_from_its_model(tmp_path):
    model = load(tmp_path / "old")
    decoder, new = Decoder(model), write_tiny_model(tmp_path / "new", seed=9)
    with torch.no_grad():
        for (_, mine), (_, theirs) in zip(model.named_parameters(), new.named_parameters(), strict=True):
            mine.copy_(theirs)
    logits = read_prompts(decoder, KVSlots(num_slots=4, max_columns=20))
    expected = plain_logits(tmp_path / "new", [PROMPTS[index] for index in PROMPT_OF_SLOT])
    assert (logits - expected).abs().max() < TOLERANCE


def test_a_window_shorter_than_the_sequences_is_refused(tmp_path):
    model = load(tmp_path)
    model.model.layers[0].self_attn.sliding_window = 4
    with pytest.raises(ValueError, match="sequences of 5 tokens exceed the model's sliding window of 4"):
        read_prompts(Decoder(model), KVSlots(num_slots=4, max_columns=20))


def test_a_model_whose_logits_are_altered_behind_the_head_is_refused(tmp_path):
    write_tiny_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"logit_scale": 0.5}))
    engine = TorchEngine(TorchEngineConfig(), index=0, device="cpu", num_threads=None)
    with pytest.raises(EngineError, match=r"start: .*: logit_scale=0\.5 in config\.json is not supported"):
        engine.start(tmp_path)


@pytest.mark.parametrize("field", ["final_logit_softcapping", "logit_scale", "logits_scaling"])
def test_each_change_of_logits_behind_the_head_is_known(field):
    assert altered_logits(PretrainedConfig(**{field: 0.5})) == f"{field}=0.5"
    assert altered_logits(PretrainedConfig(**{field: 1.0})) is None


@pytest.mark.parametrize("option", ["softcap", "s_aux"])
def test_capped_attention_and_attention_sinks_are_refused(option):
    with pytest.raises(ValueError, match=f"this attention does not support {option}"):
        check_attention({option: torch.ones(2)}, longest=5, name="this")
