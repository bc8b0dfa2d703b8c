"""Tool call syntaxes by model family: the markers around a call, and how to parse it.

    hermes    <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>              Qwen 2.5 and 3, Hermes
    xml       <tool_call><function=f><parameter=a>1</parameter></function></tool_call>  Qwen3-Coder
    glm       <tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>      GLM 4.5
    mistral   [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}], [TOOL_CALLS]f[ARGS]{"a": 1}
    llama     {"name": "f", "parameters": {"a": 1}}, with or without <|python_tag|>     Llama 3
    phi       <|tool_call|>[{"name": "f", "arguments": {"a": 1}}]<|/tool_call|>         Phi-4-mini

Each syntax parses the text between its two markers into calls; invalid text stays content. JSON syntaxes keep the
arguments exactly as sampled. The other syntaxes convert arguments to JSON, typed by the tool's schema.

Arguments may contain the syntax's own marks. In JSON, a mark inside a string is text. In xml and glm, an argument ends
at the last closing mark before the next argument or the end of the call.
"""

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from art_cli.runs.json_lines import HALF_PAIRS
from art_cli.runtime.processes.plain_json import MAX_CHAT_DEPTH, is_deep

Json = dict[str, Any]
Schemas = Mapping[str, Json]  # a tool's name -> the JSON Schema of its parameters

SPACE = " \n\r\t"
_ESCAPE = re.compile(r"\\.", re.DOTALL)
_MISTRAL_ID = re.compile(r"[a-zA-Z0-9]{9}")
_ARGUMENTS = re.compile(r"\s*([\w.\-]{1,200})\s*(?:\[CALL_ID\](\w*)[^\[]*)?\[ARGS\]\s*", re.ASCII)
_FUNCTION_START = re.compile(r"\s*<function=")
_FUNCTION = re.compile(r"\s*<function=([^>\n]{1,200})>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]{1,200})>\n?(.*?)\n?</parameter>\s*(?=<parameter=|\Z)", re.DOTALL)
_GLM_NAME = re.compile(r"\s*([\w.\-]{1,200})\s*(?=<arg_key>|$)", re.ASCII)
_GLM_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*(?=<arg_key>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class CallSyntax:
    """Example: CallSyntax("hermes", "<tool_call>", "</tool_call>", read_json_call)"""

    name: str
    begin: str
    end: str  # "" if a call extends to the end of the reply
    read: Callable[[str, Schemas], list[Json] | None]
    is_quoted: Callable[[str], bool] = lambda body: False  # whether an end mark after this text is part of an argument
    is_bare_json: bool = False  # whether a whole reply in JSON with a name is also a call

    @property
    def can_be_forced(self) -> bool:
        """Whether a grammar can enforce this syntax (grammars.py writes Hermes calls)."""
        return self.name == "hermes"


def find_syntax(template: str) -> CallSyntax:
    """Returns the call syntax for a model's chat template, by default Hermes."""
    for mark, syntax in _BY_MARK:
        if mark in template:
            return syntax
    return HERMES


def call_of(name: str, arguments: str) -> Json:
    """Returns an OpenAI tool call with a new id; `arguments` is JSON text."""
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def schemas_of(tools: Sequence[Json]) -> Schemas:
    return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)

# --- JSON -------------------------------------------------------------------------------------------------------------


def read_json_call(body: str, _: Schemas = {}) -> list[Json] | None:  # noqa: B006  (read only)
    """Parses one object with `name` and `arguments` (or `parameters`)."""
    call = _json_call(body.strip(SPACE))
    return None if call is None else [call]


def read_json_calls(body: str, _: Schemas) -> list[Json] | None:
    """Parses a list of objects with `name` and `arguments`, a single object, or several with semicolons (Llama)."""
    return _calls_in(body, _json_call)


def _ends_in_string(body: str) -> bool:
    """Returns True if the text ends inside a JSON string."""
    return _ESCAPE.sub("", body).count('"') % 2 == 1


def _calls_in(body: str, read: Callable[[str], Json | None]) -> list[Json] | None:
    text = body.strip(SPACE)
    try:
        texts = _split(text, "[") if text.startswith("[") else _values(text, SPACE + ";")
    except (ValueError, RecursionError):
        return None
    calls = [read(one) for one in texts or ()]
    return [call for call in calls if call is not None] if calls and None not in calls else None


def _json_call(text: str) -> Json | None:
    """Parses an object into a call, keeping its arguments exactly as sampled."""
    fields = read_object(text)
    if fields is None or "name" not in fields:
        return None
    name = json.loads(fields["name"])
    arguments = fields.get("arguments", fields.get("parameters", "{}"))
    if not isinstance(name, str) or not arguments.startswith("{"):
        return None
    if HALF_PAIRS.search(name):  # half a surrogate pair, as "\ud800", could be neither sent nor recorded
        return None
    # deeper arguments would be refused when a client sends them back, here and below
    return None if is_deep(json.loads(arguments), MAX_CHAT_DEPTH) else call_of(name, arguments)


def read_object(text: str) -> dict[str, str] | None:
    """Returns a JSON object's fields with each value as raw text; None for any other text."""
    parts = _split(text, "{")
    if parts is None:
        return None
    return {json.loads(key): value for key, value in zip(parts[::2], parts[1::2], strict=True)}


def _split(text: str, opening: str) -> list[str] | None:
    """Splits a JSON list into items, or an object into alternating keys and values, as raw text."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    if not text.startswith(opening):
        return None
    return _values(text.rstrip(SPACE)[1:-1].strip(SPACE), SPACE + ",:")


def _values(text: str, separators: str) -> list[str]:
    """Splits text into JSON values, as raw text. Raises ValueError or RecursionError if it is anything else."""
    values, offset = [], 0
    while offset < len(text):
        _, end = _DECODER.raw_decode(text, offset)
        values.append(text[offset:end])
        offset = end
        while offset < len(text) and text[offset] in separators:
            offset += 1
    return values


# --- other syntaxes ---------------------------------------------------------------------------------------------------


def read_mistral_calls(body: str, schemas: Schemas) -> list[Json] | None:
    """Parses a JSON list, or repeated `name[ARGS]{...}` with `[TOOL_CALLS]` in between.

    Mistral's templates reject ids other than 9 letters and digits. Templates that write the list include the id, so the
    sampled id becomes the call's id.
    """
    if body.lstrip(SPACE)[:1] in ("[", "{"):
        return _calls_in(body, _mistral_call)
    calls, offset = [], 0
    while found := _ARGUMENTS.match(body, offset):
        try:
            value, end = _DECODER.raw_decode(body, found.end())
        except (ValueError, RecursionError):
            return None
        arguments = body[found.end() : end]
        if not isinstance(value, dict) or is_deep(value, MAX_CHAT_DEPTH):
            return None
        calls.append({**call_of(found[1], arguments), "id": mistral_id(found[2])})
        rest = body[end:].lstrip(SPACE)
        if not rest.startswith("[TOOL_CALLS]"):
            return None if rest else calls
        offset = len(body) - len(rest) + len("[TOOL_CALLS]")
    return None


def _mistral_call(text: str) -> Json | None:
    call = _json_call(text)
    if call is None:
        return None
    return {**call, "id": mistral_id((read_object(text) or {}).get("id", "").strip('"'))}


def mistral_id(sampled: str | None) -> str:
    return sampled if sampled and _MISTRAL_ID.fullmatch(sampled) else uuid.uuid4().hex[:9]


def read_xml_call(body: str, schemas: Schemas) -> list[Json] | None:
    """Parses `<function=f><parameter=a>text</parameter></function>`, or JSON in Hermes style."""
    found = _FUNCTION.fullmatch(body)
    if found is None:
        return read_json_call(body)
    return [_typed_call(found[1].strip(), _PARAMETER.findall(found[2]), schemas)]


def _is_in_parameter(body: str) -> bool:
    if not _FUNCTION_START.match(body):
        return _ends_in_string(body)
    return body.rfind("<parameter=") > body.rfind("</parameter>") or not body.rstrip(SPACE).endswith("</function>")


def _is_in_argument(body: str) -> bool:
    return body.rfind("<arg_value>") > body.rfind("</arg_value>")


def read_glm_call(body: str, schemas: Schemas) -> list[Json] | None:
    """Parses `f<arg_key>a</arg_key><arg_value>text</arg_value>`."""
    found = _GLM_NAME.match(body)
    rest = body[found.end() :] if found else ""
    if found is None or _GLM_ARGUMENT.sub("", rest).strip(SPACE):
        return None
    return [_typed_call(found[1], _GLM_ARGUMENT.findall(rest), schemas)]


def _typed_call(name: str, arguments: Sequence[tuple[str, str]], schemas: Schemas) -> Json:
    properties = schemas.get(name, {}).get("properties")
    types = properties if isinstance(properties, dict) else {}
    values = {key.strip(): _typed(text, types.get(key.strip())) for key, text in arguments}
    return call_of(name, json.dumps(values, ensure_ascii=False))


def _typed(text: str, schema: Any) -> Any:
    """Returns the text itself if the schema allows strings or it is not JSON, else its JSON value."""
    if text != "null" and _may_be_text(schema):
        return text
    if text in ("True", "False"):  # models imitate Python code
        return text == "True"
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # 1e999 and half a surrogate pair are not JSON
    except (ValueError, RecursionError):
        return text
    return text if is_deep([value], MAX_CHAT_DEPTH) else value


def _may_be_text(schema: Any) -> bool:
    """Returns True if a schema admits strings: by type, types, enum, or a union as pydantic writes `str | None`."""
    if not isinstance(schema, dict):
        return False
    kind, values = schema.get("type"), schema.get("enum")
    others = [each for name in ("anyOf", "oneOf") if isinstance(found := schema.get(name), list) for each in found]
    return (
        kind == "string"
        or (isinstance(kind, list) and "string" in kind)
        or (kind is None and isinstance(values, list) and any(isinstance(value, str) for value in values))
        or any(isinstance(each, dict) and each.get("type") == "string" for each in others)
    )


HERMES = CallSyntax("hermes", "<tool_call>", "</tool_call>", read_json_call, _ends_in_string)
XML = CallSyntax("xml", "<tool_call>", "</tool_call>", read_xml_call, _is_in_parameter)
GLM = CallSyntax("glm", "<tool_call>", "</tool_call>", read_glm_call, _is_in_argument)
MISTRAL = CallSyntax("mistral", "[TOOL_CALLS]", "", read_mistral_calls)
LLAMA = CallSyntax("llama", "<|python_tag|>", "", read_json_calls, is_bare_json=True)
PHI = CallSyntax("phi", "<|tool_call|>", "<|/tool_call|>", read_json_calls, _ends_in_string)

_BY_MARK = (  # the earliest entry found in a template wins
    ("<function=", XML),
    ("<arg_key>", GLM),
    ("<tool_call>", HERMES),
    ("[TOOL_CALLS]", MISTRAL),
    ("<|python_tag|>", LLAMA),
    ('"parameters": ', LLAMA),  # Llama 3.2 describes the object and has no tag
    ("<|tool_call|>", PHI),
)
