"""SystemPrompt: a policy consisting of text. It is stored as a checkpoint's prompt.json and rewrites the agent's
calls."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from art_cli.chat.chat_errors import invalid
from art_cli.chat.requests import Request, text_of
from art_cli.runs.durable import read_object
from art_cli.runs.trajectory import SCHEMA_VERSION
from art_cli.runtime.errors import CheckpointError, DataError, one_line

PROMPT_FILE = "prompt.json"
MAX_PART = 20_000  # maximum characters per part; the longest prompts in the GEPA paper have about 10,000
SYSTEM = ("system", "developer")  # roles of instructing messages

Place = Literal["after", "instead"]
Text = Annotated[str, msgspec.Meta(max_length=MAX_PART)]


class SystemPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """Example: SystemPrompt(parts={"role": "You sell tickets.", "rules": "Name the price first."}, place="after")"""

    schema_version: int = SCHEMA_VERSION
    parts: dict[str, Text]  # in prompt order
    place: Place  # "after" appends to the agent's system message; "instead" replaces it

    @property
    def text(self) -> str:
        return "\n\n".join(part for part in self.parts.values() if part)

    def apply(self, request: Request) -> Request:
        """Returns the request with the prompt in its system message. Raises ChatError for plain completions."""
        if not self.text:
            return request
        if request.messages is None:
            raise invalid("the policy is a system message, and a plain completion cannot carry it; send messages")
        first, rest = request.messages[:1], request.messages[1:]
        if not first or first[0].get("role") not in SYSTEM:
            return msgspec.structs.replace(request, messages=[{"role": "system", "content": self.text}, *first, *rest])
        before = text_of(first[0].get("content")) if self.place == "after" else ""
        content = f"{before}\n\n{self.text}" if before else self.text
        return msgspec.structs.replace(request, messages=[{**first[0], "content": content}, *rest])


def is_prompt(checkpoint: Path) -> bool:
    """Returns True if the checkpoint's policy is a prompt without weights."""
    return (checkpoint / PROMPT_FILE).is_file()


def read_prompt(checkpoint: Path | None) -> SystemPrompt | None:
    """Returns a checkpoint's prompt; None for weights. Raises CheckpointError if the file cannot be read."""
    if checkpoint is None or not is_prompt(checkpoint):
        return None
    try:
        return msgspec.convert(read_object(checkpoint / PROMPT_FILE, within=checkpoint), SystemPrompt)
    except (DataError, ValueError) as error:  # msgspec's errors are ValueErrors
        raise CheckpointError(f"{checkpoint}: {PROMPT_FILE} cannot be read: {one_line(error)}") from error
