"""Data: files of every format into prompts, every bad row reported, and a stream that resumes where it stood."""

import copy
import json
import os
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pyarrow
import pytest
from data_cases import BOS, EOS, byte_tokenizer, write_rows
from pyarrow import parquet
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

from rollout.data.arithmetic import arithmetic_problems, save_tokenizer
from rollout.data.dataset import PromptStream, load_dataset, prompts_digest
from rollout.data.turn_ends import stop_token_ids
from rollout.task_config import ArithmeticDataConfig, DataConfig, FileDataConfig
from rollout.types import Prompt


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def file_config(tmp_path, rows, *, suffix=".jsonl", heldout=None, **changes):
    train = write_rows(tmp_path / f"train{suffix}", rows)
    held = write_rows(tmp_path / f"held{suffix}", heldout or [{"question": "held?", "answer": "h"}])
    return FileDataConfig(**{"train_path": train, "eval_path": held, "chat_template": False, **changes})


ROWS = [{"question": "one?", "answer": "1"}, {"question": 'zwei, drei?\n"so"', "answer": "007"}]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_every_format_gives_the_same_prompts(tmp_path, tokenizer, suffix):
    dataset = load_dataset(file_config(tmp_path, ROWS, suffix=suffix), tokenizer)
    assert [(p.prompt_id, p.text, p.answer) for p in dataset.train] == [
        (0, "one?", "1"),
        (1, 'zwei, drei?\n"so"', "007"),
    ]
    assert dataset.train[0].token_ids == [BOS, *tokenizer("one?", add_special_tokens=False)["input_ids"]]
    assert tokenizer.decode(dataset.train[1].token_ids, skip_special_tokens=True) == ROWS[1]["question"]
    assert [(p.prompt_id, p.text) for p in dataset.heldout] == [(0, "held?")]


def test_instruction_and_chat_template(tmp_path, tokenizer):
    config = file_config(tmp_path, ROWS, chat_template=True, instruction="Think.")
    prompt = load_dataset(config, tokenizer).train[0]
    assert prompt.text == "[user]one? Think.[assistant]"
    # The template writes its own special tokens: no second <bos>.
    assert prompt.token_ids == tokenizer("[user]one? Think.[assistant]", add_special_tokens=False)["input_ids"]
    plain = load_dataset(replace(config, chat_template=False), tokenizer).train[0]
    assert plain.text == "one? Think."
    assert plain.token_ids[0] == BOS


def test_chat_messages_and_a_nested_answer(tmp_path, tokenizer):
    """The layout of DAPO's parquet files."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one?"}]
    rows = [{"prompt": messages, "reward_model": {"ground_truth": "1", "style": "rule"}}]
    changes = {"prompt_key": "prompt", "answer_key": "reward_model.ground_truth", "chat_template": True}
    config = file_config(tmp_path, rows, suffix=".parquet", heldout=rows, **changes)
    prompt = load_dataset(config, tokenizer).train[0]
    assert (prompt.text, prompt.answer) == ("[system]Be brief.[user]one?[assistant]", "1")


def test_numbers_become_text_without_a_decimal_point(tmp_path, tokenizer):
    answers = [42, 27.0, 2.5, -3]
    rows = [{"question": f"q{answer}", "answer": answer} for answer in answers]
    dataset = load_dataset(file_config(tmp_path, rows), tokenizer)
    assert [prompt.answer for prompt in dataset.train] == ["42", "27", "2.5", "-3"]


@pytest.mark.scenario(29)
def test_all_bad_rows_of_both_files_are_reported_together(tmp_path, tokenizer):
    rows = [
        {"question": "fine?", "answer": "1"},
        {"question": "", "answer": "2"},
        {"question": "x" * 50, "answer": "3"},
        {"answer": "4"},
        {"question": "no answer"},
        {"question": "  \n", "answer": "6"},
        {"question": "blank", "answer": " "},
    ]
    heldout = [{"question": "fine?", "answer": "1"}, {"question": "n", "answer": None}]
    config = file_config(tmp_path, rows, heldout=heldout, max_prompt_tokens=20)
    with pytest.raises(ValueError) as caught:
        load_dataset(config, tokenizer)
    train, held = config.train_path, config.eval_path
    assert str(caught.value).splitlines() == [
        f"data.train_path must have rows that can be used, got '{train}'. 6 rows cannot be used:",
        f"{train}, line 2: question is empty",
        f"{train}, line 3: 51 prompt tokens, more than data.max_prompt_tokens=20",
        f"{train}, line 4: question is missing",
        f"{train}, line 5: answer is missing",
        f"{train}, line 6: question is empty",
        f"{train}, line 7: answer must be text or a finite number, got ' '",
        "Mend them, or leave them out with data.on_bad_row=skip. 1 prompt is too long: "
        "data.max_prompt_tokens=51 would take the longest.",
        f"data.eval_path must have rows that can be used, got '{held}'. 1 row cannot be used:",
        f"{held}, line 2: answer is missing",
        "Mend them, or leave them out with data.on_bad_row=skip.",
    ]


def test_further_evaluation_sets_are_read_alike(tmp_path, tokenizer):
    config = file_config(tmp_path, ROWS)
    easy = write_rows(tmp_path / "easy.jsonl", [{"question": f"{n}+{n}?", "answer": str(2 * n)} for n in (2, 3)])
    bad = write_rows(tmp_path / "bad.csv", [{"question": "", "answer": "4"}, {"question": "3+3?", "answer": ""}])
    prompts = load_dataset(config, tokenizer, eval_sets={"easy": easy}).eval_sets["easy"]
    assert [(prompt.text, prompt.answer) for prompt in prompts] == [("2+2?", "4"), ("3+3?", "6")]
    assert prompts_digest(prompts) != prompts_digest(prompts[::-1])
    with pytest.raises(
        ValueError, match=r"(?s)^eval\.sets\.bad must .*bad\.csv'\. 2 rows cannot be used:.*row 1.*row 2"
    ):
        load_dataset(config, tokenizer, eval_sets={"easy": easy, "bad": bad})
    with pytest.raises(ValueError, match=r"eval\.sets must be empty with data=arithmetic, got \{'easy'"):
        load_dataset(ArithmeticDataConfig(), tokenizer, eval_sets={"easy": easy})


def test_at_most_twenty_bad_rows_are_listed(tmp_path, tokenizer):
    rows = [{"question": "", "answer": "1"}] * 33
    with pytest.raises(ValueError, match="33 rows") as caught:
        load_dataset(file_config(tmp_path, rows), tokenizer)
    lines = str(caught.value).splitlines()
    assert len(lines) == 23
    assert lines[-2] == "and 13 more"
    assert lines[-1] == "No row is good: mend them."


def test_prompts_that_are_too_long_take_three_lines_and_name_the_length_that_takes_them(tmp_path, tokenizer):
    rows = [{"question": "x" * (30 + number), "answer": "1"} for number in range(9)] + [{"question": "", "answer": "1"}]
    with pytest.raises(ValueError, match="10 rows") as caught:
        load_dataset(file_config(tmp_path, rows, max_prompt_tokens=20), tokenizer)
    lines = str(caught.value).splitlines()
    assert [line.rpartition("line ")[2].partition(":")[0] for line in lines[1:-2]] == ["1", "2", "3", "10"]
    assert lines[-2] == "and 6 more"
    assert lines[-1].endswith("9 prompts are too long: data.max_prompt_tokens=39 would take the longest.")


def test_bad_values_name_what_is_wrong(tmp_path, tokenizer):
    rows = [
        {"question": [{"role": "user"}], "answer": "1"},
        {"question": [], "answer": "1"},
        {"question": [{"role": "user", "content": " "}], "answer": "1"},
        {"question": [{"role": "user", "content": "x"}, {"role": "tool", "content": "x"}], "answer": "1"},
        {"question": [{"role": "user", "content": "x"}], "answer": ""},
    ]
    with pytest.raises(ValueError, match="5 rows") as caught:
        load_dataset(file_config(tmp_path, rows), tokenizer)
    problems = [line.partition(": ")[2] for line in str(caught.value).splitlines()[1:-1]]
    assert problems[0].startswith("question has a chat message without role or content")
    assert problems[1:] == [
        "question must be text or a list of chat messages, got []",
        "question is empty",
        "the chat template refuses the messages: no tools here",
        "answer is missing",
    ]


@pytest.mark.scenario(29)
def test_files_that_cannot_be_read_are_named(tmp_path, tokenizer):
    config = file_config(tmp_path, ROWS)
    for key, hint in (("target", r"\n"), ("anwser", r" Did you mean answer\?")):
        said = rf"train\.jsonl: data\.answer_key={key} is not a column; columns are question, answer\.{hint}"
        with pytest.raises(ValueError, match=said):
            load_dataset(replace(config, answer_key=key), tokenizer)
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"question": "a", "answer": "b"}\n{"question": \n', encoding="utf-8")
    for line, said in (
        ('{"question": x}', "Expecting value, at character 14"),
        ('{"question": "ab', "the line ends too early: a text, a list or an object is not closed, at character 17"),
        ('{"question": "a" "answer"}', "Expecting ',' delimiter, at character 18"),
    ):
        broken.write_text(f'{{"question": "a", "answer": "b"}}\n{line}\n', encoding="utf-8")
        with pytest.raises(ValueError, match=re.escape(f"broken.jsonl, line 2: is not JSON: {said}")):
            load_dataset(replace(config, train_path=str(broken)), tokenizer)
    for name, content in (
        ("empty.jsonl", ""),
        ("blank.jsonl", "\n"),
        ("empty.json", "[]"),
        ("empty.csv", "question,answer\n"),
    ):
        (tmp_path / name).write_text(content, encoding="utf-8")
        with pytest.raises(ValueError, match=rf"{name} (has no rows|could not be read: .*no data)"):
            load_dataset(replace(config, train_path=str(tmp_path / name)), tokenizer)
    for name, content, said in (
        (
            "twice.csv",
            "question,answer,question\na,b,c\n",
            "two columns of the name question. Rename one",
        ),
        (
            "marks.csv",
            "question;answer\na;b\n",
            r"question;answer\. The columns of a \.csv file are",
        ),
    ):
        (tmp_path / name).write_text(content, encoding="utf-8")
        for given in (config, replace(config, prompt_key="question", answer_key="answer")):
            with pytest.raises(ValueError, match=said):
                load_dataset(replace(given, train_path=str(tmp_path / name)), tokenizer)
    twice = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 3, names=["question", "answer", "answer"])
    parquet.write_table(twice, tmp_path / "twice.parquet")
    with pytest.raises(ValueError, match="two columns of the name answer"):
        load_dataset(replace(config, train_path=str(tmp_path / "twice.parquet")), tokenizer)
    (tmp_path / "rows.pkl").write_text("x", encoding="utf-8")
    with pytest.raises(ValueError, match=r"suffix must be one of \.jsonl, \.json, \.csv, \.parquet, got '\.pkl'"):
        load_dataset(replace(config, train_path=str(tmp_path / "rows.pkl")), tokenizer)
    with pytest.raises(ValueError, match="data must be arithmetic or file, got ''"):
        load_dataset(DataConfig(), tokenizer)


def test_a_changed_file_is_read_anew(tmp_path, tokenizer):
    config = file_config(tmp_path, ROWS)
    load_dataset(config, tokenizer)
    write_rows(Path(config.train_path), [{"question": "two?", "answer": "1"}, *ROWS[1:]])
    assert load_dataset(config, tokenizer).train[0].text == "two?"


@pytest.mark.scenario(30)
def test_a_missing_chat_template_is_one_error(tmp_path):
    save_tokenizer(tmp_path / "plain")
    plain = AutoTokenizer.from_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match=r"^data\.chat_template must be false .* tokenizer has no chat template"):
        load_dataset(file_config(tmp_path, ROWS, chat_template=True), plain)


def test_named_templates_without_a_default_are_none(tmp_path, tokenizer):
    named = copy.deepcopy(tokenizer)
    named.chat_template = {"tool_use": "{{ messages[0].content }}"}
    with pytest.raises(ValueError, match=r"no chat template that is the default.* tool_use as chat_template.jinja"):
        load_dataset(file_config(tmp_path, ROWS, chat_template=True), named)
    assert load_dataset(file_config(tmp_path, ROWS, chat_template=False), named).train
    named.chat_template |= {"default": "{{ messages[0].content * 2 }}"}
    found = load_dataset(file_config(tmp_path, ROWS, chat_template=True), named)
    assert [each.text for each in found.train] == [row["question"] * 2 for row in ROWS]


def test_the_built_in_task(tmp_path):
    save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    dataset = load_dataset(ArithmeticDataConfig(), tokenizer)
    problems = arithmetic_problems()
    assert len(dataset.heldout) == 200
    for prompts, expected in ((dataset.train, problems.train), (dataset.heldout, problems.heldout)):
        assert [(prompt.text, prompt.answer) for prompt in prompts] == [(p.prompt, p.answer) for p in expected]
        assert [prompt.prompt_id for prompt in prompts] == list(range(len(prompts)))
        assert all(tokenizer.decode(prompt.token_ids) == prompt.text for prompt in prompts)


@pytest.mark.skipif("PARITY_TEST_DATA" not in os.environ, reason="PARITY_TEST_DATA is not set")
def test_real_gsm8k_rows(tokenizer):
    root = Path(os.environ["PARITY_TEST_DATA"]) / "gsm8k"
    config = FileDataConfig(
        train_path=str(root / "train.jsonl"), eval_path=str(root / "test.jsonl"), max_prompt_tokens=2048
    )
    dataset = load_dataset(config, tokenizer)
    assert (len(dataset.train), len(dataset.heldout)) == (7473, 1319)
    first = dataset.heldout[0]
    assert first.text.startswith("[user]Janet\u2019s ducks lay 16 eggs per day.")
    assert first.answer.endswith("#### 18")
    assert tokenizer.decode(first.token_ids) == first.text


@pytest.mark.parametrize(
    ("listed", "expected"),
    [(None, (EOS,)), (3, (3, EOS)), ([9, EOS, 3], (3, 9, EOS)), ("absent", (EOS,))],
)
def test_stop_token_ids(tmp_path, tokenizer, listed, expected):
    if listed != "absent":
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}), encoding="utf-8")
    assert stop_token_ids(tokenizer, tmp_path) == expected


@pytest.mark.scenario(30)
def test_a_model_without_any_stop_token_is_refused(tmp_path):
    from transformers import PreTrainedTokenizerFast

    endless = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocab={"a": 0})))
    with pytest.raises(ValueError, match="names no end-of-sequence token: set eos_token in tokenizer_config"):
        stop_token_ids(endless, tmp_path)


def make_prompts(count):
    return [Prompt(prompt_id=index, token_ids=[index], text=str(index), answer=str(index)) for index in range(count)]


def ids(prompts):
    return [prompt.prompt_id for prompt in prompts]


def test_every_epoch_is_a_new_permutation():
    stream = PromptStream(make_prompts(20), seed=3)
    taken = ids(stream.take(60))
    epochs = [taken[:20], taken[20:40], taken[40:]]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in [*epochs, list(range(20))]}) == 4
    assert ids(PromptStream(make_prompts(20), seed=3).take(60)) == taken
    assert ids(PromptStream(make_prompts(20), seed=4).take(20)) != taken[:20]


def test_the_size_of_the_takes_does_not_change_the_order():
    whole = ids(PromptStream(make_prompts(7), seed=0).take(40))
    stream = PromptStream(make_prompts(7), seed=0)
    pieces = [ids(stream.take(size)) for size in (1, 2, 7, 0, 11, 19)]
    assert [index for piece in pieces for index in piece] == whole
    assert max(Counter(whole).values()) - min(Counter(whole).values()) <= 1


@pytest.mark.parametrize("before", [0, 3, 7, 8, 25])
def test_a_stream_resumes_where_it_stood(before):
    stream = PromptStream(make_prompts(7), seed=5)
    stream.take(before)
    state = json.loads(json.dumps(stream.state_dict()))
    expected = ids(stream.take(30))
    resumed = PromptStream(make_prompts(7), seed=5)
    resumed.take(2)
    resumed.load_state_dict(state)
    assert ids(resumed.take(30)) == expected


@pytest.mark.scenario(8)
def test_a_stream_over_other_data_or_another_seed_does_not_resume():
    state = PromptStream(make_prompts(7), seed=5).state_dict()
    changed = make_prompts(7)
    changed[3].answer = "other"
    moved = make_prompts(7)
    moved[6].prompt_id = 7  # a blank line before it: responses under way are of the prompts with their ids
    for prompts, seed in ((make_prompts(8), 5), (make_prompts(7), 6), (changed, 5), (moved, 5)):
        with pytest.raises(ValueError, match=r"other data or another run\.seed: saved seed 5"):
            PromptStream(prompts, seed=seed).load_state_dict(state)
    with pytest.raises(ValueError, match="no training prompts"):
        PromptStream([], seed=0)
