"""Chat requests as prompt tokens, and sampled text as assistant messages.

`render` applies the tokenizer's chat template. `MessageParser` reads sampled text: calls in the template's syntax
(call_syntax.py) become tool calls, and a leading `<think>` block becomes `reasoning_content`. Everything else stays
content, byte for byte, except the line break that templates put before a call. So when this message is rendered for the
next turn, the prompt continues the sampled tokens.

Malformed blocks (broken JSON, no name) stay content. With `tool_choice` "required" or a named function, the prompt
already contains the call's opening as the template writes it, and a grammar (grammars.py) enforces the tools' schemas.
A grammar also enforces `response_format`.
"""

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from art_cli.chat.chat_errors import ChatError, invalid
from art_cli.chat.control_tokens import Guard
from art_cli.chat.requests import Json, Request, demands_format
from art_cli.chat.template_messages import for_template, keeps_text
from art_cli.engines.embedded.call_syntax import HERMES, SPACE, CallSyntax, Schemas, find_syntax, schemas_of
from art_cli.engines.embedded.grammars import Format, Thoughts, reply_format
from art_cli.engines.embedded.reply_text import MARKERS, TooLong, Vocabulary, overlap

CALL, _, THINK, THINK_END = MARKERS
_WRITES_ANEW = re.compile(r"\barguments\s*\|\s*tojson")
MAX_ASIDE = 2**20  # characters of messages and tools that a template may drop, such as earlier thoughts
SHORT = 4096  # characters of a request rendered on the event loop; tokenizers take up to 1 us per character
VALUE = 8  # cost of one JSON value, in characters
MAX_QUOTED = 64  # end marks that one call may quote; checking each mark rescans all preceding text
MAX_LENGTH = 2**20  # default context length in tokens


@dataclass(eq=False)
class Prompt:
    """A request's prompt, and how to parse its reply."""

    ids: list[int]
    opening: str = ""  # start of the reply, already contained in the prompt
    has_tools: bool = False
    has_thinking: bool = False
    format: Format | None = None  # the reply's grammar; None when the reply is free
    syntax: CallSyntax = HERMES  # the model's call syntax
    schemas: Schemas = field(default_factory=dict)
    has_one_call: bool = False  # whether calls behind the reply's first one are dropped, as in vLLM
    is_guarded: bool = False  # whether the tokenizer alone would have turned client text into control tokens


def render(vocabulary: Vocabulary, request: Request, max_length: int = MAX_LENGTH) -> Prompt:
    """Returns a request's prompt for a context of `max_length` tokens. It may take seconds: use a thread.

    Raises ChatError 400 if the template rejects the request, the prompt is too long or a feature is unsupported.
    """
    if request.prompt is not None:
        text = request.prompt
        return Prompt(text if isinstance(text, list) else _encode(vocabulary, text, max_length, request))
    tools = request.tools if request.tool_choice != "none" else []
    if _num_letters([request.messages, tools]) > max_length * vocabulary.longest + MAX_ASIDE:
        raise too_long(request, f"more than {max_length}", max_length)
    template = vocabulary.tokenizer.chat_template or ""
    text, guard = _apply_template(vocabulary, request, tools, max_length)
    syntax = find_syntax(template)
    opening = _call_opening(guard.value(request.tool_choice), template, syntax) if tools else ""
    has_thinking = THINK_END in template
    thoughts: Thoughts = "free" if has_thinking and not text.rstrip().endswith(THINK_END) else "none"
    if has_thinking and text.rstrip().endswith(THINK):
        opening, thoughts = "", "begun"  # the call has to come after the thought
    ids = _encode(vocabulary, text + opening, max_length, request, guard)
    is_guarded = vocabulary.controls.differ(text, guard.restored(text))
    can_call = syntax.can_be_forced or request.tool_choice != "auto"
    format = reply_format(vocabulary, request, tools if can_call else [], thoughts)
    begun = THINK if thoughts == "begun" else guard.restored(opening)
    has_one = not request.calls_in_parallel
    return Prompt(ids, begun, bool(tools), has_thinking, format, syntax, schemas_of(tools), has_one, is_guarded)


def is_short(request: Request) -> bool:
    """Returns True if `render` takes a few milliseconds at most for any request."""
    if request.template_kwargs or demands_format(request):
        return False
    left = SHORT
    waiting: list[Any] = [request.prompt, request.messages, request.tools]
    while waiting and left >= 0:
        value = waiting.pop()
        left -= VALUE
        if isinstance(value, dict):
            left -= len(value)
            if left >= 0:
                waiting += value.values()
                left -= sum(map(len, value))
        elif isinstance(value, list):
            left -= len(value)
            waiting += value if left >= 0 else ()
        elif isinstance(value, str):
            left -= len(value)
    return left >= 0


def _num_letters(value: Any) -> int:
    """Returns the total length in characters of all strings in a JSON value."""
    if isinstance(value, dict):
        return sum(map(_num_letters, value.values()))
    return sum(map(_num_letters, value)) if isinstance(value, list) else len(value) if isinstance(value, str) else 0


def num_wanted(request: Request) -> int:
    """Returns how many tokens the reply needs: the client's max_tokens, or one if max_tokens is just an upper bound."""
    asked = request.sampling.max_tokens
    is_needed = "max_tokens" in request.user_set and not request.caps_tokens
    return asked if asked is not None and is_needed else 1


def too_long(request: Request, num_prompt: int | str, most: int) -> ChatError:
    """Returns the error for a prompt that exceeds the context of `most` tokens together with its reply."""
    return ChatError(
        400,
        f"this model's context holds {most} tokens (model.max_length); the prompt has {num_prompt} and the reply was "
        f"to have {num_wanted(request)}; shorten one of them",
        param="messages" if request.messages is not None else "prompt",
        code="context_length_exceeded",
    )


def _encode(
    vocabulary: Vocabulary, text: str, max_length: int, request: Request, guard: Guard | None = None
) -> list[int]:
    param = "messages" if request.messages is not None else "prompt"
    try:
        text.encode()
    except UnicodeEncodeError:
        raise invalid(f"{param}: a lone surrogate (\\ud800 to \\udfff) is not text", param) from None
    try:
        # Without a guard, a plain-text prompt belongs to the client, control tokens included.
        ids = vocabulary.encode(text, most=max_length, adds_special=guard is None, guard=guard)
    except ValueError as error:
        raise invalid(f"{param}: {error}", param) from error
    if ids is None:
        raise too_long(request, f"more than {max_length}", max_length)
    return ids


def _apply_template(vocabulary: Vocabulary, request: Request, tools: list[Json], max_length: int) -> tuple[str, Guard]:
    """Returns the prompt text, with the guard's stand-ins."""
    assert request.messages is not None, "a request has messages or a prompt"
    template = vocabulary.tokenizer.chat_template or ""
    is_kept = keeps_text(template)
    messages = [for_template(message, keeps_text=is_kept) for message in request.messages]
    stand_ins = StandIns(request.messages if _writes_anew(template) and not is_kept else ())
    most = max_length * vocabulary.longest
    wishes = {} if request.thinks is None else {"enable_thinking": request.thinks}
    guard = Guard(vocabulary.controls, messages, request.messages, tools, request.template_kwargs, request.tool_choice)
    messages, tools, variables = guard.messages(messages), guard.value(tools), guard.value(request.template_kwargs)
    stand_ins.texts = {call: guard.json(text) for call, text in stand_ins.texts.items()}

    def rendered(messages: list[Json]) -> str:
        return vocabulary.template.render(messages, tools, variables, most=most, wishes=wishes)

    try:
        text = stand_ins.replaced(rendered(stand_ins.put_into(messages))) if stand_ins.texts else None
        if text is None:
            return rendered(messages), guard
        if len(text) > most:
            raise TooLong
        return text, guard
    except TooLong:
        raise too_long(request, f"more than {max_length}", max_length) from None


@cache
def _writes_anew(template: str) -> bool:
    return _WRITES_ANEW.search(template) is not None


class StandIns:
    """Preserves call arguments verbatim where a template would reserialize them (`arguments | tojson`).

    The template gets a placeholder object with a random name, and the rendered text is patched afterwards. So a call
    whose JSON spacing differs from Python's still continues the sampled tokens.
    """

    def __init__(self, messages: Sequence[Json]) -> None:
        calls = [(m, c) for m, message in enumerate(messages) for c in range(len(message.get("tool_calls") or ()))]
        given = {call: messages[call[0]]["tool_calls"][call[1]]["function"].get("arguments") for call in calls}
        self.texts = {call: text for call, text in given.items() if isinstance(text, str) and text[:1] == "{"}
        self._name = secrets.token_hex(12) if self.texts else ""

    def put_into(self, messages: list[Json]) -> list[Json]:
        changed = list(messages)
        for number, (m, c) in enumerate(self.texts):
            calls = list(changed[m]["tool_calls"])
            calls[c] = {**calls[c], "function": {**calls[c]["function"], "arguments": {self._name: number}}}
            changed[m] = {**changed[m], "tool_calls": calls}
        return changed

    def replaced(self, text: str) -> str | None:
        """Returns the text with the arguments restored; None when the template altered the placeholders."""
        for number, arguments in enumerate(self.texts.values()):
            stand_in = json.dumps({self._name: number})
            if text.count(stand_in) != 1:
                return None
            text = text.replace(stand_in, arguments)
        return None if self._name in text else text


def _call_opening(choice: str | Json, template: str, syntax: CallSyntax) -> str:
    if choice in ("auto", "none"):
        return ""
    if CALL not in template or not syntax.can_be_forced:
        raise invalid(f"tool_choice: only 'auto' and 'none' here, the chat template writes no {CALL}{{", "tool_choice")
    if isinstance(choice, dict):
        return f'{CALL}\n{{"name": {json.dumps(choice["function"]["name"], ensure_ascii=False)}, "arguments": '
    return f'{CALL}\n{{"name": "'


# --- parsing ----------------------------------------------------------------------------------------------------------


class MessageParser:
    """The assistant message in a prompt's reply, growing by text. Each push returns the new parts as OpenAI deltas.

    `message` is the sum of the deltas, so streamed and whole replies are the same.
    """

    def __init__(self, prompt: Prompt) -> None:
        self._has_tools, self._has_one_call = prompt.has_tools, prompt.has_one_call
        self._is_held = prompt.format is not None  # a reply with a grammar contains calls only if it starts with one
        self._syntax, self._schemas = prompt.syntax, prompt.schemas
        self._held = prompt.opening  # text that cannot be classified yet
        self._state = "start" if prompt.has_thinking else "content"  # start, think, content, call
        self._quoted = list[int]()  # indices of end marks inside the open call's arguments
        self._gap = ""  # white space after a call; shown only if text follows
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self.calls: list[Json] = []

    def push(self, text: str) -> list[Json]:
        """Returns the deltas added by this text."""
        self._held += text
        return self._advance(is_last=False)

    def flush(self) -> list[Json]:
        """Returns the remaining deltas at the end of the reply."""
        return self._advance(is_last=True)

    @property
    def message(self) -> Json:
        message: Json = {"role": "assistant", "content": "".join(self._content)}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self.calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = self.calls
        return message

    def _advance(self, is_last: bool) -> list[Json]:
        deltas: list[Json] = []
        state = ""
        while state != self._state:
            state = self._state
            deltas += getattr(self, f"_in_{state}")(is_last)
        return deltas

    def _in_start(self, is_last: bool) -> list[Json]:
        """Leaves the start state: a think block counts only at the very beginning."""
        text = self._held.lstrip(SPACE)
        if text.startswith(THINK):
            self._held, self._state = text[len(THINK) :].lstrip("\n"), "think"
        elif is_last or not THINK.startswith(text):
            self._state = "content"
        return []

    def _in_think(self, is_last: bool) -> list[Json]:
        if not self._reasoning:
            self._held = self._held.lstrip("\n")
        thought, end, rest = self._held.partition(THINK_END)
        if end:
            self._held, self._state = rest, "after_think"
            return self._think(thought.rstrip("\n"))
        before = thought[: len(thought) - overlap(thought, THINK_END)].rstrip("\n")
        keep = 0 if is_last else len(thought) - len(before)  # line breaks, and a partial marker
        self._held = thought[len(thought) - keep :]
        return self._think(thought[: len(thought) - keep])

    def _in_after_think(self, is_last: bool) -> list[Json]:
        """Skips the line breaks between thought and answer."""
        self._held = self._held.lstrip("\n")
        if self._held:
            self._state = "content"
        return []

    def _in_content(self, is_last: bool) -> list[Json]:
        begin = self._syntax.begin
        if self._is_held and self._held and not self.calls and not overlap(self._held, begin):
            self._has_tools = self._has_tools and self._held.startswith(begin)
        if not self._has_tools:
            text, self._held = self._held, ""
            return self._show(text)
        if self._may_be_bare_call() and not is_last:
            return []
        calls = self._syntax.read(self._held, self._schemas) if self._may_be_bare_call() else None
        if calls and all(call["function"]["name"] in self._schemas for call in calls):  # else an answer in JSON
            self._held = ""
            return self._call(calls)
        before, call, rest = self._held.partition(begin)
        if call:
            self._held, self._state = rest, "call"
            return self._show(before.removesuffix("\n"))
        keep = max(overlap(before, begin), overlap(before, "\n" + begin))
        if is_last and not self._is_held:  # in a held reply this is a truncated call
            keep = 0
        self._held = "" if is_last else before[len(before) - keep :]
        return self._show(before[: len(before) - keep], is_last)

    def _in_call(self, is_last: bool) -> list[Json]:
        end = self._syntax.end
        place = self._end_of_call(is_last)
        body, found, rest = self._held, "", ""
        if place >= 0:
            body, found, rest = self._held[:place], end, self._held[place + len(end) :]
        if not found and not is_last:
            return []
        self._state, self._held, self._quoted = "content", rest, []
        if not found and self._is_held and end:
            return []  # max_tokens truncated the call, and its markup must not become content
        calls = self._syntax.read(body, self._schemas)
        return self._show(self._syntax.begin + body + found) if calls is None else self._call(calls)

    def _end_of_call(self, is_last: bool) -> int:
        """Returns the index of the open call's end mark, or -1 until one arrives.

        Quoted marks inside arguments are skipped, unless the whole reply has no later mark.
        """
        end = self._syntax.end
        if not end:
            return -1
        start = self._quoted[-1] + 1 if self._quoted else 0
        while (place := self._held.find(end, start)) >= 0:
            if len(self._quoted) >= MAX_QUOTED or not self._syntax.is_quoted(self._held[:place]):
                return place
            self._quoted.append(place)
            start = place + 1
        return self._quoted[0] if is_last and self._quoted else -1

    def _may_be_bare_call(self) -> bool:
        """Returns True if the whole reply may still be one call without a marker."""
        is_first = not self.calls and not self._content
        return self._syntax.is_bare_json and is_first and self._held.lstrip(SPACE)[:1] in ("", "{")

    def _call(self, calls: list[Json]) -> list[Json]:
        first = len(self.calls)
        calls = calls[: max(0, 1 - first)] if self._has_one_call else calls
        self.calls += calls
        return [{"tool_calls": [{"index": index, **call}]} for index, call in enumerate(calls, first)]

    def _show(self, text: str, is_last: bool = False) -> list[Json]:
        """Returns the text as content. White space after a call is held back until more text follows."""
        if self.calls:
            text = self._gap + text
            bare = text.rstrip(SPACE)
            self._gap, text = text[len(bare) :], bare
        if not text:
            return []
        self._content.append(text)
        return [{"content": text}]

    def _think(self, text: str) -> list[Json]:
        if not text:
            return []
        self._reasoning.append(text)
        return [{"reasoning_content": text}]
