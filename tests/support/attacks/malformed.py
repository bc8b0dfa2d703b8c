"""Requests that no client sends: random bytes, deep JSON, wrong types, huge numbers, lone surrogates, torn HTTP.

Seeded, so that a failure can be sent again: `malformed(seed)` yields what to write to a connection.
"""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from art_cli.chat.wires.responses_items import encrypted
from tests.support.attacks.hostile import mutations

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses")
FIELDS = (
    *(
        "model",
        "messages",
        "prompt",
        "temperature",
        "top_p",
        "top_k",
        "max_tokens",
        "max_completion_tokens",
        "stop",
        "n",
    ),
    *(
        "seed",
        "stream",
        "stream_options",
        "logprobs",
        "top_logprobs",
        "tools",
        "tool_choice",
        "response_format",
        "echo",
    ),
    *("input", "instructions", "text", "include", "reasoning", "previous_response_id", "store", "background"),
    *("max_output_tokens", "conversation", "truncation"),
    *("system", "stop_sequences", "thinking", "output_config", "mcp_servers", "context_management"),
    *("chat_template_kwargs", "return_token_ids", "logit_bias", "min_p", "user", "metadata", "temprature", ""),
)
ATOMS = (
    *(
        "null",
        "true",
        "false",
        "0",
        "-0",
        "-1",
        "1.5",
        "1e999",
        "-1e999",
        "9" * 400,
        "-" + "9" * 30,
        "1e-400",
        "2147483648",
    ),
    *('""', '"\\ud800"', '"\\udfff\\ud800"', '"\\u0000"', '"' + "é" * 50 + '"', "[]", "{}", "[[]]", "NaN", "Infinity"),
    *("[1, -1, 99999999999999999999]", '["a", 1]', '{"a": {"b": [null]}}', "'x'", "[1,]", '{"a" 1}', "\x00"),
)
USER = {"role": "user", "content": "hi"}
GOOD = {"model": '"mine"', "messages": json.dumps([USER]), "max_tokens": "2"}
GOODS = {
    "/v1/completions": {"model": '"mine"', "prompt": '"hi"', "max_tokens": "2"},
    "/v1/responses": {"model": '"mine"', "input": json.dumps([USER]), "max_output_tokens": "2"},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "add", "description": "Add.", "parameters": SCHEMA}
CALL = {"id": "call-1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
USE = {"type": "tool_use", "id": "call-1", "name": "add", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "call-1", "content": [{"type": "text", "text": "1"}]}
ANTHROPIC = {
    "model": "mine",
    "system": [{"type": "text", "text": "Add.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        USER,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "so", "signature": "s"}, USE]},
        {"role": "user", "content": [RESULT, {"type": "text", "text": "go on"}]},
    ],
    "tools": [{"name": "add", "description": "Add.", "input_schema": SCHEMA}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
}
# What real clients send on each path: conversations with tools, most of the fields.
RICH: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "mine",
        "messages": [
            {"role": "system", "content": "Add."},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call-1", "content": "1"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "auto",
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
        "temperature": 0.5,
        "stop": ["#"],
        "logprobs": True,
        "top_logprobs": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 2,
    },
    "/v1/completions": {"model": "mine", "prompt": ["hi"], "max_tokens": 2, "logprobs": 1, "echo": False, "n": 2},
    "/v1/messages": {**ANTHROPIC, "max_tokens": 2, "stream": True, "stop_sequences": ["#"], "temperature": 0.5},
    "/v1/messages/count_tokens": ANTHROPIC,
    "/v1/responses": {
        "model": "mine",
        "instructions": "Add.",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": encrypted("so")},
            {"type": "function_call", "call_id": "call-1", "name": "add", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "call-1", "output": "1"},
        ],
        "tools": [{"type": "function", **FUNCTION, "strict": False}],
        "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
        "include": ["reasoning.encrypted_content"],
        "store": False,
        "stream": True,
        "max_output_tokens": 2,
    },
}


class Malformed(NamedTuple):
    data: bytes
    is_whole: bool  # a server can know that it is all there, and must answer


def malformed(seed: int, *, paths: Sequence[str] = PATHS, key: str = "") -> Iterator[Malformed]:
    """Without end: one request, or what a broken client takes for one, after the other; `key` is in their heads."""
    draw = random.Random(seed)
    makers: list[Callable[[random.Random, str], bytes]] = [
        *(noise, torn, wrong_types, wrong_types, deep, messages, binary, heads, mutated, mutated, mutated)
    ]
    known = f"\r\nAuthorization: Bearer {key}\r\nContent-Length".encode() if key else b"\r\nContent-Length"
    while True:
        maker = draw.choice(makers)
        data = maker(draw, draw.choice(paths)).replace(b"\r\nContent-Length", known, 1)
        yield Malformed(data, maker not in (noise, torn, heads))


def post(path: str, body: bytes, *more: str) -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *more,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def noise(draw: random.Random, _: str) -> bytes:
    """No HTTP at all."""
    return draw.randbytes(draw.randrange(1, 400)) + b"\r\n\r\n"


def mutated(draw: random.Random, path: str) -> bytes:
    """What a real client sends, damaged."""
    (body,) = mutations(json.dumps(RICH[path]).encode(), seed=draw.getrandbits(32), count=1)
    return post(path, body)


def binary(draw: random.Random, path: str) -> bytes:
    """Good HTTP around random bytes."""
    return post(path, draw.randbytes(draw.randrange(0, 300)))


def torn(draw: random.Random, path: str) -> bytes:
    """A good request, cut anywhere or with one byte changed."""
    whole = bytearray(post(path, _object(_good(path))))
    if draw.random() < 0.5:
        return bytes(whole[: draw.randrange(1, len(whole))])
    whole[draw.randrange(len(whole))] = draw.randrange(256)
    return bytes(whole)


def wrong_types(draw: random.Random, path: str) -> bytes:
    """A good object with some of its fields replaced by anything."""
    fields = dict(_good(path))
    for _ in range(draw.randrange(1, 4)):
        fields[draw.choice(FIELDS)] = draw.choice(ATOMS)
    return post(path, _object(fields))


def deep(draw: random.Random, path: str) -> bytes:
    depth = draw.choice((50, 65, 1000, 20_000))
    opening, closing = draw.choice((("[", "]"), ('{"a":', "}")))
    nest = opening * depth + ("1" + closing * depth if draw.random() < 0.7 else "")
    return post(path, _object({**_good(path), draw.choice(FIELDS[1:]): nest}))


def messages(draw: random.Random, path: str) -> bytes:
    """Conversations that are none."""
    parts = [draw.choice(ATOMS) for _ in range(draw.randrange(0, 4))]
    keys = ("role", "content", "tool_calls", "tool_call_id", "name", "function", "type", "text", "input", "tool_use_id")
    keys += ("call_id", "arguments", "output", "summary", "encrypted_content", "id")
    parts += [_object({draw.choice(keys): draw.choice(ATOMS), "role": '"user"'}).decode(errors="surrogatepass")]
    if draw.random() < 0.5:
        parts = [_object({"role": '"user"', "content": f"[{', '.join(parts)}]"}).decode(errors="surrogatepass")]
    if path == PATHS[-1] and draw.random() < 0.5:
        kinds = ("message", "function_call", "function_call_output", "reasoning", "item_reference")
        item = {"type": f'"{draw.choice(kinds)}"', **{draw.choice(keys): draw.choice(ATOMS) for _ in range(3)}}
        parts.append(_object(item).decode(errors="surrogatepass"))
    return post(path, _object({**_good(path), list(_good(path))[1]: f"[{', '.join(parts)}]"}))


def heads(draw: random.Random, path: str) -> bytes:
    """Good bodies behind heads that are not."""
    body = _object(_good(path))
    return draw.choice(
        (
            post(path, body, "Content-Length: 5"),
            post(path, body, "Transfer-Encoding: chunked"),
            post(path, body, "X: " + "x" * 70_000),
            post(path, body, "Authorization: Bearer \xff\xfe"),
            post(path, body, "Expect: 100-continue", "Upgrade: websocket", "Connection: Upgrade"),
            post(draw.choice(("*", "//", "/v1/../..", "/v1/models/%00%ff", "http://[", "/" + "a" * 9000)), body),
            body + b"\r\n\r\n",
            b"GET /v1/models HTTP/9.9\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            post(path, body).replace(b"POST", draw.choice((b"BREW", b"CONNECT", b"HEAD", b"OPTIONS"))),
        )
    )


def _good(path: str) -> dict[str, str]:
    """The fields of a request to this path that is answered, the conversation second."""
    return GOODS.get(path, GOOD)


def _object(fields: dict[str, str]) -> bytes:
    """Written by hand: json.dumps would not write what is wrong with these."""
    return ("{" + ", ".join(f"{json.dumps(name)}: {value}" for name, value in fields.items()) + "}").encode()
