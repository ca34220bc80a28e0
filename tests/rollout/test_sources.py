"""Sources as other libraries and other people leave them: read as meant, or refused with the way in."""

import gzip
import json
from datetime import date
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pytest
from data_cases import BOS, EOS, byte_tokenizer, write_rows
from pyarrow import parquet

from algorithms.config import ConfigError
from rollout.data.data_files import DataError, read_rows
from rollout.data.dataset import first_row, load_dataset
from rollout.data.file_prompts import Judgement
from rollout.rewards import judgement
from rollout.task_config import FileDataConfig, OnBadRow, RewardConfig

OWN = "own.py:reward"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def config(source, **changes):
    return FileDataConfig(**{"train_path": str(source), "eval_path": str(source), "chat_template": False, **changes})


def judged(function="exact_match", *, own_rollout=False):
    return judgement(RewardConfig(function=function, num_workers=1), own_rollout=own_rollout)


def test_the_files_of_a_pattern_are_one_source(tmp_path, tokenizer):
    write_rows(tmp_path / "part-0.jsonl", [{"question": "a", "answer": "1"}, {"question": "b", "answer": ""}])
    write_rows(tmp_path / "part-1.jsonl", [{"question": "c", "answer": "3"}, {"question": "d", "answer": ""}])
    write_rows(tmp_path / "other.jsonl", [{"question": "x", "answer": "9"}])
    pattern = tmp_path / "part-*.jsonl"
    data = load_dataset(config(pattern, on_bad_row=OnBadRow.skip), tokenizer)
    assert [(each.prompt_id, each.text) for each in data.train] == [(0, "a"), (2, "c")]
    assert [str(row).partition(":")[0] for row in data.skipped[:2]] == [
        f"{tmp_path}/part-0.jsonl, line 2", f"{tmp_path}/part-1.jsonl, line 2",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"no-\*.jsonl'. No file has a name like that"):
        config(tmp_path / "no-*.jsonl")


def test_files_of_a_data_set_that_are_not_read_are_told(tmp_path, tokenizer):
    """Their names say how many there are: a copy that was cut would train on the rest."""
    names = [f"train-0000{number}-of-00003-0123456789abcdef.parquet" for number in range(3)]
    (tmp_path / "data").mkdir()
    paths = [write_rows(tmp_path / "data" / name, [{"question": name, "answer": "1"}]) for name in names]
    every = f"{tmp_path}/data/train-*-of-00003-*.parquet"

    def told(source):
        return [note for note in load_dataset(config(source), tokenizer).notes if "files of its data set" in note]

    assert told(paths[1]) == [f"{paths[1]}: 1 of 3 files of its data set; {every} names 3"]
    assert told(every) == told(f"{tmp_path}@train") == []
    Path(paths[1]).unlink()
    cut = f"2 of 3 files of its data set; of {every} these are not there: 1"
    assert told(every) == [f"{every}: {cut}"]
    assert told(f"{tmp_path}@train") == [f"{tmp_path}@train: {cut}"]


@pytest.mark.parametrize(
    ("path", "way_in"),
    [
        ("hf://datasets/openai/gsm8k/main/train.parquet", "is named like openai/gsm8k@train"),
        ("hf://datasets/openai/gsm8k@main/train.parquet", "is named like openai/gsm8k@train"),
        ("https://example.org/train.jsonl?raw=1", "Fetch the file, and name it"),
        ("s3://bucket/train.parquet", "Fetch the file, and name it"),
    ],
)
def test_an_address_is_refused_with_the_way_in(path, way_in):
    with pytest.raises(ConfigError, match=way_in):
        config(path)


def test_data_sets_that_were_saved_to_the_disk(tmp_path, tokenizer):
    rows = datasets.Dataset.from_list([{"question": "a", "answer": "1"}])
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=rows, test=rows).save_to_disk(tmp_path / "dict")
    for source in ("one@train", "dict@train", "dict@test"):
        assert [each.text for each in load_dataset(config(tmp_path / source), tokenizer).train] == ["a"]
    with pytest.raises(DataError, match=r"it has .*dict@train, .*dict@test"):
        load_dataset(config(tmp_path / "dict@validation"), tokenizer)
    with pytest.raises(ConfigError, match=r"It is a directory: name files in it, as .* or .*one@train"):
        config(tmp_path / "one")


@pytest.mark.parametrize(("kind", "columns"), [("numpy", None), ("torch", ["ids"]), ("pandas", None), ("arrow", None)])
def test_a_format_that_was_saved_changes_no_value(tmp_path, tokenizer, kind, columns):
    row = {"question": "a", "answer": 1, "share": 0.1, "ids": [1, 2], "grid": [[0.5, 1.0]], "any": {"x": [1]}}
    features = datasets.Dataset.from_list([row]).features.copy()
    features.update(grid=datasets.Array2D((1, 2), "float32"), any=datasets.Json())
    rows = datasets.Dataset.from_list([row], features=features).with_format(kind, columns)
    rows.save_to_disk(tmp_path / "saved")
    [prompt] = load_dataset(config(tmp_path / "saved@train"), tokenizer).train
    assert (prompt.answer, prompt.row) == ("1", {name: row[name] for name in ("share", "ids", "grid", "any")})


def test_a_file_without_rows_among_others_adds_none(tmp_path, tokenizer):
    """As Spark writes one for each part of a table that is empty."""
    table = pyarrow.table({"question": ["a"], "answer": ["1"]})
    for name, part in (("part-0", table.slice(0, 0)), ("part-1", table)):
        parquet.write_table(part, tmp_path / f"{name}.parquet")
    assert len(load_dataset(config(tmp_path / "part-*.parquet"), tokenizer).train) == 1


def test_numbers_are_what_was_written(tmp_path, tokenizer):
    """Short floats, decimals, exponents, and a list of one answer, in columns and in fields."""
    table = pyarrow.table({
        "question": list("abcd"),
        "answer": pyarrow.array([0.1, 1e-5, 42.0, 3.3e10], pyarrow.float32()),
        "price": pyarrow.array([Decimal("1.50"), None, Decimal("2"), Decimal("0.10")], pyarrow.decimal128(5, 2)),
        "nested": [{"gold": [{"value": 0.7}]}] * 4,
    }).cast(
        pyarrow.schema({
            "question": pyarrow.string(), "answer": pyarrow.float32(), "price": pyarrow.decimal128(5, 2),
            "nested": pyarrow.struct({"gold": pyarrow.list_(pyarrow.struct({"value": pyarrow.float16()}))}),
        })
    )  # fmt: skip
    parquet.write_table(table, tmp_path / "short.parquet")
    data = load_dataset(config(tmp_path / "short.parquet"), tokenizer, judgement=judged("gsm8k"))
    assert [each.answer for each in data.train] == ["0.1", "0.00001", "42", "33000000000"]
    assert data.train[0].row["nested"] == {"gold": [{"value": 0.7}]}
    prices = config(tmp_path / "short.parquet", prompt_key="question", answer_key="price", on_bad_row=OnBadRow.skip)
    assert [each.answer for each in load_dataset(prices, tokenizer).train] == ["1.5", "2", "0.1"]
    rows = [{"question": question, "answer": answer} for question, answer in (("a", ["34"]), ("b", [7]))]
    lists = write_rows(tmp_path / "lists.jsonl", rows)
    assert [each.answer for each in load_dataset(config(lists), tokenizer).train] == ["34", "7"]


def test_labels_of_classes_are_their_names(tmp_path, tokenizer):
    features = datasets.Features(question=datasets.Value("string"), answer=datasets.ClassLabel(names=["no", "yes"]))
    rows = datasets.Dataset.from_dict({"question": ["a", "b", "c"], "answer": [1, 0, -1]}, features=features)
    rows.save_to_disk(tmp_path / "saved")
    data = load_dataset(config(tmp_path / "saved@train", on_bad_row=OnBadRow.skip), tokenizer)
    assert [each.answer for each in data.train] == ["yes", "no"]
    assert {each.problem for each in data.skipped} == {"answer is missing"}  # -1: a row without a label, as SNLI has


def test_cells_of_csv_are_text_wherever_the_file_lies(tmp_path, tokenizer):
    (tmp_path / "csv").mkdir()
    rows = [{"question": "a", "answer": "007"}, {"question": "b", "answer": "NA"}, {"question": "c", "answer": "1"}]
    path = write_rows(tmp_path / "csv" / "train.csv", rows)
    for source in (path, tmp_path / "csv@train"):
        assert [each.answer for each in load_dataset(config(source), tokenizer).train] == ["007", "NA", "1"]
    text = Path(path).read_text(encoding="utf-8")
    for name, content in (
        ("tabs.tsv", text.replace(",", "\t").encode()),
        ("spaces.csv", text.replace(",", ", ").encode()),
        ("packed.csv.gz", gzip.compress(text.encode())),
    ):
        directory = tmp_path / name
        directory.mkdir()
        (directory / name).write_bytes(content)
        (directory / "dataset_infos.json").write_text("{}")
        assert [each.answer for each in load_dataset(config(f"{directory}@train"), tokenizer).train] == [
            "007",
            "NA",
            "1",
        ]


@pytest.mark.parametrize("rows", ["2, 3 and 4?,9\n5, 6?,11\n", "2, 3?,5\n5, 6?,11\n"], ids=["different", "alike"])
def test_commas_without_quotes_move_no_column_of_a_csv_file(tmp_path, tokenizer, rows):
    (tmp_path / "train.csv").write_text("question,answer\n" + rows)
    for source in (tmp_path / "train.csv", f"{tmp_path}@train"):
        with pytest.raises(DataError, match="could not be read: a row has more cells than the header"):
            load_dataset(config(source), tokenizer)


def test_a_comma_at_the_end_of_each_line_of_a_csv_file_adds_no_column(tmp_path, tokenizer):
    (tmp_path / "train.csv").write_text("question,answer\n2+3?,5,\n5+6?,11,\n")
    for source in (tmp_path / "train.csv", f"{tmp_path}@train"):
        data = load_dataset(config(source), tokenizer)
        assert [(each.text, each.answer) for each in data.train] == [("2+3?", "5"), ("5+6?", "11")]


def test_types_that_a_data_set_declares_hold_for_its_csv(tmp_path, tokenizer):
    features = "dataset_info:\n  features:\n  - name: question\n    dtype: string\n  - name: answer\n    dtype: int64\n"
    (tmp_path / "README.md").write_text(f"---\n{features}  - name: hops\n    dtype: int64\n---\n")
    write_rows(tmp_path / "train.csv", [{"question": "a", "answer": "7", "hops": ""}])
    [row] = load_dataset(config(f"{tmp_path}@train"), tokenizer).train
    assert (row.answer, row.row) == ("7", {"hops": None})


def test_a_data_set_that_is_a_program_is_refused_with_its_name(tmp_path, tokenizer):
    (tmp_path / f"{tmp_path.name}.py").write_text("raise SystemExit")
    with pytest.raises(DataError, match=rf"{tmp_path.name}@train could not be read: .*{tmp_path.name}\.py"):
        load_dataset(config(f"{tmp_path}@train"), tokenizer)


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_a_directory_whose_name_has_signs_of_a_pattern(tmp_path, tokenizer, suffix):
    for name, question in (("set[1]", "a"), ("set1", "x"), ("se*", "b")):
        (tmp_path / name).mkdir()
        rows = [{"question": question, "answer": "1"}, {"question": "no", "answer": ""}]
        write_rows(tmp_path / name / f"train{suffix}", rows)
    for name, text in (("set[1]", "a"), ("se*", "b")):
        for source in (f"{tmp_path}/{name}@train", f"{tmp_path}/{name}/tr*{suffix}"):
            data = load_dataset(config(source, on_bad_row=OnBadRow.skip), tokenizer)
            assert [each.text for each in data.train] == [text], source
            assert "parity-data-" not in str(data.skipped[0])
    assert (
        load_dataset(config(f"{tmp_path}/set[1-9]/*{suffix}", on_bad_row=OnBadRow.skip), tokenizer).train[0].text == "x"
    )


def test_fields_in_the_form_of_python_are_read_from_csv(tmp_path, tokenizer):
    """pandas and `datasets` write dicts so."""
    rows = [{"prompt": f"{number}?", "reward_model": str({"ground_truth": "it's", "n": None})} for number in range(2)]
    data = load_dataset(config(write_rows(tmp_path / "verl.csv", rows)), tokenizer)
    assert [(each.text, each.answer) for each in data.train] == [("0?", "it's"), ("1?", "it's")]


def test_a_pattern_below_a_directory_with_the_sign_of_a_split(tmp_path, tokenizer):
    directory = tmp_path / "me@here"
    directory.mkdir()
    write_rows(directory / "part-1.jsonl", [{"question": "a", "answer": "7"}])
    assert len(load_dataset(config(directory / "part-*.jsonl"), tokenizer).train) == 1


def test_fields_and_choices_as_other_data_sets_hold_them(tmp_path, tokenizer):
    verl = [{"prompt": "1+1?", "reward_model": json.dumps({"ground_truth": "2", "style": "rule"})}]
    data = load_dataset(config(write_rows(tmp_path / "verl.csv", verl)), tokenizer)
    assert [each.answer for each in data.train] == ["2"]
    arc = [{"question": "Which?", "choices": {"text": ["4", "7"], "label": ["A", "B"]}, "answerKey": "B"}]
    keys = {"prompt_key": "question+choices", "answer_key": "answerKey"}
    data = load_dataset(config(write_rows(tmp_path / "arc.parquet", arc), **keys), tokenizer)
    assert data.train[0].text == "Which?\nA. 4\nB. 7"


@pytest.mark.parametrize("form", [str, repr, list, json.dumps], ids=["str", "repr", "list", "json"])
def test_choices_in_cells_of_csv_have_the_letters_that_answers_name(tmp_path, tokenizer, form):
    """As pandas writes arrays and lists: to Python ['4' 'it\'s 7'] is one text."""
    texts = ["4", "it's 7", '"8"', "[9]"]
    choices = form(texts if form in (list, json.dumps) else np.array(texts, dtype=object))
    row = {"question": "Which?", "choices": choices, "answer": "B"}
    keys = {"prompt_key": "question+choices", "answer_key": "answer"}
    data = load_dataset(config(write_rows(tmp_path / "rows.csv", [row]), **keys), tokenizer)
    assert data.train[0].text == 'Which?\nA. 4\nB. it\'s 7\nC. "8"\nD. [9]'
    data = load_dataset(config(write_rows(tmp_path / "rows.csv", [{**row, "answer": "7"}]), **keys), tokenizer)
    assert data.train[0].text == f"Which? {choices}", "a text that begins so is one"


def test_pictures_are_left_out_of_the_row_and_not_opened(tmp_path, tokenizer):
    features = datasets.Features(
        question=datasets.Value("string"), answer=datasets.Value("int8"), image=datasets.Image()
    )
    rows = {"question": ["a"], "answer": [1], "image": [{"bytes": b"no picture", "path": None}]}
    rows = datasets.Dataset.from_dict(rows, features=features)
    rows.to_parquet(tmp_path / "pictures.parquet")
    rows.save_to_disk(tmp_path / "saved")
    for source in ("pictures.parquet", "saved@train"):
        data = load_dataset(config(tmp_path / source), tokenizer)
        assert data.train[0].row == {}
        assert any("in no prompt: image" in note for note in data.notes)


@pytest.mark.parametrize("column", ["image", "images"])
def test_a_prompt_with_the_place_of_a_picture_is_a_bad_row(tmp_path, tokenizer, column):
    rows = [{"question": "<image>Find x.", "answer": "1", column: ["a.png"]}, {"question": "b", "answer": "2"}]
    source = write_rows(
        tmp_path / "rows.jsonl", [*rows, {"question": "What does <image> mean in HTML?", "answer": "3"}]
    )
    data = load_dataset(config(source, on_bad_row=OnBadRow.skip), tokenizer)
    assert [each.answer for each in data.train] == ["2", "3"]
    assert f"has <image>, from the column {column}; Parity trains on text" in data.skipped[0].problem


def test_a_column_of_dates_names_the_way_out(tmp_path, tokenizer):
    source = write_rows(tmp_path / "rows.parquet", [{"question": "When?", "answer": date(2020, 1, 5)}])
    with pytest.raises(DataError, match=r"got datetime.*Save the column as text"):
        load_dataset(config(source), tokenizer)


@pytest.mark.parametrize("lines", [False, True], ids=["array", "lines"])
def test_values_of_a_json_file_stay_as_they_were_written(tmp_path, tokenizer, lines):
    rows = [
        {"question": "When?", "answer": "2020-01-05", "at": "2020-01-05T10:00:00"},
        {"question": [{"role": "user", "content": "How many?"}], "answer": 2**70, "of": {"a": 1}},
    ]
    text = "\n".join(map(json.dumps, rows)) if lines else json.dumps([*rows, 5], indent=1)
    (tmp_path / "train.json").write_text(f"\ufeff{text}", encoding="utf-8")
    for source in (tmp_path / "train.json", f"{tmp_path}@train"):
        data = load_dataset(config(source, on_bad_row=OnBadRow.skip), tokenizer)
        assert [(each.answer, each.row) for each in data.train] == [
            ("2020-01-05", {"at": "2020-01-05T10:00:00"}), (str(2**70), {"of": {"a": 1}}),
        ]  # fmt: skip
        assert [each.problem for each in data.skipped[:1]] == ["must be a JSON object, got 5"] * (not lines)


@pytest.mark.parametrize("text", ["", "[1", '[{"question": "a"},]', "[" * 100_000, '[{"question": "\\x"}]'])
def test_a_broken_json_file_is_named(tmp_path, text):
    (tmp_path / "rows.json").write_text(text)
    with pytest.raises(ValueError, match=r"rows\.json could not be read"):
        list(read_rows(str(tmp_path / "rows.json")))


def test_answers_are_the_same_if_the_rule_takes_them_for_the_same(tmp_path, tokenizer):
    rows = [{"question": "a", "answer": "007"}, {"question": "a", "answer": "7"}]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    for function, num_prompts in (("exact_match", 0), ("math_dapo", 1)):
        both = config(source, eval_path=write_rows(tmp_path / "held.jsonl", [{"question": "b", "answer": "1"}]))
        if num_prompts:
            assert len(load_dataset(both, tokenizer, judgement=judged(function)).train) == num_prompts
        else:
            with pytest.raises(DataError, match="rows with contradicting answers"):
                load_dataset(both, tokenizer, judgement=judged(function))


def test_answers_that_math_takes_for_equal_do_not_contradict(tmp_path, tokenizer):
    pairs = [(r"\frac{1}{2}", "0.5"), (r"\{1,2\}", r"\{2,1\}"), ("3", "4")]
    rows = [{"question": f"q{number}", "answer": each} for number, pair in enumerate(pairs) for each in pair]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    data = load_dataset(config(source), tokenizer, judgement=judged("math"))
    assert [each.answer for each in data.train] == [r"\frac{1}{2}", r"\{1,2\}"]
    assert any("contradicting answers, which are left out: 2" in note for note in data.notes)


def test_a_compressed_file_of_lines_is_named_as_such(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(gzip.compress(b'{"question": "a", "answer": "1"}\n'))
    with pytest.raises(ValueError, match="Unpack it if it is compressed"):
        list(read_rows(str(path)))


@pytest.mark.skipif(find_spec("zstandard") is not None, reason="with zstandard such a file is read")
def test_a_file_of_a_directory_that_nothing_unpacks_has_a_way_out(tmp_path):
    (tmp_path / "train.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd" + bytes(60))
    with pytest.raises(ValueError, match=r"could not be read: .*Unpack it"):
        list(read_rows(f"{tmp_path}@train"))


@pytest.mark.parametrize(("encoding", "line"), [("cp1252", 3), ("utf-16", 1)])
def test_a_file_in_another_encoding_is_told_its_line_and_the_way_out(tmp_path, encoding, line):
    path = tmp_path / "rows.csv"
    path.write_bytes("question,answer\na,1\nüb?,2\n".encode(encoding))
    with pytest.raises(
        ValueError, match=rf"must be UTF-8 text.* Line {line} has another encoding: iconv -f {encoding}"
    ):
        list(read_rows(str(path)))


@pytest.mark.parametrize(
    ("function", "answers", "bad"),
    [
        ("gsm8k", ["5", "so\n#### 1,200", "about 5", "1/2"], [3, 4]),
        ("gsm8k_flexible", ["5", "9 (apples)"], [2]),
        ("math", ["\\frac{1}{2}", "$x^2$", "}{"], [3]),
        ("math_dapo", ["34", "\\boxed{34}", "We add.\nThe sum is 34."], [3]),
        ("exact_match", ["about 5", "We add.\nThe sum is 34."], []),
    ],
)
def test_every_reference_is_tried_by_the_rule_that_judges(tmp_path, tokenizer, function, answers, bad):
    rows = [{"question": f"q{number}", "answer": answer} for number, answer in enumerate(answers)]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    skipping = config(source, on_bad_row=OnBadRow.skip)
    data = load_dataset(skipping, tokenizer, judgement=judged(function))
    assert [row.number for row in data.skipped[: len(bad)]] == bad
    assert len(data.train) == len(answers) - len(bad)
    if bad:
        with pytest.raises(DataError, match=f"line {bad[0]}: answer must be .*reward.function={function}"):
            first_row(config(source), {}, judged(function))
        assert first_row(skipping, {}, judged(function))[0].answer == answers[0]


SEEDS = [{"prompt": "Play.", "label": "win", "extra_info": {"seed": seed}} for seed in (1, 2, 2, 3)]
CONTEXTS = [{"question": "How many?", "answer": str(n), "body": f"A basket of {n} apples."} for n in (2, 3)]


@pytest.mark.parametrize("seen", [judged(OWN), judged(own_rollout=True)])
def test_rows_are_the_same_only_if_all_is_the_same_that_user_code_sees(tmp_path, tokenizer, seen):
    source = write_rows(tmp_path / "seeds.jsonl", SEEDS)
    data = load_dataset(config(source), tokenizer, judgement=seen)
    assert [each.row["extra_info"]["seed"] for each in data.train] == [1, 2, 3]
    assert any("2 rows have the prompt of another row and are kept" in note for note in data.notes)
    assert any("1 duplicates removed" in note for note in data.notes)
    contexts = write_rows(tmp_path / "contexts.jsonl", CONTEXTS)
    assert len(load_dataset(config(contexts), tokenizer, judgement=seen).train) == 2
    # The same row with two answers contradicts itself, whoever sees it.
    twice = write_rows(tmp_path / "twice.jsonl", [*CONTEXTS, {**CONTEXTS[0], "answer": "9"}])
    data = load_dataset(config(twice), tokenizer, judgement=seen)
    assert [each.answer for each in data.train] == ["3"]
    # So does one whose answer is a field beside others.
    nested = [{"prompt": "1+1?", "reward_model": {"ground_truth": answer, "style": style}} for answer, style in
              (("2", "rule"), ("3", "rule"), ("2", "model"))]  # fmt: skip
    data = load_dataset(config(write_rows(tmp_path / "nested.jsonl", nested)), tokenizer, judgement=seen)
    assert [each.row["reward_model"]["style"] for each in data.train] == ["model"]


def test_a_rule_sees_prompt_and_answer_alone(tmp_path, tokenizer):
    source = write_rows(tmp_path / "seeds.jsonl", SEEDS)
    assert len(load_dataset(config(source), tokenizer, judgement=judged()).train) == 1
    assert not Judgement().sees_rows and not judged().sees_rows


@pytest.mark.parametrize(
    ("row", "unread"),
    [
        ({"body": "A basket.", "question": "How many?", "answer": "2", "id": "x1"}, "body, id"),
        ({"question": "Which?", "answer": "B", "choices": ["4", "7"], "level": 3}, "choices, level"),
        ({"question": "Which?", "answer": "B", "A": "4", "B": "7"}, "A, B"),
        ({"question": "Reach it.", "answer": "?", "nums": ["1", "2"], "target": 3}, "nums, target"),
    ],
)
def test_a_layout_names_the_columns_with_text_that_it_leaves_out(tmp_path, tokenizer, row, unread):
    source = write_rows(tmp_path / "rows.jsonl", [row])
    notes = load_dataset(config(source), tokenizer).notes
    assert f"{source}: columns that are in no prompt: {unread} (data.prompt_key=a+b joins two)" in notes
    column = unread.partition(", ")[0]
    given = config(source, prompt_key=f"question+{column}", answer_key="answer")
    others = unread.partition(", ")[2]
    assert any("in no prompt" in note for note in load_dataset(given, tokenizer).notes) == bool(others)


def test_a_column_that_begins_late_in_the_file_is_named_too(tmp_path, tokenizer):
    rows = [{"question": f"{number}+1?", "answer": str(number + 1)} for number in range(102)]
    rows[-1]["passage"] = "The bread was stale."
    source = write_rows(tmp_path / "rows.jsonl", rows)
    notes = load_dataset(config(source), tokenizer).notes
    assert any("in no prompt: passage" in note for note in notes)


def test_special_tokens_around_a_text(tmp_path, tokenizer):
    from tokenizers import processors

    def only(text, tokenizer=tokenizer, **changes):
        source = write_rows(tmp_path / "rows.jsonl", [{"question": text, "answer": "1"}])
        data = load_dataset(config(source, **changes), tokenizer)
        return data.train[0].token_ids, [note for note in data.notes if "control tokens" in note]

    plain, notes = only("2+3?")
    assert plain[0] == BOS and notes == []
    ids, notes = only("<bos>2+3?")
    assert ids == plain and "(<bos> in line 1)" in notes[0]
    assert only("<bos><bos>2+3?")[0] == plain
    assert only("2+3?<eos>")[0] == plain
    inside = only("2<eos>+3?")[0]
    assert inside.count(EOS) == 1
    _, notes = only("[user]<eos>2+3?", chat_template=True)
    assert "Texts in the form of a chat template need data.chat_template=false" in notes[0]
    adding = byte_tokenizer(tmp_path / "adding")
    adding.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
    )
    assert only("2+3?", adding)[0] == plain


def test_one_note_counts_the_texts_with_control_tokens(tmp_path, tokenizer):
    rows = [{"prompt": text, "label": "1"} for text in ("a", "b<eos>c", [{"role": "user", "content": "d<bos>e"}])]
    rows.append({"prompt": "f", "label": "2<eos>"})
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    notes = [note for note in load_dataset(config(source), tokenizer).notes if "control tokens" in note]
    texts, answers = notes  # of one file, which is training and held-out set
    assert ": 2 (<eos> in line 2, ...)" in texts and ": 1 (<eos> in line 4)" in answers


def test_columns_of_maps_are_dicts(tmp_path, tokenizer):
    """As Spark and DuckDB write them; `datasets` has no type for a map."""
    text_map = pyarrow.map_(pyarrow.string(), pyarrow.string())
    message, reward = [("role", "user"), ("content", "1+1?")], [("ground_truth", "2"), ("style", "rule")]
    columns = {
        "prompt": pyarrow.array([[message]], type=pyarrow.list_(text_map)),
        "reward_model": pyarrow.array([reward], type=text_map),
        "level": pyarrow.array([0.1], type=pyarrow.float32()),
    }
    path = tmp_path / "maps.parquet"
    parquet.write_table(pyarrow.table(columns), path)
    [prompt] = load_dataset(config(str(path)), tokenizer).train
    assert (prompt.text, prompt.answer) == ("[user]1+1?[assistant]", "2")
    assert prompt.row == {"reward_model": dict(reward), "level": 0.1}


@pytest.mark.parametrize("gold", [["7", "8"], {"target": 7, "numbers": [3, 4]}, True])
def test_a_reference_that_only_a_function_can_read_names_the_way_out(tmp_path, tokenizer, gold):
    rows = [{"prompt": "a", "data_source": "own", "reward_model": {"ground_truth": gold}}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError, match=r"got .*data\.answer_key; .* reward_model in `row`"):
        load_dataset(config(path), tokenizer, judgement=judged(OWN))
    keys = {"prompt_key": "prompt", "answer_key": "data_source"}
    [row] = load_dataset(config(path, **keys), tokenizer, judgement=judged(OWN)).train
    assert row.row["reward_model"]["ground_truth"] == gold
