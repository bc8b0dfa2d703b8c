"""API keys of judge models: which of them are missing in the environment."""

import os
from collections.abc import Mapping

from art_cli.config.schema import JudgeModelConfig

DEFAULT_KEY = "OPENAI_API_KEY"  # the variable that every OpenAI-compatible client reads


def openai_base() -> str:
    """Returns the address of OpenAI's models, read from the environment as OpenAI's own client and litellm read it."""
    said = os.environ.get("OPENAI_BASE_URL") or os.environ.get("OPENAI_API_BASE")
    return said or "https://api.openai.com/v1"


def missing_key(member: JudgeModelConfig) -> str | None:
    """Returns the variable without which every call would fail, or None if it is set, or only a call can show that.

    A provider may take other credentials as well (a cloud's own, an address); then only a call can show that.
    """
    if member.api_key_env is not None:
        return None if os.environ.get(member.api_key_env) else member.api_key_env
    if member.base_url is not None or "api_key" in member.params:
        return None
    if not member.needs_litellm:
        return None if os.environ.get(DEFAULT_KEY) else DEFAULT_KEY
    names = _names_missing(member.model)
    return " or ".join(names) if names and all(name.endswith("_API_KEY") for name in names) else None


def _names_missing(model: str) -> list[str]:
    """Returns the variables that litellm would read for this model and does not find; empty where it does not know."""
    from art_cli.judges.providers.litellm import import_litellm

    try:
        found: Mapping[str, object] = import_litellm().validate_environment(model)
    except Exception:  # the boundary to litellm, which may not be installed, or may not know the model
        return []
    names = found.get("missing_keys")
    return [str(name) for name in names] if isinstance(names, list) else []
