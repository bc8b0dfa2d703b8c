"""A model's hidden size and context length, read from the transformers configuration."""

from typing import Any

from art_cli.config.schema import ModelConfig
from art_cli.models.base_source import loading, require_base
from art_cli.runtime.errors import UsageError

UNKNOWN_WIDTH = 4096  # assumed hidden size if the config lacks it: an 8B model's, so the learning rate stays small
DEFAULT_LENGTH = 4096  # assumed context in tokens if the config lacks it


def read_shape(base: str) -> Any:
    """Returns the transformers configuration for a hub id or directory. Raises UsageError like `load_weights`."""
    import transformers

    require_base(base, None)
    with loading(base, None):
        return transformers.AutoConfig.from_pretrained(base, trust_remote_code=False)


def width_of(shape: Any) -> int:
    """Returns the size of the hidden states, by default UNKNOWN_WIDTH."""
    return int(getattr(shape.get_text_config(), "hidden_size", UNKNOWN_WIDTH))


def length_of(config: ModelConfig, files: Any) -> int:
    """Returns the context length for prompt and reply together: `model.max_length`, by default the model's own.

    Raises UsageError if longer sequences would change the rotary angles of all sequences in their batch.
    """
    most = context_of(files)
    if config.max_length is not None and config.max_length > most and _changes_angles(files):
        raise UsageError(
            f"model.max_length: beyond {most} tokens this model takes other angles; set it to at most {most}"
        )
    return config.max_length or most


def context_of(config: Any) -> int:
    """Returns the context length in a transformers configuration, for prompt and reply together.

    Some rotary embeddings change their angles when a batch has a longer sequence. Caches and packs mix sequences of all
    lengths, so in this case the result is the longest length with unchanged angles.
    """
    text = config.get_text_config()
    length: int | None = getattr(text, "max_position_embeddings", None)
    if _changes_angles(config):
        original = _rope_of(text).get("original_max_position_embeddings")
        length = original or getattr(text, "original_max_position_embeddings", None) or length
    return length or DEFAULT_LENGTH


def _changes_angles(config: Any) -> bool:
    rope = _rope_of(config.get_text_config())
    return (rope.get("rope_type") or rope.get("type")) in ("longrope", "dynamic")


def _rope_of(text: Any) -> dict[str, Any]:
    found = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    return found if isinstance(found, dict) else {}
