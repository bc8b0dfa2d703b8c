"""Syntaxes in which model families write tool calls: the markers around a call, and its reading.

    hermes    <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>              Qwen 2.5 and 3, Hermes
    xml       <tool_call><function=f><parameter=a>1</parameter></function></tool_call>  Qwen3-Coder
    glm       <tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>      GLM 4.5
    mistral   [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}], [TOOL_CALLS]f[ARGS]{"a": 1}
    llama     {"name": "f", "parameters": {"a": 1}}, with or without <|python_tag|>     Llama 3
    phi       <|tool_call|>[{"name": "f", "arguments": {"a": 1}}]<|/tool_call|>         Phi-4-mini

Each syntax reads the text between its two markers and returns the calls in it, or None where that text is no call and
stays content. The arguments of JSON syntaxes stay exactly the sampled text. The others are written as JSON, each value
by the type in the tool's schema.

An argument may quote the marks of its syntax. A mark in a JSON string is text. The arguments of xml and glm end at the
last closing mark before the next argument or the end of the call.
"""

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
Schemas = Mapping[str, Json]  # a tool's name -> the JSON Schema of its parameters

SPACE = " \n\r\t"


@dataclass(frozen=True)
class CallSyntax:
    """Example: CallSyntax("hermes", "<tool_call>", "</tool_call>", read_json_call)"""

    name: str
    begin: str
    end: str  # "": a call lasts until the end of the reply
    read: Callable[[str, Schemas], list[Json] | None]
    is_quoted: Callable[[str], bool] = lambda body: False  # whether an end behind this text is part of an argument
    is_bare_json: bool = False  # whether a reply that is one JSON object with a name is a call without `begin` too

    @property
    def can_be_forced(self) -> bool:
        """Returns whether a grammar can hold a reply to this syntax (grammars.py writes Hermes calls)."""
        return self.name == "hermes"


def find_syntax(template: str) -> CallSyntax:
    """Returns the syntax of a model's chat template; Hermes where the template shows none."""
    for mark, syntax in _BY_MARK:
        if mark in template:
            return syntax
    return HERMES


def call_of(name: str, arguments: str) -> Json:
    """Returns the OpenAI tool call with a new id; `arguments` is JSON text."""
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def schemas_of(tools: Sequence[Json]) -> Schemas:
    return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)
_ESCAPE = re.compile(r"\\.", re.DOTALL)

# --- JSON -------------------------------------------------------------------------------------------------------------


def read_json_call(body: str, _: Schemas = {}) -> list[Json] | None:  # noqa: B006  (read only)
    """Returns one object with `name` and `arguments` (or `parameters`)."""
    call = _json_call(body.strip(SPACE))
    return None if call is None else [call]


def read_json_calls(body: str, _: Schemas) -> list[Json] | None:
    """Returns a list of objects with `name` and `arguments`, or one, or several joined by semicolons (Llama)."""
    return _calls_in(body, _json_call)


def _ends_in_string(body: str) -> bool:
    """Returns True if the text ends inside a JSON string."""
    return _ESCAPE.sub("", body).count('"') % 2 == 1


def _calls_in(body: str, read: Callable[[str], Json | None]) -> list[Json] | None:
    text = body.strip(SPACE)
    texts = _split(text, "[") if text.startswith("[") else _split_objects(text)
    calls = [read(one) for one in texts or ()]
    return [call for call in calls if call is not None] if calls and None not in calls else None


def _json_call(text: str) -> Json | None:
    """Returns the call in an object's text, its arguments exactly as sampled, or None if it is no call."""
    fields = read_object(text)
    if fields is None or "name" not in fields:
        return None
    name = json.loads(fields["name"])
    arguments = fields.get("arguments", fields.get("parameters", "{}"))
    if not isinstance(name, str) or not arguments.startswith("{"):
        return None
    return call_of(name, arguments)


def read_object(text: str) -> dict[str, str] | None:
    """Returns a JSON object's fields, each value as its text, or None if the text is not one object."""
    parts = _split(text, "{")
    return (
        None if parts is None else {json.loads(key): value for key, value in zip(parts[::2], parts[1::2], strict=True)}
    )


def _split(text: str, opening: str) -> list[str] | None:
    """Returns the texts of a JSON list's items or an object's keys and values in turn, or None if it is neither."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    if not text.startswith(opening):
        return None
    parts, offset = [], 1
    while text[offset] not in "]}":
        if text[offset] in SPACE + ",:":
            offset += 1
        else:
            _, end = _DECODER.raw_decode(text, offset)
            parts.append(text[offset:end])
            offset = end
    return parts


def _split_objects(text: str) -> list[str] | None:
    items, offset = [], 0
    while offset < len(text):
        try:
            _, end = _DECODER.raw_decode(text, offset)
        except (ValueError, RecursionError):
            return None
        items.append(text[offset:end])
        offset = end
        while offset < len(text) and text[offset] in SPACE + ";":
            offset += 1
    return items


# --- the others -------------------------------------------------------------------------------------------------------

_MISTRAL_ID = re.compile(r"[a-zA-Z0-9]{9}")
_ARGUMENTS = re.compile(r"\s*([\w.\-]{1,200})\s*(?:\[CALL_ID\](\w*)[^\[]*)?\[ARGS\]\s*", re.ASCII)
_FUNCTION_START = re.compile(r"\s*<function=")
_FUNCTION = re.compile(r"\s*<function=([^>\n]{1,200})>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]{1,200})>\n?(.*?)\n?</parameter>\s*(?=<parameter=|\Z)", re.DOTALL)
_GLM_NAME = re.compile(r"\s*([\w.\-]{1,200})\s*(?=<arg_key>|$)", re.ASCII)
_GLM_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*(?=<arg_key>|\Z)", re.DOTALL)


def read_mistral_calls(body: str, schemas: Schemas) -> list[Json] | None:
    """Returns a JSON list, or `name[ARGS]{...}` once for each call, `[TOOL_CALLS]` between them.

    Mistral's templates refuse an id that is not 9 letters and digits. Those that write the list write the id in it, so
    the id that the model sampled is the call's.
    """
    if body.lstrip(SPACE)[:1] in ("[", "{"):
        return _calls_in(body, _mistral_call)
    calls, offset = [], 0
    while found := _ARGUMENTS.match(body, offset):
        try:
            _, end = _DECODER.raw_decode(body, found.end())
        except (ValueError, RecursionError):
            return None
        arguments = body[found.end() : end]
        if not arguments.startswith("{"):
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
    """`<function=f><parameter=a>text</parameter></function>`, or JSON as Hermes writes it."""
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
    """`f<arg_key>a</arg_key><arg_value>text</arg_value>`"""
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
    """Returns the value of a text: itself where it may be a string or is not JSON, else its JSON value."""
    if text != "null" and _may_be_text(schema):
        return text
    if text in ("True", "False"):  # as models write what they read of Python
        return text == "True"
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # 1e999 and half a surrogate pair are not JSON
    except (ValueError, RecursionError):
        return text
    return value


def _may_be_text(schema: Any) -> bool:
    """Returns whether a schema names strings: as its type, one of its types, one of its values, or in one of several
    schemas, as pydantic writes `str | None`."""
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

_BY_MARK = (  # the first mark that a template contains decides
    ("<function=", XML),
    ("<arg_key>", GLM),
    ("<tool_call>", HERMES),
    ("[TOOL_CALLS]", MISTRAL),
    ("<|python_tag|>", LLAMA),
    ('"parameters": ', LLAMA),  # Llama 3.2 describes the object and has no tag
    ("<|tool_call|>", PHI),
)
