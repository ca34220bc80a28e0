"""Chat messages -> text, by the model's chat template, in a process of its own.

    python -m rollout.data.chat_template MEMORY_BYTES

A template is a program of whoever made the model. Jinja's sandbox keeps it from the machine, but bounds neither its
time nor its memory; this process does. In: {template, variables, limit_s}, then {messages, ends}, where `ends` is a
member of `Ends`. Out: {"ready": true}, then {"text"} or {"problem"} for every list.
"""

from __future__ import annotations

import queue
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from rollout.data.conversations import ASSISTANTS, Messages, left_out_call, with_other_arguments
from rollout.data.data_files import plain_text
from rollout.processes.child_process import START_TIMEOUT_S, ChildProcess, become_child, described

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TIMEOUT_S = 10.0
"""Seconds of computing for one prompt, which a slow machine does not shorten; a template takes a fraction of a
millisecond."""
MEMORY_BYTES = 4 * 2**30
MAX_TEXT_CHARS = 2**24
"""Longest text of a prompt; the longest context of a model is shorter."""
AT_ONCE = 256
"""Prompts that are sent before the first of them is waited for."""
DAY = datetime(2024, 7, 26)
"""What templates write as today, which is Llama's without a clock: a run goes on with its prompts on another day."""
MAX_LOST = 3
"""Prompts whose rendering does not end before the template counts as broken."""


class Ends(Enum):
    """How the text of messages ends."""

    answer = "answer"
    """Where the assistant's next message begins."""
    last = "last"
    """With the content of the last message, which goes on."""
    turn = "turn"
    """With the last message and what the template writes after it."""


class Rendered(NamedTuple):
    """What the template made of a list of messages."""

    text: str
    problem: str
    """The reason why there is no text; "" if there is one."""


class TemplateError(RuntimeError):
    """The template hangs, or ended its process; the message says so without naming the prompt."""


def default_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The program that writes a chat; None if the tokenizer has none, or several by name without a default."""
    named = tokenizer.chat_template
    if named is None or (isinstance(named, dict) and "default" not in named):
        return None
    return str(tokenizer.get_chat_template())


class ChatTemplate:
    """The chat template of a tokenizer, in a process that starts with the first list of messages."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any]) -> None:
        """`variables` are those of the config; the special tokens of the tokenizer come in addition."""
        self.text = str(tokenizer.get_chat_template())
        """The program of the template."""
        self._variables = {**tokenizer.special_tokens_map, **variables}
        self._child: ChildProcess | None = None
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def render(self, chats: Sequence[Messages]) -> Iterator[Rendered]:
        """The text of each list of messages, in order, up to where the response begins.

        A list that the template cannot end has a problem. Raises TemplateError at the third of them.
        """
        ends = [Ends.last if chat[-1]["role"] in ASSISTANTS else Ends.answer for chat in chats]
        num_lost = next_chat = 0
        while next_chat < len(chats):
            try:
                for rendered in self._some(chats, ends, range(next_chat, min(next_chat + AT_ONCE, len(chats)))):
                    next_chat += 1
                    yield rendered
            except TemplateError as error:
                num_lost += 1
                if num_lost == MAX_LOST:
                    raise
                next_chat += 1
                self.close()
                yield Rendered("", str(error))

    def whole(self, messages: Messages) -> Rendered:
        """The text of a conversation with what ends its last turn. Raises TemplateError."""
        return next(self._some([messages], [Ends.turn], range(1)))

    def close(self) -> None:
        """End the process; `render` starts another."""
        if self._child is not None:
            self._child.kill()
            self._child = None

    def _some(self, chats: Sequence[Messages], ends: Sequence[Ends], which: range) -> Iterator[Rendered]:
        child = self._child or self._start()
        for each in which:
            child.say(orjson.dumps({"messages": chats[each], "ends": ends[each].value}))
        for _ in which:
            yield Rendered(**self._answer(child))

    def _start(self) -> ChildProcess:
        self._lines = queue.SimpleQueue()  # what an ended process said is not for this one
        child = ChildProcess(__name__, str(MEMORY_BYTES), hear=self._lines.put, unheard=self._lines.qsize)
        self._child = child
        child.say(orjson.dumps({"template": self.text, "variables": self._variables, "limit_s": TIMEOUT_S}))
        self._answer(child)
        return child

    def _answer(self, child: ChildProcess) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=START_TIMEOUT_S)  # for a process that is stopped; others end themselves
        except queue.Empty as error:
            raise TemplateError(f"the chat template of the model gave no answer in {START_TIMEOUT_S:g} s") from error
        if line is None:
            death = child.death()
            if death.by is signal.SIGPROF:
                raise TemplateError(f"the chat template of the model did not end within {TIMEOUT_S:g} s of computing")
            raise TemplateError(f"the process with the chat template of the model {death.text}")
        answer: dict[str, Any] = orjson.loads(line)
        return answer


def _in_either_form(messages: Messages, render: Callable[[Messages], str]) -> str:
    """What `render` makes of `messages`, whose calls have their arguments in the form that the template is made for.

    OpenAI's API, and most data, have JSON text there. Many templates write it as JSON once more, others fail.
    """
    other, quoted = with_other_arguments(messages)
    try:
        text = render(messages)
    except Exception:
        if other == messages:
            raise
        return render(other)
    return render(other) if any(each in text for each in quoted) else text


def main(memory_bytes: int) -> None:
    """Render lists of messages until the input ends."""
    requests, say = become_child(memory_bytes=memory_bytes)
    # What the tokenizer's apply_chat_template() calls; imported before a deadline runs.
    from jinja2 import TemplateError as Refusal
    from transformers.utils.chat_template_utils import render_jinja_template

    given = orjson.loads(requests.readline())
    fixed = {"chat_template": given["template"], "strftime_now": DAY.strftime, **given["variables"]}
    say({"ready": True})
    for line in requests:
        text, problem = "", ""
        signal.setitimer(signal.ITIMER_PROF, given["limit_s"])  # its signal ends this process, also within C
        try:
            asked = orjson.loads(line)
            ends = Ends(asked["ends"])
            how: dict[str, Any] = {
                "add_generation_prompt": ends is Ends.answer,
                "continue_final_message": ends is Ends.last,
            }

            def render(messages: Messages, how: dict[str, Any] = how) -> str:
                return plain_text(str(render_jinja_template([messages], **fixed, **how)[0][0]))

            text = _in_either_form(asked["messages"], render)
            problem = left_out_call(asked["messages"], text, lambda messages: _in_either_form(messages, render))
        except Refusal as error:
            problem = f"the chat template refuses the messages: {error}"
        except Exception as error:
            problem = f"the chat template fails: {described(error)}"
        signal.setitimer(signal.ITIMER_PROF, 0)
        if len(text) > MAX_TEXT_CHARS:
            text, problem = "", f"the chat template writes {len(text):,} characters, more than {MAX_TEXT_CHARS:,}"
        say({"text": text, "problem": problem})


if __name__ == "__main__":
    main(int(sys.argv[1]))
