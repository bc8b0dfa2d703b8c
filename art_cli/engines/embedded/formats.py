"""The grammar that a reply must follow: for `response_format` and for forced calls.

It writes text only, which grammars.py compiles. The language is llguidance's Lark, with `%json` rules and special
tokens by their ids. Where the template has thinking, a thought may come before the answer. Where there are tools and
the choice is free, calls may come in place of the answer. Calls are written as chat_prompts.py reads them.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from art_cli.chat.chat_errors import invalid
from art_cli.chat.requests import Request
from art_cli.engines.embedded.reply_text import MARKERS, Vocabulary

Json = dict[str, Any]
# Thoughts before the answer. begun: the prompt has opened one; free: the model may open one; none: it may not.
Thoughts = Literal["begun", "free", "none"]

CALL, CALL_END, THINK, THINK_END = MARKERS
MAX_SCHEMA = 128 * 1024  # characters of a schema's JSON; OpenAI admits 120,000
NAME_KEY, ARGUMENTS_KEY = '{"name": "', ', "arguments": '


@dataclass(frozen=True)
class Format:
    """Example: Format("start: answer\\nanswer: %json {...}", ("%json {...}",), "response_format")"""

    grammar: str
    schemas: tuple[str, ...]  # the parts of the grammar that a client wrote, each the right side of a rule
    param: str  # the request's parameter that they come from


def reply_format(vocabulary: Vocabulary, request: Request, tools: list[Json], thoughts: Thoughts) -> Format | None:
    """Returns the format of a chat reply, or None if it is free. Raises ChatError 400 if a schema is too long.

    `tools`: the tools that may be called. The prompt has opened a forced call, unless it has opened a thought.
    """
    if request.response_format is None and not tools:
        return None
    calls = _Calls(vocabulary, tools)
    if tools and request.tool_choice != "auto":
        rules, start, param = calls.rules, calls.forced(request.tool_choice, begun=thoughts != "begun"), "tools"
        thoughts = "begun" if thoughts == "begun" else "none"
    elif request.response_format is not None:
        rules, start, param = [("answer", _answer_rule(request.response_format))], "answer", "response_format"
        if tools:
            rules, start = [*rules, *calls.rules], f"(answer | {calls.several})"
    else:
        return None
    thought = _thought(vocabulary, thoughts)
    lines = [f"start: {thought} {start}", *(f"{name}: {side}" for name, side in rules)]
    if thought:
        lines.append("GAP: /\\n{1,8}/")
        lines.append("thought[lazy]: /(?s:.*)<\\/think>/")
    schemas = tuple(side for _, side in rules if side.startswith("%json "))
    return Format("\n".join(lines), schemas, param)


class _Calls:
    """Rules for calls of tools: `name_on` is a call from its name on, `end` the text after its arguments."""

    def __init__(self, vocabulary: Vocabulary, tools: Sequence[Json]) -> None:
        self._names = [tool["function"]["name"] for tool in tools]
        self._begin = f"{_spelled(vocabulary, CALL)} {_quoted(chr(10) + NAME_KEY)}"
        sides = []
        self.rules: list[tuple[str, str]] = []
        for index, tool in enumerate(tools):
            function = tool["function"]
            schema = {"type": "object", **(function.get("parameters") or {})}
            self.rules.append((f"arguments_{index}", _json_rule(schema, "tools", bool(function.get("strict")))))
            head = json.dumps(function["name"], ensure_ascii=False)[1:] + ARGUMENTS_KEY
            sides.append(f"{_quoted(head)} arguments_{index} end")
        self.rules.append(("name_on", " | ".join(sides)))
        self.rules.append(("end", f"{_quoted('}' + chr(10))} {_spelled(vocabulary, CALL_END)}"))

    @property
    def several(self) -> str:
        return f"{self._begin} name_on {self._more}"

    @property
    def _more(self) -> str:
        return f'("\\n" {self._begin} name_on)*'

    def forced(self, choice: str | Json, *, begun: bool) -> str:
        """`begun`: the prompt has opened the call, up to the arguments of a named tool or up to the name."""
        if isinstance(choice, dict):
            name = choice["function"]["name"]
            index = self._names.index(name)
            head = json.dumps(name, ensure_ascii=False)[1:] + ARGUMENTS_KEY
            return f"{'' if begun else f'{self._begin} {_quoted(head)}'} arguments_{index} end"
        return f"{'' if begun else self._begin} name_on {self._more}"


def _thought(vocabulary: Vocabulary, thoughts: Thoughts) -> str:
    """Returns the rule for a thought before the answer; "" where none may come."""
    end = _spelled(vocabulary, THINK_END)
    rest = "thought GAP?" if end.startswith('"') else f"/(?s:.*)/ {end} GAP?"
    return {"begun": rest, "free": f"({_spelled(vocabulary, THINK)} {rest})?", "none": ""}[thoughts]


def _answer_rule(response_format: Json) -> str:
    if response_format["type"] == "json_object":
        return _json_rule({"type": "object"}, "response_format", True)
    wanted = response_format["json_schema"]
    return _json_rule(wanted["schema"], "response_format", bool(wanted.get("strict")))


def _json_rule(schema: Json, param: str, is_strict: bool) -> str:
    """Returns the schema as a rule. One that is not strict is advice: keywords unknown to llguidance are ignored."""
    text = json.dumps({**schema, "x-guidance": {"lenient": not is_strict}})
    if len(text) > MAX_SCHEMA:
        raise invalid(f"{param}: a schema of {len(text)} characters; at most {MAX_SCHEMA}", param)
    return f"%json {text}"


def _spelled(vocabulary: Vocabulary, marker: str) -> str:
    """Returns the marker as a grammar writes it: quoted text, or the id where the marker is an added token.

    llguidance takes no added token for text, even where the tokenizer does not call it special.
    """
    id = vocabulary.tokenizer.convert_tokens_to_ids(marker)
    return f"<[{id}]>" if id in vocabulary.tokenizer.added_tokens_decoder else _quoted(marker)


def _quoted(text: str) -> str:
    return json.dumps(text)
