"""Data sources: layouts recognised, duplicates and contradictions out, bad rows skipped on request, hub data sets."""

import bz2
import copy
import gzip
import json
import lzma
import os
import zipfile
from collections import defaultdict
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from data_cases import byte_tokenizer, write_rows
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from algorithms.config import ConfigError
from rollout.data import chat_template
from rollout.data.data_files import MAX_LINE_BYTES, plain, read_rows
from rollout.data.data_layouts import choose_columns
from rollout.data.dataset import bad_rows_text, load_dataset, prompts_digest
from rollout.data.file_prompts import UNJUDGED, Row, SourceReport, file_prompts, remove_duplicates, same_answer_key
from rollout.task_config import FileDataConfig, OnBadRow

REAL = pytest.mark.skipif("PARITY_TEST_DATA" not in os.environ, reason="PARITY_TEST_DATA is not set")
CONFIG = FileDataConfig(train_path="a/b@train", eval_path="a/b@test", chat_template=False)
MESSAGES = [{"role": "user", "content": "Solve step by step.\n1+1?"}]
VERL = {
    "data_source": "math_dapo",
    "prompt": MESSAGES,
    "reward_model": {"ground_truth": "2", "style": "rule"},
    "extra_info": {"index": 7},
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def real(name):
    return str(Path(os.environ["PARITY_TEST_DATA"]) / name)


@pytest.mark.parametrize(
    ("row", "name", "prompt", "answer", "others"),
    [
        (VERL, "verl", MESSAGES, "2", {"data_source", "reward_model", "extra_info"}),
        ({"prompt": "p", "label": "l", "metadata": {}}, "slime/OpenRLHF", "p", "l", {"metadata"}),
        ({"question": "q", "answer": "a"}, "GSM8K", "q", "a", set()),
        ({"id": 1, "problem": "p", "answer": 3, "url": "u"}, "MATH", "p", 3, {"id", "url"}),
        # Both name the same, so either will do.
        ({"problem": "p", "question": "p", "answer": "a"}, "GSM8K", "p", "a", {"problem"}),
        # A label that nobody filled in is no layout.
        ({**VERL, "label": None}, "verl", MESSAGES, "2", {"data_source", "reward_model", "extra_info", "label"}),
    ],
)
def test_layouts_are_recognised(row, name, prompt, answer, others):
    columns = choose_columns([row], CONFIG, source="f")
    assert (columns.name, columns.prompt(row), columns.answer(row)) == (name, prompt, answer)
    assert set(columns.others(row)) == others


def test_given_keys_come_first_and_leave_the_rest_to_be_recognised():
    row = {"question": "q", "prompt": "p", "label": "l", "answer": "a"}
    with pytest.raises(
        ValueError, match=r"f: the columns fit several layouts \(layout slime.*; layout GSM8K.*data\.prompt_key"
    ):
        choose_columns([row], CONFIG, source="f")
    columns = choose_columns([row], replace(CONFIG, prompt_key="question", answer_key="label"), source="f")
    assert (columns.prompt(row), columns.answer(row), str(columns)) == (
        "q", "l", "keys as given: prompt from question, answer from label",
    )  # fmt: skip
    mixed = [{"question": "q", "answer": "a"}, {"problem": "p", "answer": "a"}]
    with pytest.raises(ValueError, match="give all rows of a source the same columns"):
        choose_columns(mixed, CONFIG, source="f")
    half = {"text": "t", "label": "l"}
    assert choose_columns([half], replace(CONFIG, prompt_key="text"), source="f").answer(half) == "l"
    with pytest.raises(
        ValueError, match=r"no known layout has the columns a, b\. .*data\.prompt_key and data\.answer_key"
    ):
        choose_columns([{"a": 1, "b": 2}], CONFIG, source="f")
    with pytest.raises(ValueError, match=r"data\.answer_key is not, and .* Set data\.answer_key too"):
        choose_columns([{"a": "1", "b": "2"}], replace(CONFIG, prompt_key="a"), source="f")
    with pytest.raises(ValueError, match=r"data\.prompt_key=a\+c is not a column; columns are a, b"):
        choose_columns([{"a": "1", "b": "2"}], replace(CONFIG, prompt_key="a+c", answer_key="b"), source="f")


def test_a_prompt_that_would_hold_its_answer_is_refused():
    with pytest.raises(ValueError, match=r"data\.prompt_key=q\+a puts the answer"):
        choose_columns([{"q": "1", "a": "1"}], replace(CONFIG, prompt_key="q+a", answer_key="a"), source="f")


def test_a_prompt_over_two_columns():
    row = {"Body": "Two apples. ", "Question": "How many?", "Answer": 2.0}
    columns = choose_columns([row], replace(CONFIG, prompt_key="Body+Question", answer_key="Answer"), source="f")
    assert columns.prompt(row) == "Two apples. How many?"
    assert columns.prompt({"Body": None}) is None
    assert columns.prompt({"Body": "x", "Question": 5}) == "x 5"
    for no_text in (True, float("nan"), [], [{"role": "user", "content": "x"}], {"a": True}):
        assert columns.prompt({"Body": "x", "Question": no_text}) == ("x", no_text), "no prompt, and named as such"
    assert columns.others(row) == {}
    choices = {"Body": "Two apples. ", "Question": ["(A) 2", "(B) 3"], "Answer": "A"}
    assert columns.prompt(choices) == "Two apples.\n(A) 2\n(B) 3"
    assert columns.prompt({**choices, "Question": [1, 2.5]}) == "Two apples.\nA. 1\nB. 2.5", "which the answer names"
    assert columns.prompt({**choices, "Question": {"text": ["A man", "A dog"]}}) == "Two apples.\nA. A man\nB. A dog"
    for other in ("C", "2", 1, None, ["A"]):
        assert columns.prompt({**choices, "Question": ["1", "2"], "Answer": other}) == "Two apples.\n1\n2"
    assert columns.prompt({**choices, "Question": {"A": "2", "B": 3, "C": None}}) == "Two apples.\nA. 2\nB. 3"
    # A column that really is named so wins.
    named = choose_columns([{"a+b": "x", "c": "y"}], replace(CONFIG, prompt_key="a+b", answer_key="c"), source="f")
    assert named.prompt({"a+b": "x", "c": "y"}) == "x"


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_part_of_a_prompt_may_be_null_and_is_counted(tmp_path, tokenizer, suffix):
    rows = [
        {"instruction": "1+1?", "input": None, "output": "2"},
        {"instruction": "Add.", "input": "2+2", "output": "4"},
        {"instruction": None, "input": None, "output": "4"},
    ]
    source = write_rows(tmp_path / f"alpaca.{suffix}", rows)
    keys = {"prompt_key": "instruction+input", "answer_key": "output", "on_bad_row": OnBadRow.skip}
    data = load_dataset(replace(CONFIG, train_path=source, eval_path=source, **keys), tokenizer)
    assert [prompt.text for prompt in data.train] == ["1+1?", "Add. 2+2"]
    assert [(bad.number, bad.problem) for bad in data.skipped][:1] == [(3, "instruction+input is missing")]
    assert f"{source}: rows with a part of instruction+input that is null: 1" in data.notes


def test_dapo_keeps_its_own_instruction(tmp_path, tokenizer):
    source = write_rows(tmp_path / "dapo.parquet", [VERL] * 3)
    text = write_rows(tmp_path / "text.jsonl", [{"question": "1+1?", "answer": "2"}])
    config = FileDataConfig(train_path=source, eval_path=source, instruction="Think.")
    with pytest.raises(
        ValueError, match=r"^data\.instruction must be '': it is appended to text, and all prompts are chat"
    ):
        load_dataset(config, tokenizer)
    data = load_dataset(replace(config, eval_path=text), tokenizer)
    assert [prompt.text for prompt in data.train] == ["[user]Solve step by step.\n1+1?[assistant]"]
    assert data.heldout[0].text == "[user]1+1? Think.[assistant]"
    assert data.notes[:4] == [
        f"{source}: layout verl: prompt from prompt, answer from reward_model.ground_truth; 3 rows, 1 prompts",
        f"{source}: columns that are in no prompt: data_source, extra_info (data.prompt_key=a+b joins two)",
        f"{source}: 2 duplicates removed (same prompt, same answer)",
        f"{source}: chat messages are used as they are, without data.instruction",
    ]
    assert data.train[0].row == {key: VERL[key] for key in ("data_source", "reward_model", "extra_info")}


PAIRS = st.lists(st.tuples(st.sampled_from("pqrs"), st.sampled_from(["1", "1.0", "2", "x"])), max_size=12)


@given(PAIRS)
def test_duplicates_and_contradictions(pairs):
    rows = [Row(number=n, prompt=p, answer=a, others={}) for n, (p, a) in enumerate(pairs, start=1)]
    report = SourceReport(source="f", columns=None)
    kept = remove_duplicates(rows, report, judgement=UNJUDGED)
    answers = defaultdict(set)
    for prompt, answer in pairs:
        answers[prompt].add(answer.removesuffix(".0"))
    agreed = [row for row in rows if len(answers[row.prompt]) == 1]
    expected = list({row.prompt: row for row in reversed(agreed)}.values())
    assert sorted(row.number for row in kept) == sorted(row.number for row in expected)
    assert [row.number for row in kept] == sorted(row.number for row in kept)
    assert report.contradictions == [row.number for row in rows if len(answers[row.prompt]) > 1]
    assert len(kept) + report.num_duplicates + len(report.contradictions) == len(rows)
    again = SourceReport(source="f", columns=None)
    assert remove_duplicates(kept, again, judgement=UNJUDGED) == kept
    assert (again.num_duplicates, again.contradictions) == (0, [])


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("one way\n#### 1,200", "another\n#### 1200", True),
        ("42", "42.00", True),
        ("0", "-0", True),
        ("#### 3", "#### 4", False),
        ("1/2", "0.5", False),
        (" x ", "x", True),
        ("7" * 40 + "1", "7" * 40 + "2", False),
    ],
)
def test_answers_are_compared_by_what_they_state(one, other, same):
    assert (same_answer_key(one) == same_answer_key(other)) is same


def test_held_out_sets_lose_duplicates_too(tmp_path, tokenizer):
    rows = [{"question": q, "answer": a} for q, a in (("a", "1"), ("b", "2"), ("a", "1"), ("b", "3"), ("c", "4"))]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    config = replace(CONFIG, train_path=path, eval_path=path)
    data = load_dataset(config, tokenizer)
    assert [prompt.prompt_id for prompt in data.train] == [prompt.prompt_id for prompt in data.heldout] == [0, 4]
    assert f"{path}: rows with contradicting answers, which are left out: 2 (line 2, 4)" in data.notes
    assert data.notes[-1] == f"{path}: 2 of its prompts are training prompts too"


@pytest.mark.scenario(29)
def test_bad_lines_of_jsonl_are_reported_together_and_skipped_on_request(tmp_path, tokenizer):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"question": "a", "answer": "1", "x": NaN}\r\n'
        b"\r\n"
        b'{"question": "b", \r\n'
        b'{"question": "c\xff", "answer": "1"}\n'
        b"[1]\n"
        b'{"question": "' + b"d" * 60 + b'", "answer": 2}\n'
        b'{"question": "e", "answer": {}}\n'
        b'{"question": "f", "answer": 5}'
    )
    config = replace(CONFIG, train_path=str(path), eval_path=str(path), max_prompt_tokens=20)
    with pytest.raises(ValueError, match="5 rows cannot be used") as caught:
        load_dataset(config, tokenizer)
    found = [line.partition(f"{path}, ")[2] for line in str(caught.value).splitlines()[1:6]]
    assert [line.partition(":")[0] for line in found] == ["line 3", "line 4", "line 5", "line 6", "line 7"]
    array = "must be a JSON object, got [1]. A file that is one JSON array ends in .json"
    problems = ("is not JSON", "is not UTF-8", array, "61 prompt tokens", "answer must be")
    for line, problem in zip(found, problems, strict=True):
        assert problem in line
    data = load_dataset(replace(config, on_bad_row=OnBadRow.skip), tokenizer)
    assert [(p.prompt_id, p.answer, p.row) for p in data.train] == [(0, "1", {"x": None}), (7, "5", {})]
    written = [json.loads(line) for line in bad_rows_text(data.skipped).splitlines()]
    assert [(row["source"], row["line"]) for row in written[:5]] == [(str(path), n) for n in (3, 4, 5, 6, 7)]
    assert written[0]["values"] == {"text": '{"question": "b",'}
    assert written[4].pop("problem").startswith("answer must be text or a finite number, got {}")
    assert written[4] == {"source": str(path), "line": 7, "values": {"question": "e", "answer": {}}}
    assert f"{path}: bad rows: 5" in data.notes


@pytest.mark.scenario(29)
def test_rows_of_strangers_are_bad_rows_with_their_line(tmp_path, tokenizer):
    """Too deep, too long, not text: each costs its own row, before anything reads it further."""
    deep = "[" * 150 + "]" * 150
    lines = [
        '{"question": "a", "answer": "1"}',
        f'{{"question": "b", "answer": "1", "x": {deep}}}',
        '{"question": "c", "answer": "1", "x": ' + "[" * 100_000,
        f"[{deep}]",
        '{"question": "d \\ud83d", "answer": "1"}',
        '{"question": "e", "answer": "\\ud83d"}',
        '{"question": [{"role": "user", "content": "f \\udc00"}], "answer": "1"}',
        '{"question": "g", "answer": ' + "9" * 5000 + "}",
        '{"question": "' + "h" * MAX_LINE_BYTES + '", "answer": "1"}',
        '{"question": "i", "answer": "' + "9" * 1_000_001 + '"}',
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\r\n".join(lines), encoding="utf-8-sig", newline="")
    config = replace(CONFIG, train_path=str(path), eval_path=str(path), on_bad_row=OnBadRow.skip)
    data = load_dataset(config, tokenizer)
    assert [(prompt.prompt_id, prompt.text) for prompt in data.train] == [(0, "a"), (9, "i")]
    problems = {row.number: str(row) for row in data.skipped}
    assert list(problems) == [2, 3, 4, 5, 6, 7, 8, 9]
    for number, problem in {
        2: "is nested more than 100 levels deep",
        3: "is not JSON that can be read",
        4: "must be a JSON object, got [[",
        5: "question is not text: half of a surrogate pair at character 3",
        6: "answer is not text: half of a surrogate pair at character 1",
        7: "question is not text",
        8: "is not JSON that can be read: Exceeds the limit",
        9: "is longer than 67,108,864 bytes",
    }.items():
        assert f"{path}, line {number}: " in problems[number] and problem in problems[number], problems[number]
    for line in bad_rows_text(data.skipped).splitlines():
        json.loads(line.encode("utf-8"))


@pytest.mark.scenario(29)
def test_answers_that_differ_at_any_digit_contradict_each_other(tmp_path, tokenizer):
    digits = "7" * 39
    answers = [f"{digits}1", f"{digits}2", f"0.{digits}1", f"0.{digits}2"]
    rows = [{"question": str(n // 2), "answer": answer} for n, answer in enumerate(answers)]
    rows += [{"question": "same", "answer": answer} for answer in (f"{digits}", f"{digits}.00")]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    data = load_dataset(replace(CONFIG, train_path=path, eval_path=path), tokenizer)
    assert [prompt.text for prompt in data.train] == ["same"]
    assert f"{path}: rows with contradicting answers, which are left out: 4 (line 1, 2, 3, 4)" in data.notes


@pytest.mark.scenario(29)
def test_a_compressed_file_is_not_unpacked(tmp_path, tokenizer):
    """`datasets` would: 200 kB become gigabytes in the driver."""
    bomb = json.dumps([{"question": "q", "answer": "1" * 20_000_000}]).encode()
    packed = {"gzip": gzip.compress(bomb), "xz": lzma.compress(bomb), "bz2": bz2.compress(bomb)}
    with zipfile.ZipFile(tmp_path / "zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("rows.json", bomb)
    packed["zip"] = (tmp_path / "zip").read_bytes()
    for kind, content in packed.items():
        for suffix in (".json", ".csv", ".parquet"):
            (tmp_path / f"{kind}{suffix}").write_bytes(content)
            with pytest.raises(ValueError, match=rf"{kind}\{suffix} must be .* and is not\. Unpack it"):
                list(read_rows(str(tmp_path / f"{kind}{suffix}")))


@pytest.mark.scenario(29)
@pytest.mark.parametrize(
    ("held", "way"),
    [
        ({"question": ["1?", "2?"], "answer": ["1", "2"]}, "list per column"),
        ({"version": 1, "data": [{"question": "1?", "answer": "1"}]}, "Rows stand under data"),
        ([{"messages": [{"role": "user", "content": "1?"}]}] * 2, "messages is a conversation"),
        ([{"conversations": [{"from": "human", "value": "1?"}]}] * 2, "conversations is a conversation"),
    ],
)
def test_rows_in_another_form_are_told_with_their_way_in(tmp_path, held, way):
    (tmp_path / "rows.json").write_text(json.dumps(held), encoding="utf-8")
    with pytest.raises(ValueError, match=way):
        choose_columns([raw.values for raw in read_rows(str(tmp_path / "rows.json"))], CONFIG, source="f")


@pytest.mark.parametrize("name", ["rows[1].json", "rows*?.csv"])
def test_a_name_is_no_pattern(tmp_path, name):
    path = write_rows(tmp_path / name, [{"question": "a", "answer": "1"}])
    write_rows(tmp_path / "rows1.json", [{"question": "another", "answer": "1"}])
    assert [row.values for row in read_rows(path)] == [{"question": "a", "answer": "1"}]


@pytest.mark.parametrize("name", ["rows.csv", "rows.json", "rows.parquet"])
def test_reading_a_file_draws_no_bar(tmp_path, name, capfd):
    import datasets

    path = write_rows(tmp_path / name, [{"question": "a", "answer": "1"}])
    datasets.enable_progress_bars()
    capfd.readouterr()
    assert [row.values for row in read_rows(path)] == [{"question": "a", "answer": "1"}]
    assert "".join(capfd.readouterr()) == ""
    assert not datasets.are_progress_bars_disabled(), "downloads keep theirs"


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "did not end within 2 s of computing",
        ),
        ("{{ 'x' * 6000000000 }}", "the chat template fails: MemoryError"),
        ("{{ 'x' * 50000000 }}", "the chat template writes 50,000,000 characters, more than"),
        ("{{ messages[0].content.nothing.at.all }}", "the chat template refuses the messages"),
    ],
)
def test_a_chat_template_has_limits(tmp_path, tokenizer, monkeypatch, template, problem):
    monkeypatch.setattr(chat_template, "TIMEOUT_S", 2.0)
    path = write_rows(tmp_path / "rows.jsonl", [{"question": "a", "answer": "1"}])
    hostile = copy.copy(tokenizer)
    hostile.chat_template = template
    config = replace(CONFIG, train_path=path, eval_path=path, chat_template=True)
    with pytest.raises(ValueError, match=problem) as caught:
        load_dataset(config, hostile)
    assert f"{path}, line 1: " in str(caught.value)


def test_skipping_everything_is_an_error(tmp_path, tokenizer):
    path = write_rows(tmp_path / "rows.jsonl", [{"question": "", "answer": "1"}])
    config = replace(CONFIG, train_path=path, eval_path=path, on_bad_row=OnBadRow.skip)
    with pytest.raises(ValueError, match=r"(?s)rows\.jsonl'\. No row is left.*, line 1: "):
        load_dataset(config, tokenizer)
    (tmp_path / "broken.jsonl").write_text("{\n{\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"broken\.jsonl, line 1: is not JSON"):
        load_dataset(replace(config, train_path=str(tmp_path / "broken.jsonl")), tokenizer)


def test_variables_reach_the_chat_template(tmp_path, tokenizer):
    path = write_rows(tmp_path / "rows.jsonl", [{"question": "a", "answer": "1"}])
    config = FileDataConfig(train_path=path, eval_path=path, chat_template_kwargs={"enable_thinking": False})
    assert load_dataset(config, tokenizer).train[0].text == "[user]a[assistant][no thoughts]"
    with pytest.raises(ValueError, match=r"data\.chat_template_kwargs\.enable_thought has no effect"):
        load_dataset(replace(config, chat_template_kwargs={"enable_thought": False}), tokenizer)
    with pytest.raises(ConfigError, match=r"chat_template_kwargs\.tokenize cannot be chosen"):
        replace(config, chat_template_kwargs={"tokenize": True})


def test_a_directory_in_the_form_of_a_hub_data_set(tmp_path, tokenizer):
    for split, text in (("train", "a"), ("test", "b")):
        write_rows(tmp_path / f"{split}.jsonl", [{"prompt": text, "label": "1"}])
    files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in ("train", "test"))
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:\n{files}---\n")
    config = replace(CONFIG, train_path=f"{tmp_path}:main@train", eval_path=f"{tmp_path}@test")
    data = load_dataset(config, tokenizer)
    assert ([p.text for p in data.train], [p.text for p in data.heldout]) == (["a"], ["b"])
    for source, problem in (("@nosuch", "Unknown split"), (":other@train", "'other' not found")):
        with pytest.raises(ValueError, match=rf"{source} could not be read: .*{problem}"):
            file_prompts(f"{tmp_path}{source}", CONFIG, tokenizer, None)


def test_a_hub_out_of_reach_names_the_way_out(monkeypatch):
    import datasets
    import huggingface_hub.constants

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    way_out = r"hf download no/such --repo-type dataset --local-dir DIR` where one can, .*use DIR:main@train"
    with pytest.raises(ValueError, match=rf"^no/such:main@train: .*{way_out}"):
        list(read_rows("no/such:main@train"))


@pytest.mark.parametrize("path", ["nosuch.jsonl", "a:b@c@d", "@train", "repo@"])
def test_what_is_neither_a_file_nor_a_split_is_refused(path):
    with pytest.raises(ConfigError, match=r"^train_path must be an existing file, or repo\[:config\]@split, got"):
        replace(CONFIG, train_path=path)


def test_rows_become_plain_json():
    import datetime

    row = {
        "n": 2**70,
        "f": float("inf"),
        "d": datetime.date(2026, 1, 2),
        "b": b"x",
        "l": [1, (None, "\ud800")],
        3: True,
    }
    assert plain(row) == {"n": str(2**70), "f": None, "d": "2026-01-02", "l": [1, [None, "?"]], "3": True}


def test_the_digest_knows_the_other_columns(tmp_path, tokenizer):
    digests = set()
    for extra in ({}, {"x": 1}, {"x": 2}):
        path = write_rows(tmp_path / "rows.jsonl", [{"question": "a", "answer": "1", **extra}])
        digests.add(prompts_digest(load_dataset(replace(CONFIG, train_path=path, eval_path=path), tokenizer).train))
    assert len(digests) == 3


@REAL
def test_real_dapo_rows_repeat_every_problem(tokenizer):
    config = replace(CONFIG, max_prompt_tokens=4000)
    with closing(chat_template.ChatTemplate(tokenizer, {})) as template:
        prompts, report = file_prompts(real("aime24/dapo_layout.parquet"), config, tokenizer, template)
    assert (len(prompts), report.num_rows, report.num_duplicates) == (30, 960, 930)
    assert (report.columns.name, report.contradictions, report.has_text) == ("verl", [], False)
    assert prompts[0].row["extra_info"]["raw_problem"] in prompts[0].text
    plain_prompts, _ = file_prompts(real("aime24/test.jsonl"), config, tokenizer, None)
    # The file writes them in three digits: 025.
    assert {int(prompt.answer) for prompt in prompts} == {int(prompt.answer) for prompt in plain_prompts}


@REAL
@pytest.mark.parametrize(
    ("name", "keys", "num_prompts", "num_duplicates", "first"),
    [
        ("svamp/test.jsonl", ("Body+Question", "Answer"), 1000, 0, "145"),
        ("mawps/multiarith.jsonl", ("input", "target"), 580, 20, "39"),
        ("mawps/singleop.jsonl", ("input", "target"), 531, 31, "14"),
        ("amc23/test.jsonl", (None, None), 40, 0, "27"),
    ],
)
def test_real_rows(tokenizer, name, keys, num_prompts, num_duplicates, first):
    config = replace(CONFIG, prompt_key=keys[0], answer_key=keys[1], max_prompt_tokens=4000)
    prompts, report = file_prompts(real(name), config, tokenizer, None)
    assert (len(prompts), report.num_duplicates, report.contradictions) == (num_prompts, num_duplicates, [])
    assert prompts[0].answer == first
    assert not report.bad


def test_a_text_that_the_tokenizer_refuses_is_a_bad_row(tmp_path):
    """A tokenizer without an unknown token raises for a sign that it has no token for."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1})))
    train = write_rows(tmp_path / "train.jsonl", [{"question": text, "answer": "1"} for text in ("a", "c", "b")])
    config = FileDataConfig(train_path=train, eval_path=train, chat_template=False)
    prompts, report = file_prompts(train, config, tokenizer, None)
    assert [prompt.token_ids for prompt in prompts] == [[0], [1]]
    [bad] = report.bad
    assert bad.number == 2 and "the tokenizer refuses the text" in bad.problem
