"""The model's own chat template: the variables it reads, and its text of a conversation, up to a length.

transformers compiles it, in its sandbox. It is the only template that ever runs: a client may set variables that it
reads, and nothing else. The text is made piece by piece, so that one that is too long is refused before it is whole.
"""

from typing import Any

from jinja2 import meta
from transformers.utils import chat_template_utils as compiling

from art_cli.chat.chat_errors import ChatError, invalid
from art_cli.chat.requests import RENDERERS_OWN

Json = dict[str, Any]

_ALIASED = getattr(compiling, "_alias_reasoning_fields", list)  # transformers 5.17 gives templates messages as they are


class TooLong(Exception):
    """The text is longer than the caller allows."""


class ChatTemplate:
    """One tokenizer's template. Some tokenizers have a second one for conversations with tools."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._variables: dict[str, frozenset[str]] = {}  # template -> the variables that a client may set

    def render(
        self, messages: list[Json], tools: list[Json], variables: Json, *, most: int, wishes: Json | None = None
    ) -> str:
        """Returns the prompt's text, `most` characters at most. Raises TooLong; ChatError 400 if the template refuses
        it.

        `wishes` are variables that are set where the template reads them and `variables` does not set them.
        The same text as `tokenizer.apply_chat_template(messages, tools, tokenize=False, add_generation_prompt=True)`.
        """
        try:
            source = self._tokenizer.get_chat_template(None, tools or None)
            self._check(source, variables)
            wished = {name: value for name, value in (wishes or {}).items() if name in self._read_by(source)}
            pieces = compiling._compile_jinja_template(source).generate(
                messages=_ALIASED(messages),
                tools=tools or None,
                documents=None,
                add_generation_prompt=True,
                **self._tokenizer.special_tokens_map,
                **wished | variables,
            )
            return _joined(pieces, most)
        except (ChatError, TooLong):
            raise
        except Exception as error:  # a template is a program of its own and fails in any way
            summary = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise invalid(f"messages: the chat template refused them: {summary}", "messages") from error

    def _check(self, source: str, variables: Json) -> None:
        for name in sorted(variables.keys() - self._read_by(source)):
            param = f"chat_template_kwargs.{name[:80]}"
            reads = ", ".join(sorted(self._read_by(source))) or "no variables"
            raise invalid(f"{param}: this model's chat template does not read it; it reads {reads}", param)

    def _read_by(self, source: str) -> frozenset[str]:
        """Returns the variables that a template reads and that only a client sets."""
        if source not in self._variables:
            environment = compiling._compile_jinja_template(source).environment
            read = meta.find_undeclared_variables(environment.parse(source))
            self._variables[source] = frozenset(read - RENDERERS_OWN - self._tokenizer.special_tokens_map.keys())
        return self._variables[source]


def _joined(pieces: Any, most: int) -> str:
    texts, length = [], 0
    for piece in pieces:
        texts.append(piece)
        length += len(piece)
        if length > most:
            raise TooLong
    return "".join(texts)
