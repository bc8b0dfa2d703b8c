"""API keys of judge models: read from the environment or a .env file; which of them are missing.

A variable of the environment wins over a .env file. Values of a .env file are taken as they are written: python-dotenv
neither expands variables in them here, nor does it ever run anything.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from dotenv import dotenv_values

from art_cli.config.schema import JudgeModelConfig
from art_cli.errors import UsageError, one_line

DEFAULT_KEY = "OPENAI_API_KEY"  # the variable that every OpenAI-compatible client reads


def load_environment(directory: Path) -> None:
    """Adds to the environment what it lacks and a .env file has: the working directory's, then that of `directory`.

    Raises UsageError: a .env file cannot be read.
    """
    for path in dict.fromkeys((Path.cwd() / ".env", directory.resolve() / ".env")):
        try:
            for name, value in dotenv_values(path, interpolate=False, encoding="utf-8-sig").items():
                if value is not None:
                    os.environ.setdefault(name, value)
        except (OSError, ValueError) as error:  # ValueError: bytes that are not UTF-8, a name or value with a NUL
            raise UsageError(f"{path}: {one_line(error)}") from error


def openai_base() -> str:
    """The address of OpenAI's models, read from the environment as OpenAI's own client and litellm read it."""
    said = os.environ.get("OPENAI_BASE_URL") or os.environ.get("OPENAI_API_BASE")
    return said or "https://api.openai.com/v1"


def missing_key(member: JudgeModelConfig) -> str | None:
    """The variable without which every call to this model would fail. None: it is set, or only the call can tell.

    A provider may take other credentials as well (a cloud's own, an address); then only the call can tell.
    """
    if member.api_key_env is not None:
        return None if os.environ.get(member.api_key_env) else member.api_key_env
    if member.api_base is not None or "api_key" in member.params:
        return None
    if not member.needs_litellm:
        return None if os.environ.get(DEFAULT_KEY) else DEFAULT_KEY
    names = _names_missing(member.model)
    return " or ".join(names) if names and all(name.endswith("_API_KEY") for name in names) else None


def _names_missing(model: str) -> list[str]:
    """The variables that litellm would read for this model and does not find; empty where it does not know."""
    from art_cli.judges.providers.litellm import import_litellm

    try:
        found: Mapping[str, object] = import_litellm().validate_environment(model)
    except Exception:  # the boundary to litellm, which may not be installed, or may not know the model
        return []
    names = found.get("missing_keys")
    return [str(name) for name in names] if isinstance(names, list) else []
