"""The description of the API as OpenAPI 3.1. The bodies' schemas are those that requests are parsed with."""

from collections.abc import Sequence
from typing import Any

from art_cli.chat.requests import body_schemas

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
OF_A_PAGE = {"403": "A web page of another site asks.", "421": "The Host header names another machine."}
NO_JSON = {"415": "The body is not declared to be JSON."}


def describe(models: Sequence[str], *, version: str, needs_key: bool) -> Json:
    """The OpenAPI document of a server of these models."""
    refused = WRONG_KEY if needs_key else OF_A_PAGE
    document: Json = {
        "openapi": "3.1.0",
        "info": {"title": "art serve", "version": version, "description": "An OpenAI-compatible API."},
        "paths": {
            "/v1/chat/completions": {"post": _completion("chat", refused if needs_key else {**refused, **NO_JSON})},
            "/v1/completions": {"post": _completion("text", refused if needs_key else {**refused, **NO_JSON})},
            "/v1/models": {"get": _get("The models served.", {"$ref": "#/components/schemas/models"}, refused)},
            "/v1/models/{name}": {"get": _model(refused)},
            "/health": {
                "get": {**_get("The process lives.", {"type": "object"}, {} if needs_key else refused), "security": []}
            },
            "/ready": {"get": _get("Requests are answered.", {"type": "object"}, {**refused, "503": REFUSALS["503"]})},
            "/metrics": {"get": _get("Numbers for Prometheus.", {"type": "string"}, refused, "text/plain")},
            "/openapi.json": {"get": _get("This document.", {"type": "object"}, refused)},
        },
        "components": {
            "schemas": {
                **body_schemas(models),
                "error": ERROR,
                "completion": COMPLETION,
                "model": MODEL,
                "models": MODELS,
            }
        },
    }
    if needs_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _completion(kind: str, refused: dict[str, str]) -> Json:
    body = {"required": True, "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind}"}}}}
    answered = {
        "application/json": {"schema": {"$ref": "#/components/schemas/completion"}},
        "text/event-stream": {"schema": {}},  # each event a piece of a completion, the last one [DONE]
    }
    return {"requestBody": body, "responses": _responses("A completion.", answered, {**REFUSALS, **refused})}


def _model(refused: dict[str, str]) -> Json:
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    missing = {"404": REFUSALS["404"], **refused}
    return {"parameters": [name], **_get("One of them.", {"$ref": "#/components/schemas/model"}, missing)}


def _get(text: str, schema: Json, refused: dict[str, str], kind: str = "application/json") -> Json:
    return {"responses": _responses(text, {kind: {"schema": schema}}, refused)}


def _responses(text: str, content: Json, refused: dict[str, str]) -> Json:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/error"}}}
    refusals = {code: {"description": why, "content": error} for code, why in sorted(refused.items())}
    return {"200": {"description": text, "content": content}, **refusals}
