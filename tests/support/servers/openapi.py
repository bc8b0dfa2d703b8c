"""`art serve` as an OpenAPI 3.1 document, for schemathesis. Bodies have the schemas that requests are parsed with."""

from collections.abc import Sequence
from typing import Any

import msgspec

from art_cli.chat.wires.openai_chat import ChatBody
from art_cli.chat.wires.openai_completions import MAX_PROMPTS, CompletionBody
from art_cli.chat.wires.openai_shared import HARMLESS, INT32, NEUTRAL, Body

Json = dict[str, Any]

ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
CHOICES = {"type": "array", "items": {"type": "object", "required": ["index", "finish_reason"]}}
COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")
COMPLETION = {
    "type": "object",
    "required": ["id", "object", "created", "model", "choices", "usage"],
    "properties": {
        "id": {"type": "string"},
        "object": {"enum": ["chat.completion", "text_completion"]},
        "created": {"type": "integer"},
        "model": {"type": "string"},
        "choices": CHOICES,
        "usage": {
            "type": "object",
            "required": list(COUNTS),
            "properties": dict.fromkeys(COUNTS, {"type": "integer", "minimum": 0}),
        },
    },
}
MODEL = {
    "type": "object",
    "required": ["id", "object", "created", "owned_by"],
    "properties": {"id": {"type": "string"}, "object": {"const": "model"}},
}
MODELS = {
    "type": "object",
    "required": ["object", "data"],
    "properties": {
        "object": {"const": "list"},
        "data": {"type": "array", "items": {"$ref": "#/components/schemas/model"}},
    },
}
REFUSALS = {
    "400": "What the request asks cannot be had.",
    "404": "No such model.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "429": "Too many requests are here; Retry-After says when to come again.",
    "503": "The model is being loaded, or the server is shutting down.",
}
WRONG_KEY = {"401": "No key, or one that is not valid here."}
PROMPT: Json = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": INT32}, "minItems": 1},
    ]
}


def describe(models: Sequence[str]) -> Json:
    """The OpenAPI document of a server of these models, which needs a key."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "art serve", "version": "0", "description": "An OpenAI-compatible API."},
        "paths": {
            "/v1/chat/completions": {"post": _completion("chat")},
            "/v1/completions": {"post": _completion("text")},
            "/v1/models": {"get": _get("The models served.", {"$ref": "#/components/schemas/models"}, WRONG_KEY)},
            "/v1/models/{name}": {"get": _model()},
            "/health": {"get": {**_get("The process lives.", {"type": "object"}, {}), "security": []}},
            **dict.fromkeys(
                ("/ready", "/health/ready"),
                {"get": _get("Requests are answered.", {"type": "object"}, {**WRONG_KEY, "503": REFUSALS["503"]})},
            ),
            "/metrics": {"get": _get("Numbers for Prometheus.", {"type": "string"}, WRONG_KEY, "text/plain")},
        },
        "components": {
            "schemas": {
                **body_schemas(models),
                "error": ERROR,
                "completion": COMPLETION,
                "model": MODEL,
                "models": MODELS,
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _completion(kind: str) -> Json:
    body = {"required": True, "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind}"}}}}
    answered = {
        "application/json": {"schema": {"$ref": "#/components/schemas/completion"}},
        "text/event-stream": {"schema": {}},  # each event a piece of a completion, the last one [DONE]
    }
    return {"requestBody": body, "responses": _responses("A completion.", answered, {**REFUSALS, **WRONG_KEY})}


def _model() -> Json:
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    missing = {"404": REFUSALS["404"], **WRONG_KEY}
    return {"parameters": [name], **_get("One of them.", {"$ref": "#/components/schemas/model"}, missing)}


def _get(text: str, schema: Json, refused: dict[str, str], kind: str = "application/json") -> Json:
    return {"responses": _responses(text, {kind: {"schema": schema}}, refused)}


def _responses(text: str, content: Json, refused: dict[str, str]) -> Json:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/error"}}}
    refusals = {code: {"description": why, "content": error} for code, why in sorted(refused.items())}
    return {"200": {"description": text, "content": content}, **refusals}


def body_schemas(models: Sequence[str]) -> dict[str, Json]:
    """JSON Schemas by name: "chat" and "text" are the bodies that the wires parse, the others parts of these two.

    What a schema cannot say of two fields together (`top_logprobs` needs `logprobs`) is left to the parser.
    """
    bodies: dict[str, type[Body]] = {"chat": ChatBody, "text": CompletionBody}
    _, schemas = msgspec.json.schema_components(bodies.values(), ref_template="#/components/schemas/{name}")
    named: dict[str, Json] = {name.strip("_"): schema for name, schema in schemas.items()}
    for kind, struct in bodies.items():
        body = named.pop(struct.__name__)
        fields = body["properties"]
        fields |= {name: {"enum": [None, *neutral]} for name, neutral in NEUTRAL.items()}
        fields |= {name: {} for name in HARMLESS}
        fields["model"] = {"type": "string", "enum": list(models)}
        fields["temperature"] = {"anyOf": [{"enum": [0, None]}, {"type": "number", "minimum": 1e-6, "maximum": 100}]}
        if kind == "text":
            several = {"type": "array", "items": PROMPT, "minItems": 1, "maxItems": MAX_PROMPTS}
            fields["prompt"] = {"anyOf": [*PROMPT["anyOf"], several]}
        named[kind] = {**body, "title": kind, "additionalProperties": False}
    text = msgspec.json.encode(named).replace(b"#/components/schemas/_", b"#/components/schemas/")
    decoded: dict[str, Json] = msgspec.json.decode(text)
    return decoded
