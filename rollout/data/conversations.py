"""The value of a prompt column -> text, or chat messages that a chat template can render. Is it a prompt at all?

Other libraries write messages in several forms: with the fields of all messages, null where a message has none; with
content in parts; as text of JSON or Python in a column of texts. They are read as their writer meant. A conversation
that renders without an error and is no prompt, such as one whose last word is the assistant's, is a bad row.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from rollout.data.answers import stated
from rollout.data.data_files import checked_text, plain, written_value

Messages = list[dict[str, Any]]
"""Chat messages: each has "role" and "content", both texts, and further fields of its template."""

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles that are known. A template can know others: it names them."""
CONVERSATION_KEYS = ("messages", "conversations", "conversation", "prompt")
"""Where an object holds its messages."""
USUAL_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "ai": "assistant"}
"""Role in some data sets -> its name in chat templates."""
ASSISTANTS = ("assistant", *(role for role, usual in USUAL_ROLES.items() if usual == "assistant"))
"""Roles of whoever answers."""
WITHOUT_CONTENT = ("tool_calls", "function_call", "reasoning_content", "refusal")
"""Fields beside which a message of the assistant needs no content."""
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_LIKE_MESSAGES = re.compile(
    r"(?:array\()?[\[({\"\s].*?\\?['\"]role\\?['\"]\s*:\s*\\?['\"](?:user|system|assistant|human)\\?['\"]", re.DOTALL
)
"""A list of messages in some form of text; no prompt in words begins like that."""


def prompt_value(value: object, key: str, *, continues: bool) -> str | Messages:
    """Checked text or chat messages of the column `key`; `continues` allows a last message of the assistant.

    Raises ValueError for what is no prompt.
    """
    if value is None:
        raise ValueError(f"{key} is missing")
    if isinstance(value, str):
        if not value.strip():
            raise ValueError(f"{key} is empty")
        checked_text(value, key)
        found = _messages_in(value)
        if found is None:
            if _LIKE_MESSAGES.match(value.strip("\ufeff \n")):
                raise ValueError(f"{key} holds chat messages as text that is no list. Save the column as JSON")
            return value
        value = found
    if isinstance(value, dict):
        value = _rows_of_columns(value)
    if not isinstance(value, list) or not value:
        raise ValueError(f"{key} must be text or a list of chat messages, got {value!r:.80}")
    messages = [_message(message, key) for message in value]
    _refuse_no_prompt(messages, key, continues=continues)
    return messages


def _messages_in(text: str) -> list[Any] | None:
    """The messages that `text` writes as JSON or as Python does, as csv files hold them; None for any other text."""
    text = text.strip("\ufeff \n")
    if not text.startswith(("[", "{", "array([")):
        return None
    found = written_value(text)
    if isinstance(found, dict):
        found = _rows_of_columns(found)
    if isinstance(found, dict):
        found = [found] if _names_role(found) else next((found[key] for key in CONVERSATION_KEYS if key in found), None)
    is_list = isinstance(found, list) and bool(found)
    return found if is_list and all(isinstance(each, dict) and _names_role(each) for each in found) else None


def _rows_of_columns(value: dict[str, Any]) -> object:
    """The messages of {"role": [...], "content": [...]}, as `datasets` saves a sequence of messages; else `value`."""
    columns = list(value.values())
    is_sequence = "role" in value and all(isinstance(each, list) and len(each) == len(columns[0]) for each in columns)
    return [dict(zip(value, row, strict=True)) for row in zip(*columns, strict=True)] if is_sequence else value


def _names_role(message: dict[str, Any]) -> bool:
    return "role" in message or "from" in message


def _message(message: object, key: str) -> dict[str, Any]:
    """One message with text as content, without the fields that are null. Raises ValueError."""
    if isinstance(message, dict) and "role" not in message and "from" in message:
        raise ValueError(
            f"{key} has messages with from and value. Rename them to role and content, and human to user, gpt to "
            "assistant"
        )
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"{key} has a chat message without role or content: {message!r:.80}")
    content = message.get("content")
    if content is None and any(message.get(name) for name in WITHOUT_CONTENT):
        content = ""
    if isinstance(content, list):
        content = _joined_parts(content, key)
    if not isinstance(content, str):
        raise ValueError(f"{key} has a chat message without role or content: {message!r:.80}")
    fields: dict[str, Any] = _without_null(plain(message))
    if fields.get("tool_calls") == []:  # a template asks whether the field is there
        del fields["tool_calls"]
    return fields | {"content": checked_text(content, key)}


def _joined_parts(parts: Sequence[Any], key: str) -> str:
    """The text of content in parts, as OpenAI's API writes it, a line for each part. Raises ValueError."""
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str) or (isinstance(part, dict) and "text" not in str(part.get("type", "text"))):
            kind = part.get("type", "unknown") if isinstance(part, dict) else type(part).__name__
            raise ValueError(f"{key} has content of the type {kind}; Parity trains on text")
        texts.append(text)
    return "\n".join(texts)


def _without_null(value: Any) -> Any:
    """`value` without the fields that are null: a table gives every message the fields of all messages."""
    if isinstance(value, dict):
        return {name: _without_null(member) for name, member in value.items() if member is not None}
    return [_without_null(member) for member in value] if isinstance(value, list) else value


def with_other_arguments(messages: Messages) -> tuple[Messages, list[str]]:
    """`messages` with the arguments of calls in their other form, an object for JSON text and text for an object; and
    the texts among them as a template writes them that makes JSON of them once more."""
    other, quoted = copy.deepcopy(messages), []
    for call in (call for message in other for call in message.get("tool_calls", ()) if isinstance(call, dict)):
        function: Any = call.get("function", call)
        given = function.get("arguments") if isinstance(function, dict) else None
        if isinstance(given, dict):
            function["arguments"] = json.dumps(given, ensure_ascii=False)
        elif isinstance(given, str) and given.lstrip().startswith("{"):
            with suppress(ValueError, RecursionError):
                function["arguments"] = json.loads(given)
                quoted.append(json.dumps(given, ensure_ascii=False))
    return other, quoted


def _refuse_no_prompt(messages: Messages, key: str, *, continues: bool) -> None:
    """Raise ValueError for messages after which the model has nothing to answer."""
    asked = [message for message in messages if message["role"] not in ("system", "developer", "assistant", "tool")]
    if not asked:
        raise ValueError(f"{key} has no message of a user")
    if not asked[-1]["content"].strip():
        raise ValueError(f"{key} is empty")
    if messages[-1]["role"] in ASSISTANTS:
        if not continues:
            raise ValueError(
                f"{key} ends with a message of the assistant, which would be its answer. Remove that message, or set "
                "data.continue_assistant=true if the response goes on with it"
            )
        if not messages[-1]["content"].strip():
            raise ValueError(f"{key} ends with an empty message of the assistant. Remove it")


def role_problem(messages: Messages, template: str) -> str:
    """The reason why `template`, its text, would take a role of `messages` for something else; "" if it knows them."""
    for message in messages:
        role = message["role"]
        if role not in ROLES and f"'{role}'" not in template and f'"{role}"' not in template:
            meant = role.lower() if role.lower() in ROLES else USUAL_ROLES.get(role.lower())
            usual = f", which is {meant} here" if meant else ""
            return f"the role {role!r} is none that the chat template knows ({', '.join(ROLES)}){usual}"
    return ""


def left_out_problem(messages: Messages, text: str) -> str:
    """The reason why `text`, which a template made of `messages`, is not their prompt: a message is not in it."""
    written = "".join(text.split())
    for message in messages:
        said = message["content"]
        forms = {said, json.dumps(said, ensure_ascii=False)[1:-1]}  # templates write what tools say as JSON
        if message["role"] in ASSISTANTS:  # of a past answer a template may leave out the thoughts and the tags
            forms |= {stated(said) or "", *_TAGGED.findall(said)}
        # A template may leave out the text beside a call, which the model was never to see.
        if not message.get("tool_calls") and not any("".join(form.split()) in written for form in forms):
            return f"the chat template leaves out the message of the {message['role']}: write its text into another one"
    return ""


def left_out_call(messages: Messages, text: str, render: Callable[[Messages], str]) -> str:
    """The reason why `text`, which `render` made of `messages`, is not their prompt: the call of a tool is not in it.

    Its name may stand elsewhere in the prompt, so the call counts as written if another name makes another text.
    """
    for number, message in enumerate(messages):
        for at in range(len(message.get("tool_calls", ()))):
            other = copy.deepcopy(messages)
            call: Any = other[number]["tool_calls"][at]
            function = call.get("function", call) if isinstance(call, dict) else None
            if not isinstance(function, dict) or not isinstance(name := function.get("name"), str):
                continue
            function["name"] = f"{name}_"
            try:
                is_left_out = render(other) == text
            except Exception:  # whatever a template raises: it reads the name, and refuses another one
                is_left_out = False
            if is_left_out:
                return f"the chat template leaves out the call of the tool {name}: write it into the message's content"
    return ""
