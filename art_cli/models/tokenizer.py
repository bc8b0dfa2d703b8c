"""A base model's tokenizer, its chat template, and the tokens that end a reply."""

import contextlib
from collections.abc import Mapping
from typing import Any

from art_cli.config.schema import ModelConfig
from art_cli.models.base_files import read_template
from art_cli.models.base_source import hide_progress_bars, loading
from art_cli.runtime.errors import UsageError, one_line


def load_tokenizer(base: str) -> Any:
    """Returns the tokenizer at `base`. Its chat template is one text or None."""
    import transformers

    hide_progress_bars()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(base, trust_remote_code=False)
        tokenizer.chat_template = one_template(tokenizer.chat_template)
    except Exception as error:  # the boundary to transformers and tokenizers, which raise plain Exceptions as well
        raise ValueError(f"its tokenizer (tokenizer.json, tokenizer_config.json): {one_line(error)}") from error
    return tokenizer


def templated_tokenizer(config: ModelConfig, base: str, *, named: str | None = None) -> Any:
    """Returns the tokenizer at `base` with the configuration's chat template. Raises UsageError: it has none."""
    with loading(base, named):
        tokenizer = load_tokenizer(base)
    if config.chat_template is not None:
        tokenizer.chat_template = read_template(config.chat_template)
    if not tokenizer.chat_template:
        cure = "give it a chat_template.jinja" if named else f"{template_cure(tokenizer)} in model.chat_template"
        raise UsageError(f"{base if named else config.base}: its tokenizer has no chat template; {cure}")
    return tokenizer


def one_template(template: str | Mapping[str, str] | None) -> str | None:
    """Returns a tokenizer's chat template as one text that chooses as transformers does.

    Hermes 3, Command R and Mistral 7B v0.3 have named templates: `tool_use` for conversations with tools, and
    `default`. Other names are never chosen. A byte order mark in front is no part of a template.
    """
    if template is None or isinstance(template, str):
        return template and template.removeprefix("\ufeff")
    texts = {name: text.removeprefix("\ufeff").removesuffix("\n") for name, text in template.items()}
    default, tools = texts.get("default"), texts.get("tool_use")
    if default is None or tools is None:
        return default or tools
    return f"{{%+ if tools +%}}{tools}{{%+ else +%}}{default}{{%+ endif +%}}"  # + keeps the white space at its side


def template_cure(tokenizer: Any) -> str:
    """Returns what to name as the chat template, for a tokenizer without one or with one that leaves out the tools."""
    speaks = {"<|im_start|>", "<|im_end|>"} <= tokenizer.get_vocab().keys()
    return "name 'builtin' (ChatML with tools, which this model speaks)" if speaks else "name a Jinja file"


def configs_of(base: str) -> list[Any]:
    """Returns the base's generation configuration, where it has one, and its model configuration."""
    import transformers

    found: list[Any] = [transformers.AutoConfig.from_pretrained(base, trust_remote_code=False)]
    with contextlib.suppress(OSError):  # it has none
        found.insert(0, transformers.GenerationConfig.from_pretrained(base))
    return found


def stop_ids(tokenizer: Any, *configs: Any) -> list[int]:
    """Returns the tokens that end a reply, by a tokenizer, a generation configuration and a model's.

    Where none of them ends a turn of the chat template, its first control token behind a reply is one too: a base model
    ends texts with <|endoftext|>, and a template that it is given ends turns with <|im_end|>.
    """
    found, marks = eos_ids(tokenizer, *configs), _turn_end(tokenizer)
    return sorted(found if not found.isdisjoint(marks) else {*found, *marks[:1]})


def eos_ids(*owners: Any) -> set[int]:
    """Returns the ends of text that tokenizers and configurations name."""
    found: set[int] = set()
    for owner in owners:
        ids = getattr(owner, "eos_token_id", None)
        found.update([] if ids is None else ids if isinstance(ids, list) else [ids])
    return found


def _turn_end(tokenizer: Any) -> list[int]:
    """Returns the control tokens that the chat template writes behind a reply; none if it refuses so short a talk."""
    reply = "fourteen"
    talk = [{"role": "user", "content": "7 + 7"}, {"role": "assistant", "content": reply}]
    try:
        _, is_there, end = tokenizer.apply_chat_template(talk, tokenize=False).rpartition(reply)
        ids = tokenizer(end, add_special_tokens=False).input_ids if is_there else []
    except Exception:  # the boundary to the model's own template; a tokenizer of a base model has none
        return []
    added = tokenizer.added_tokens_decoder
    return [id for id in ids if id in added and added[id].special]
