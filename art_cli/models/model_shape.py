"""The hidden size and context length of a model, read from its transformers configuration."""

from typing import Any

from art_cli.config.schema import ModelConfig
from art_cli.models.base_source import loading, require_base
from art_cli.runtime.errors import UsageError

UNKNOWN_WIDTH = 4096  # hidden size assumed for a config without one: an 8B model's, whose learning rate is small
DEFAULT_LENGTH = 4096  # context in tokens of a model whose config names none


def read_shape(base: str) -> Any:
    """Returns the transformers configuration for a hub id or directory. Raises UsageError as `load_weights`."""
    import transformers

    require_base(base, None)
    with loading(base, None):
        return transformers.AutoConfig.from_pretrained(base, trust_remote_code=False)


def width_of(shape: Any) -> int:
    """Returns the size of the hidden states, by default UNKNOWN_WIDTH."""
    return int(getattr(shape.get_text_config(), "hidden_size", UNKNOWN_WIDTH))


def length_of(config: ModelConfig, files: Any) -> int:
    """Returns the number of tokens of prompt and reply together: `model.max_length`, or what the model was made for.

    Raises UsageError if a longer sequence would turn the positions of all others in its batch by other angles.
    """
    most = context_of(files)
    if config.max_length is not None and config.max_length > most and _changes_angles(files):
        raise UsageError(
            f"model.max_length: beyond {most} tokens this model takes other angles; set it to at most {most}"
        )
    return config.max_length or most


def context_of(config: Any) -> int:
    """Returns the number of tokens of prompt and reply that the model of a transformers configuration was made for.

    With a rotary embedding that takes other angles for a batch with a longer sequence in it, it is the length up to
    which it does not: caches and packs hold sequences of all lengths beside each other.
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
