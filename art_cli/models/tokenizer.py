"""A base model's tokenizer, chat template and end-of-reply tokens."""

import contextlib
from collections.abc import Mapping
from functools import partial
from typing import Any

from art_cli.config.schema import ModelConfig
from art_cli.models.base_files import read_template
from art_cli.models.base_source import hide_progress_bars, loading
from art_cli.runtime.errors import UsageError, one_line
from art_cli.runtime.threads import start_in_thread

TEMPLATE_S = 20.0  # longest rendering of a chat of two messages


def load_tokenizer(base: str) -> Any:
    """Returns the tokenizer at `base`, with its chat template, if any, as a single text."""
    import transformers

    hide_progress_bars()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(base, trust_remote_code=False)
        tokenizer.chat_template = one_template(tokenizer.chat_template)
    except Exception as error:  # the boundary to transformers and tokenizers, which also raise plain Exceptions
        raise ValueError(f"its tokenizer (tokenizer.json, tokenizer_config.json): {one_line(error)}") from error
    return tokenizer


def templated_tokenizer(config: ModelConfig, base: str, *, named: str | None = None) -> Any:
    """Returns the tokenizer at `base` with the configured chat template. Raises UsageError without a template."""
    with loading(base, named):
        tokenizer = load_tokenizer(base)
    if config.chat_template is not None:
        tokenizer.chat_template = read_template(config.chat_template)
    if not tokenizer.chat_template:
        cure = "give it a chat_template.jinja" if named else f"{template_cure(tokenizer)} in model.chat_template"
        raise UsageError(f"{base if named else config.base}: its tokenizer has no chat template; {cure}")
    return tokenizer


def one_template(template: str | Mapping[str, str] | None) -> str | None:
    """Combines a tokenizer's named chat templates into one, with the same choice as transformers.

    Hermes 3, Command R and Mistral 7B v0.3 have the named templates `tool_use`, for conversations with tools, and
    `default`. Other names are never used. Leading byte order marks are removed.
    """
    if template is None or isinstance(template, str):
        return template and template.removeprefix("\ufeff")
    texts = {name: text.removeprefix("\ufeff").removesuffix("\n") for name, text in template.items()}
    default, tools = texts.get("default"), texts.get("tool_use")
    if default is None or tools is None:
        return default or tools
    return f"{{%+ if tools +%}}{tools}{{%+ else +%}}{default}{{%+ endif +%}}"  # + preserves adjacent white space


def template_cure(tokenizer: Any) -> str:
    """Returns advice on which chat template to configure, if the tokenizer has none or it ignores tools."""
    speaks = {"<|im_start|>", "<|im_end|>"} <= tokenizer.get_vocab().keys()
    return "name 'builtin' (ChatML with tools, which this model speaks)" if speaks else "name a Jinja file"


def configs_of(base: str) -> list[Any]:
    """Returns the base's generation configuration, if any, and its model configuration."""
    import transformers

    found: list[Any] = [transformers.AutoConfig.from_pretrained(base, trust_remote_code=False)]
    with contextlib.suppress(OSError):  # no generation configuration
        found.insert(0, transformers.GenerationConfig.from_pretrained(base))
    return found


def stop_ids(tokenizer: Any, *configs: Any) -> list[int]:
    """Returns the tokens that end a reply, from tokenizer, generation configuration and model configuration.

    If the chat template ends turns with other tokens, the template's control token after a reply is added: base models
    end texts with <|endoftext|>, but the template assigned to them may end turns with <|im_end|>.
    """
    found, marks = eos_ids(tokenizer, *configs), _turn_end(tokenizer)
    return sorted(found if not found.isdisjoint(marks) else {*found, *marks[:1]})


def eos_ids(*owners: Any) -> set[int]:
    """Returns the end-of-text tokens named by tokenizers and configurations. Raises UsageError for other values."""
    found: list[int] = []
    for owner in owners:
        ids = getattr(owner, "eos_token_id", None)
        found += [] if ids is None else ids if isinstance(ids, list) else [ids]
    if wrong := [id for id in found if type(id) is not int]:
        raise UsageError(f"the model's files: eos_token_id is {wrong[0]!r:.80}, not a token id; restore them")
    return set(found)


def _turn_end(tokenizer: Any) -> list[int]:
    """Returns the control tokens that the chat template writes behind a reply; empty if it rejects a short chat.

    Raises UsageError if the template does not end: it may come from a stranger.
    """
    reply = "fourteen"
    talk = [{"role": "user", "content": "7 + 7"}, {"role": "assistant", "content": reply}]
    try:
        rendered = start_in_thread(partial(tokenizer.apply_chat_template, talk, tokenize=False)).result(TEMPLATE_S)
        _, is_there, end = rendered.rpartition(reply)
        ids = tokenizer(end, add_special_tokens=False).input_ids if is_there else []
    except TimeoutError:
        message = f"the model's chat template did not end within {TEMPLATE_S:g} s for a chat of two messages"
        raise UsageError(f"{message}; model.chat_template takes another one") from None
    except Exception:  # the boundary to the model's own template; base model tokenizers have none
        return []
    added = tokenizer.added_tokens_decoder
    return [id for id in ids if id in added and added[id].special]
