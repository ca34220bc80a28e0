"""Chat messages -> text, by the model's chat template, in a process of its own.

    python -m rollout.data.chat_template NAME MEMORY_BYTES

A template is a program of whoever made the model. Jinja's sandbox keeps it from the machine, but bounds neither its
time nor its memory; this process does. In: {template, variables}, then lists of messages. Out: {"ready": true}, then
{"text"} or {"problem"} for every list.
"""

from __future__ import annotations

import queue
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from rollout.data.data_files import plain_text
from rollout.processes.child_process import START_TIMEOUT_S, ChildProcess, become_child, described, own_arguments

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TIMEOUT_S = 10.0
"""Seconds for one prompt; a template takes a fraction of a millisecond."""
MEMORY_BYTES = 4 * 2**30
MAX_TEXT_CHARS = 2**24
"""Longest text of a prompt; the longest context of a model is shorter."""
AT_ONCE = 256
"""Prompts that are sent before the first of them is waited for."""

Messages = list[dict[str, str]]


class Rendered(NamedTuple):
    """What the template made of a list of messages."""

    text: str
    problem: str
    """The reason why there is no text; "" if there is one."""


class TemplateError(RuntimeError):
    """The template hangs, or ended its process; the message says so without naming the prompt."""


class ChatTemplate:
    """The chat template of a tokenizer, in a process that starts with the first list of messages."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any]) -> None:
        """`variables` are those of the config; the special tokens of the tokenizer come in addition."""
        self._tokenizer = tokenizer
        self._variables = variables
        self._child: ChildProcess | None = None
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def close(self) -> None:
        """End the process."""
        if self._child is not None:
            self._child.kill()

    def render(self, chats: Sequence[Messages]) -> Iterator[Rendered]:
        """The text of each list of messages, in order. Raises TemplateError at a list that the template cannot end."""
        if not chats:
            return
        child = self._child or self._start()
        for first in range(0, len(chats), AT_ONCE):
            some = chats[first : first + AT_ONCE]
            for messages in some:
                child.say(orjson.dumps(messages))
            for _ in some:
                yield Rendered(**self._answer(child, TIMEOUT_S))

    def _start(self) -> ChildProcess:
        child = ChildProcess(
            __name__, "template", memory_bytes=MEMORY_BYTES, hear=self._lines.put, unheard=self._lines.qsize
        )
        self._child = child
        variables = {**self._tokenizer.special_tokens_map, **self._variables}
        child.say(orjson.dumps({"template": self._tokenizer.get_chat_template(), "variables": variables}))
        self._answer(child, START_TIMEOUT_S)
        return child

    def _answer(self, child: ChildProcess, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty as error:
            raise TemplateError(f"the chat template of the model gave no answer within {timeout_s:g} s") from error
        if line is None:
            raise TemplateError(f"the process with the chat template of the model {child.death().text}")
        answer: dict[str, Any] = orjson.loads(line)
        return answer


def main(_: str, memory_bytes: int) -> None:
    """Render lists of messages until the input ends."""
    requests, say = become_child(memory_bytes=memory_bytes)
    # What the tokenizer's apply_chat_template() calls; imported before a deadline runs.
    from jinja2 import TemplateError as Refusal
    from transformers.utils.chat_template_utils import render_jinja_template

    given = orjson.loads(requests.readline())
    fixed = {"chat_template": given["template"], "add_generation_prompt": True, **given["variables"]}
    say({"ready": True})
    for line in requests:
        text, problem = "", ""
        try:
            text = plain_text(str(render_jinja_template([orjson.loads(line)], **fixed)[0][0]))
        except Refusal as error:
            problem = f"the chat template refuses the messages: {error}"
        except Exception as error:
            problem = f"the chat template fails: {described(error)}"
        if len(text) > MAX_TEXT_CHARS:
            text, problem = "", f"the chat template writes {len(text):,} characters, more than {MAX_TEXT_CHARS:,}"
        say({"text": text, "problem": problem})


if __name__ == "__main__":
    main(*own_arguments(sys.argv[1:]))
