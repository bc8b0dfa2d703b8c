"""Requests that no client sends: random bytes, deep JSON, wrong types, huge numbers, lone surrogates, torn HTTP.

Seeded, so that a failure can be sent again: `malformed(seed)` yields what to write to a connection.
"""

import json
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

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
GOOD = {"model": '"mine"', "messages": '[{"role": "user", "content": "hi"}]', "max_tokens": "2"}
GOOD_RESPONSE = {"model": '"mine"', "input": '[{"role": "user", "content": "hi"}]', "max_output_tokens": "2"}


class Malformed(NamedTuple):
    data: bytes
    is_whole: bool  # a server can know that it is all there, and must answer


def malformed(seed: int) -> Iterator[Malformed]:
    """Without end: one request, or what a broken client takes for one, after the other."""
    draw = random.Random(seed)
    makers: list[Callable[[random.Random], bytes]] = [
        noise,
        torn,
        wrong_types,
        wrong_types,
        deep,
        messages,
        binary,
        heads,
    ]
    while True:
        maker = draw.choice(makers)
        yield Malformed(maker(draw), maker not in (noise, torn, heads))


def post(path: str, body: bytes, *more: str) -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *more,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def noise(draw: random.Random) -> bytes:
    """No HTTP at all."""
    return draw.randbytes(draw.randrange(1, 400)) + b"\r\n\r\n"


def binary(draw: random.Random) -> bytes:
    """Good HTTP around random bytes."""
    return post(draw.choice(PATHS), draw.randbytes(draw.randrange(0, 300)))


def torn(draw: random.Random) -> bytes:
    """A good request, cut anywhere or with one byte changed."""
    path = draw.choice(PATHS)
    whole = bytearray(post(path, _object(_good(path))))
    if draw.random() < 0.5:
        return bytes(whole[: draw.randrange(1, len(whole))])
    whole[draw.randrange(len(whole))] = draw.randrange(256)
    return bytes(whole)


def wrong_types(draw: random.Random) -> bytes:
    """A good object with some of its fields replaced by anything."""
    path = draw.choice(PATHS)
    fields = dict(_good(path))
    for _ in range(draw.randrange(1, 4)):
        fields[draw.choice(FIELDS)] = draw.choice(ATOMS)
    return post(path, _object(fields))


def deep(draw: random.Random) -> bytes:
    depth = draw.choice((50, 65, 1000, 20_000))
    opening, closing = draw.choice((("[", "]"), ('{"a":', "}")))
    nest = opening * depth + ("1" + closing * depth if draw.random() < 0.7 else "")
    path = draw.choice(PATHS)
    return post(path, _object({**_good(path), draw.choice(FIELDS[1:]): nest}))


def messages(draw: random.Random) -> bytes:
    """Conversations that are none."""
    parts = [draw.choice(ATOMS) for _ in range(draw.randrange(0, 4))]
    keys = ("role", "content", "tool_calls", "tool_call_id", "name", "function", "type", "text", "input", "tool_use_id")
    keys += ("call_id", "arguments", "output", "summary", "encrypted_content", "id")
    parts += [_object({draw.choice(keys): draw.choice(ATOMS), "role": '"user"'}).decode(errors="surrogatepass")]
    if draw.random() < 0.5:
        parts = [_object({"role": '"user"', "content": f"[{', '.join(parts)}]"}).decode(errors="surrogatepass")]
    path = draw.choice(PATHS)
    if path == PATHS[-1] and draw.random() < 0.5:
        kinds = ("message", "function_call", "function_call_output", "reasoning", "item_reference")
        item = {"type": f'"{draw.choice(kinds)}"', **{draw.choice(keys): draw.choice(ATOMS) for _ in range(3)}}
        parts.append(_object(item).decode(errors="surrogatepass"))
    return post(path, _object({**_good(path), list(_good(path))[1]: f"[{', '.join(parts)}]"}))


def heads(draw: random.Random) -> bytes:
    """Good bodies behind heads that are not."""
    body = _object(GOOD)
    return draw.choice(
        (
            post(PATHS[0], body, "Content-Length: 5"),
            post(PATHS[0], body, "Transfer-Encoding: chunked"),
            post(PATHS[0], body, "X: " + "x" * 70_000),
            post(PATHS[0], body, "Authorization: Bearer \xff\xfe"),
            post(PATHS[0], body, "Expect: 100-continue", "Upgrade: websocket", "Connection: Upgrade"),
            post(draw.choice(("*", "//", "/v1/../..", "/v1/models/%00%ff", "http://[", "/" + "a" * 9000)), body),
            body + b"\r\n\r\n",
            b"GET /v1/models HTTP/9.9\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            post(PATHS[0], body).replace(b"POST", draw.choice((b"BREW", b"CONNECT", b"HEAD", b"OPTIONS"))),
        )
    )


def _good(path: str) -> dict[str, str]:
    """The fields of a request to this path that is answered, the conversation second."""
    return GOOD_RESPONSE if path == PATHS[-1] else GOOD


def _object(fields: dict[str, str]) -> bytes:
    """Written by hand: json.dumps would not write what is wrong with these."""
    return ("{" + ", ".join(f"{json.dumps(name)}: {value}" for name, value in fields.items()) + "}").encode()
