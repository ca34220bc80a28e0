"""Ends of turns: what the template writes after an answer against what ends a response."""

import json

import numpy as np
import pytest
from data_cases import EOS, byte_tokenizer, write_rows

from algorithms.config import ConfigError
from rollout.collect.collect_stats import CollectStats
from rollout.config import SamplingConfig
from rollout.data.data_files import DataError
from rollout.data.dataset import load_dataset
from rollout.data.turn_ends import past_end_note, stop_token_ids
from rollout.task_config import FileDataConfig
from rollout.types import FinishReason, Prompt, Sample, SampleGroup

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
START, END = 258, 259


@pytest.fixture
def base_model(tmp_path):
    """The tokenizer of a base model with ChatML: its end of a sequence is not the end of a turn."""
    tokenizer = byte_tokenizer(tmp_path)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    return tokenizer


def turn_end(tmp_path, tokenizer, question="2+3?", **changes):
    source = write_rows(tmp_path / "rows.jsonl", [{"question": question, "answer": "5"}])
    return load_dataset(FileDataConfig(train_path=source, eval_path=source, **changes), tokenizer).turn_end


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CHATML, END),
        ("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}", EOS),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", None),
        # The last answer ends with another token than earlier ones, as in gpt-oss.
        (CHATML.replace("<|im_end|>", "{{ eos_token if loop.last else '<|im_end|>' }}"), EOS),
        # The next turn's first token ends the answer, as in GLM.
        ("{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}", START),
        ("{{ messages[0].content }}{% if messages|length > 1 %}{{ raise_exception('one turn') }}{% endif %}", None),
        ("{% if messages|length > 2 %}{{ raise_exception('one answer') }}{% endif %}" + CHATML, END),
    ],
)
def test_the_token_that_the_template_writes_after_an_answer(tmp_path, base_model, template, end):
    base_model.chat_template = template
    assert turn_end(tmp_path, base_model) == end
    assert turn_end(tmp_path, base_model, chat_template=False) is None
    written = "<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n"
    assert turn_end(tmp_path, base_model, written, chat_template=False) == end


def test_a_token_that_is_not_marked_as_special_ends_a_turn_too(tmp_path):
    tokenizer = byte_tokenizer(tmp_path)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.chat_template = CHATML
    assert turn_end(tmp_path, tokenizer) == END


def test_a_tag_that_closes_a_part_of_an_answer_ends_no_turn(tmp_path, base_model):
    base_model.add_tokens(["</answer>"])
    tagged = "{{ m.content }}{% if m.role == 'assistant' %}</answer>{% endif %}"
    base_model.chat_template = CHATML.replace("{{ m.content }}", tagged)
    assert turn_end(tmp_path, base_model) == END


def test_a_template_that_needs_a_system_message_is_asked_with_one(tmp_path, base_model):
    base_model.chat_template = (
        "{% if messages[0].role != 'system' %}{{ raise_exception('system') }}{% endif %}" + CHATML
    )
    asked = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+3?"}]
    assert turn_end(tmp_path, base_model, asked) == END


def test_a_template_with_a_date_gives_the_same_prompts_on_another_day(tmp_path, base_model):
    """As those of Llama 3.2, Mistral and gpt-oss: a checkpoint knows the digest of its prompts."""
    base_model.chat_template = "{{ strftime_now('%d %b %Y') }}" + CHATML
    source = write_rows(tmp_path / "rows.jsonl", [{"question": "2+3?", "answer": "5"}])
    data = load_dataset(FileDataConfig(train_path=source, eval_path=source), base_model)
    assert data.train[0].text.startswith("26 Jul 2024<|im_start|>")
    assert any("26 Jul 2024 on every day" in note for note in data.notes)


def test_a_template_that_begins_no_answer_is_told(tmp_path, base_model):
    source = write_rows(tmp_path / "rows.jsonl", [{"question": "2+3?", "answer": "5"}])
    config = FileDataConfig(train_path=source, eval_path=source)
    assert not any("no beginning of an answer" in note for note in load_dataset(config, base_model).notes)
    base_model.chat_template = CHATML.partition("{% if add")[0]
    notes = load_dataset(config, base_model).notes
    assert any("prompts end with <|im_end|>: the chat template writes no beginning" in note for note in notes)


def test_stop_names_tokens_and_ids(tmp_path, base_model):
    assert stop_token_ids(base_model, tmp_path, stop=["<|im_end|>", 7]) == (7, EOS, END)
    with pytest.raises(DataError) as caught:
        stop_token_ids(base_model, tmp_path, stop=["<|im_ends|>", 9999, "two bytes"])
    texts = [str(problem) for problem in caught.value.problems]
    assert len(texts) == 3 and all(text.startswith("sampling.stop must name tokens of the model") for text in texts)
    assert "Did you mean <|im_end|>?" in texts[0]
    for wrong in ([""], [True], [0.5], [["<|im_end|>"]]):
        with pytest.raises(ConfigError, match=r"stop must list texts of one token, or token ids"):
            SamplingConfig(stop=wrong)


def test_ends_that_config_json_names_count_as_with_sglang(tmp_path, base_model):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": END, "text_config": {"eos_token_id": [START]}}))
    assert stop_token_ids(base_model, tmp_path) == (EOS, START, END)


def test_the_note_names_the_token_and_the_way_out(base_model):
    note = past_end_note(END, base_model)
    assert "ends an answer with <|im_end|>" in note and "sampling.stop=['<|im_end|>']" in note


def sample(*response, mask=None):
    ids = [1, *response]
    mask = [False, *(mask or [True] * len(response))]
    return Sample(
        prompt_id=0, sample_index=0, token_ids=ids, response_mask=mask, rollout_logprobs=np.zeros(len(ids)),
        token_versions=np.zeros(len(ids)), finish_reason=FinishReason.stop, reward=0.0, correct=False,
    )  # fmt: skip


def test_responses_that_go_on_after_the_end_of_their_turn_are_counted():
    tool_wrote_it = sample(5, END, 6, mask=[True, False, True])
    turns = sample(5, END, 7, 6, END, 7, 6, END, mask=[True, True, False, True, True, False, True, True])
    samples = [sample(5, END, 6, EOS), sample(5, 6, EOS), turns, tool_wrote_it]
    group = SampleGroup(prompt=Prompt(prompt_id=0, token_ids=[1], text="", answer=""), samples=samples)
    assert CollectStats(kept=[group], past_end=END).metrics()["rollout/past_end_frac"] == 0.25
    assert CollectStats(kept=[group]).metrics()["rollout/past_end_frac"] is None
