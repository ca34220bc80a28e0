"""Chat messages of other people's files: read as they were meant, or a bad row that says what is wrong."""

import json
import re
import threading

import numpy as np
import psutil
import pytest
from data_cases import TEMPLATE, byte_tokenizer, write_rows

from rollout.data.chat_template import TIMEOUT_S, ChatTemplate
from rollout.data.dataset import load_dataset
from rollout.task_config import FileDataConfig, OnBadRow

ASKED = {"role": "user", "content": "2+3?"}
ANSWERED = {"role": "assistant", "content": "It is"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def loaded(tmp_path, tokenizer, *prompts, suffix=".jsonl", **changes):
    rows = [{"prompt": prompt, "label": str(number)} for number, prompt in enumerate(prompts)]
    source = write_rows(tmp_path / f"rows{suffix}", rows)
    return load_dataset(FileDataConfig(train_path=source, eval_path=source, **changes), tokenizer)


def refused(tmp_path, tokenizer, prompt, **changes):
    data = loaded(tmp_path, tokenizer, [ASKED], prompt, on_bad_row=OnBadRow.skip, **changes)
    assert [each.prompt_id for each in data.train] == [0]
    return data.skipped[0].problem


BAD = [
    ([ASKED, ANSWERED], "ends with a message of the assistant.*data.continue_assistant=true"),
    ([ANSWERED], "has no message of a user"),
    ([{"role": "system", "content": "Add."}], "has no message of a user"),
    (
        [{"role": "system", "content": "Add."}, {"role": "developer", "content": "Be brief."}],
        "no message of a user",
    ),
    ([{"role": "system", "content": "Add."}, {"role": "user", "content": " \n"}], "is empty"),
    ([{"role": "human", "content": "2+3?"}], "role 'human' is none that the chat template knows .* user here"),
    ([ASKED, {"role": "gpt", "content": "5"}], "ends with a message of the assistant"),
    ([ASKED, {"role": "judge", "content": "?"}], "role 'judge' is none that the chat template knows"),
    ([{"from": "human", "value": "2+3?"}], "Rename them to role and content, and human to user"),
    (json.dumps([ASKED, ANSWERED]), "ends with a message of the assistant"),
    (json.dumps([{"from": "human", "value": "2+3?"}]), "Rename them to role and content"),
    (f"{ASKED} {ASKED}", "chat messages as text that is no list. Save the column as JSON"),
    (f"array([{ASKED}", "as text that is no list"),
    (json.dumps([ASKED])[:-4], "as text that is no list"),
    (json.dumps(json.dumps([ASKED])), "as text that is no list"),
    ([{"role": "tool", "content": "5"}], "has no message of a user"),
    ([ASKED, ANSWERED, {"role": "user", "content": " "}], "is empty"),
    ([{"role": "User", "content": "2+3?"}], "role 'User' is none .* user here"),
    ([{"role": "user", "content": [{"type": "image", "text": "", "image": "a.png"}]}], "content of the type image"),
    (
        [ASKED, {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}, ASKED],
        "leaves out the call of the tool add",
    ),
    (
        [
            {"role": "system", "content": "You can call add."},
            ASKED,
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]},
            ASKED,
        ],
        "leaves out the call of the tool add",
    ),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": "x.png"}]}], "content of the type image_url"),
    ([{"role": "user", "content": None}], "without role or content"),
    ([{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}], "half of a surrogate pair"),
]
"""Prompts, and what is said of their rows."""


def test_a_conversation_that_is_no_prompt_is_a_bad_row(tmp_path, tokenizer):
    """In one file, because each load starts a process for the template."""
    data = loaded(tmp_path, tokenizer, [ASKED], *(prompt for prompt, _ in BAD), on_bad_row=OnBadRow.skip)
    assert [each.prompt_id for each in data.train] == [0]
    for (prompt, problem), row in zip(BAD, data.skipped[: len(BAD)], strict=True):
        assert re.search(problem, row.problem), prompt


READ = [
    (json.dumps([ASKED]), "[user]2+3?[assistant]"),
    ([{"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "3?"}]}],
     "[user]2+\n3?[assistant]"),
    (json.dumps(ASKED), "[user]2+3?[assistant]"),
    (str([{**ASKED, "content": "it's \"2+3\"?\n", "name": None}]), "[user]it's \"2+3\"?\n[assistant]"),
    (str({"messages": [ASKED]}), "[user]2+3?[assistant]"),
    *((form(np.array([ASKED, {**ASKED, "content": "it's ['a' 'b'] {1} {2}"}])),
       "[user]2+3?[user]it's ['a' 'b'] {1} {2}[assistant]") for form in (str, repr)),
    (str({"role": np.array(["user"], dtype=object), "content": np.array(["2+3?"], dtype=object)}),
     "[user]2+3?[assistant]"),
    ("\ufeff" + json.dumps({"messages": [ASKED]}), "[user]2+3?[assistant]"),
    ({"role": ["user"], "content": ["2+3?"]}, "[user]2+3?[assistant]"),
    ([ASKED, {"role": "assistant", "content": None, "reasoning_content": "5", "tool_calls": []}, ASKED],
     "[user]2+3?[assistant][user]2+3?[assistant]"),
    # A list in a text is no conversation.
    ("[1, 2] + [3] = ?", "[user][1, 2] + [3] = ?[assistant]"),
    ("{'role'} + {'user'} = ?", "[user]{'role'} + {'user'} = ?[assistant]"),
    ('[{"a": 1}] has how many members?', '[user][{"a": 1}] has how many members?[assistant]'),
    *((text, f"[user]{text}[assistant]") for text in (
        "[Context] What role human activity plays?", "(RBAC) Explain role, user and permission.",
        '"Design a role system for a game." How many words?', "(a) Which role (user or admin) may write?",
    )),
]  # fmt: skip
"""Prompts, and the texts that they are."""


def test_messages_are_read_as_their_writer_meant(tmp_path, tokenizer):
    unlike = [unlike_others(row, number) for number, row in enumerate(READ)]
    data = loaded(tmp_path, tokenizer, *(prompt for prompt, _ in unlike))
    assert [each.text for each in data.train] == [text for _, text in unlike]


def unlike_others(value, number):
    """The same prompt with a question of its own: rows that ask the same are one."""
    match value:
        case str():
            return value.replace("2+", f"{number}+")
        case dict():
            return {key: unlike_others(inner, number) for key, inner in value.items()}
        case list() | tuple():
            return [unlike_others(inner, number) for inner in value]
    return value


def test_messages_of_a_table_have_no_fields_that_are_null(tmp_path, tokenizer):
    """Parquet gives each message the fields of all; templates ask with `in` whether a message has one."""
    tokenizer = byte_tokenizer(tmp_path / "other")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if 'name' in m %}{{ m.name + ': ' }}{% endif %}{{ m.content }}{% endfor %}"
    )
    named = {"role": "user", "content": "3?", "name": "Ada"}
    data = loaded(tmp_path, tokenizer, [ASKED, named], suffix=".parquet")
    assert data.train[0].text == "2+3?Ada: 3?"


def test_json_text_of_messages_in_a_csv_file(tmp_path, tokenizer):
    data = loaded(tmp_path, tokenizer, json.dumps([{"role": "system", "content": "Add."}, ASKED]), suffix=".csv")
    assert data.train[0].text == "[system]Add.[user]2+3?[assistant]"


def test_a_response_goes_on_with_the_last_message_by_a_key(tmp_path, tokenizer):
    data = loaded(tmp_path, tokenizer, [ASKED, ANSWERED], [ASKED], continue_assistant=True)
    assert [each.text for each in data.train] == ["[user]2+3?[assistant]It is", "[user]2+3?[assistant]"]
    assert data.train[0].token_ids == tokenizer(data.train[0].text, add_special_tokens=False)["input_ids"]
    empty = [ASKED, {"role": "assistant", "content": " "}]
    assert "empty message of the assistant" in refused(tmp_path, tokenizer, empty, continue_assistant=True)


def test_a_role_that_the_template_names_is_known(tmp_path, tokenizer):
    tokenizer = byte_tokenizer(tmp_path / "other")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'ipython' %}>{% endif %}{{ m.content }}{% endfor %}"
    )
    assert loaded(tmp_path, tokenizer, [ASKED, {"role": "ipython", "content": "5"}]).train[0].text == "2+3?>5"


def test_a_message_that_the_template_leaves_out_makes_a_bad_row(tmp_path):
    tokenizer = byte_tokenizer(tmp_path / "other")
    tokenizer.chat_template = "{% for m in messages if m.role == 'user' %}[user]{{ m.content | trim }}{% endfor %}"
    roles = ["system", "developer", "assistant", "tool"]
    chats = [[{"role": role, "content": "Add."}, ASKED] for role in roles]
    kept = [{"role": "user", "content": " 2+3?\n"}]
    data = loaded(tmp_path, tokenizer, *chats, kept, on_bad_row=OnBadRow.skip)
    assert [each.text for each in data.train] == ["[user]2+3?"]
    for role, row in zip(roles, data.skipped[: len(roles)], strict=True):
        assert f"leaves out the message of the {role}" in row.problem


def test_what_a_template_writes_in_another_form_is_not_left_out(tmp_path):
    tokenizer = byte_tokenizer(tmp_path / "other")
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{% if m.role == 'tool' %}{{ m.content | tojson }}"
        "{% else %}{{ m.content.split('</think>')[-1] | trim }}{% endif %}{% endfor %}"
    )
    said = [
        ASKED,
        {"role": "assistant", "content": "<think>two</think> 5"},
        {"role": "tool", "content": 'a "b"\n'},
        ASKED,
    ]
    assert loaded(tmp_path, tokenizer, said).train[0].text == '[user]2+3?[assistant]5[tool]"a \\"b\\"\\n"[user]2+3?'


@pytest.mark.parametrize("mark", ["</thought>", "</reasoning>"])
def test_thoughts_of_past_answers_may_be_left_out(tmp_path, mark):
    tokenizer = byte_tokenizer(tmp_path / "other")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content.split('" + mark + "')[-1] }}{% endfor %}"
    past = {"role": "assistant", "content": f"{mark.replace('/', '')}two{mark}5"}
    assert loaded(tmp_path, tokenizer, [ASKED, past, ASKED]).train[0].text == "2+3?52+3?"


def test_text_beside_a_call_may_be_left_out(tmp_path):
    tokenizer = byte_tokenizer(tmp_path / "other")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.tool_calls | tojson if 'tool_calls' in m else m.content }}{% endfor %}"
    )
    call = {"role": "assistant", "content": "I will add.", "tool_calls": [{"function": {"name": "add"}}]}
    assert '"add"' in loaded(tmp_path, tokenizer, [ASKED, call, ASKED]).train[0].text


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("{{ call.arguments | tojson }}", 'add{"a": "\u00e9"}'),
        ("{{ call.arguments if call.arguments is string else call.arguments | tojson }}", 'add{"a": "\u00e9"}'),
        ("{% for name, value in call.arguments | items %}{{ name }}={{ value }}{% endfor %}", "adda=\u00e9"),
        ("{{ '```' + call.arguments }}", 'add```{"a": "\u00e9"}'),
    ],
    ids=["quotes a text", "takes both", "needs an object", "needs a text"],
)
def test_arguments_of_a_call_have_the_form_that_the_template_reads(tmp_path, written, text):
    """OpenAI's API has them as JSON text, and each family of templates is made for one of the two forms."""
    tokenizer = byte_tokenizer(tmp_path / "other")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% for each in m.tool_calls or [] %}{% set call = each.function %}"
        f"{{{{ call.name }}}}{written}{{% endfor %}}{{% endfor %}}"
    )
    calls = [{"function": {"name": "add", "arguments": given}} for given in ('{"a": "\u00e9"}', {"a": "\u00e9"})]
    chats = [[ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}, ASKED] for call in calls]
    assert [each.text for each in loaded(tmp_path, tokenizer, *chats).train] == [f"2+3?{text}2+3?"] * 2


def test_a_template_that_reads_no_form_of_arguments_says_why(tmp_path):
    tokenizer = byte_tokenizer(tmp_path / "other")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% if m.tool_calls %}{{ raise_exception('no calls here') }}{% endif %}"
        "{% endfor %}"
    )
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
    assert "the chat template refuses the messages: no calls here" in refused(tmp_path, tokenizer, [ASKED, call, ASKED])


def test_one_prompt_that_the_template_cannot_end_is_a_bad_row(tmp_path, monkeypatch):
    monkeypatch.setattr("rollout.data.chat_template.TIMEOUT_S", 2.0)
    assert TIMEOUT_S == 10.0
    tokenizer = byte_tokenizer(tmp_path / "other")
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    tokenizer.chat_template = TEMPLATE + "{% if messages[0].content == 'hang' %}" + endless + "{% endif %}"
    data = loaded(tmp_path, tokenizer, "a", "hang", "b", on_bad_row=OnBadRow.skip)
    assert [each.text for each in data.train] == ["[user]a[assistant]", "[user]b[assistant]"]
    assert data.skipped[0].number == 2 and "did not end within 2 s" in data.skipped[0].problem


def test_a_template_on_a_slow_machine_has_its_time(tmp_path, monkeypatch):
    """Its process gets no core for twice the limit."""
    monkeypatch.setattr("rollout.data.chat_template.TIMEOUT_S", 1.0)
    template = ChatTemplate(byte_tokenizer(tmp_path / "other"), {})
    try:
        [first] = template.render([[ASKED]])
        below = psutil.Process(template._child._process.pid).children(recursive=True)
        for each in below:
            each.suspend()
        timer = threading.Timer(2.0, lambda: [each.resume() for each in below])
        timer.start()
        assert list(template.render([[ASKED]])) == [first] and not first.problem
        assert not timer.is_alive()
    finally:
        template.close()
