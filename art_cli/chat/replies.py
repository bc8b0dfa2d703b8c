"""What comes back, in our words: Reply, whole, and Chunk, a piece of one. Rendering to OpenAI's JSON is below them."""

from typing import Any

import msgspec

Json = dict[str, Any]


class Choice(msgspec.Struct, kw_only=True):
    """One sampled answer. L sampled tokens.

    Example: Choice(index=0, message={"role": "assistant", "content": "4"}, text="4", token_ids=[19, 2],
                    logprobs=[-0.1, -0.0], raw_logprobs=[-0.1, -0.0], tokens=["4", ""], finish_reason="stop")
    """

    index: int
    message: Json | None = None  # chat: the assistant message, tool calls parsed
    text: str = ""  # what was sampled, special tokens left out
    token_ids: list[int] = []  # [L] as sampled, the stop token included
    logprobs: list[float] = []  # [L] under the distribution really sampled from
    raw_logprobs: list[float] | None = None  # [L] under softmax(logits) untouched
    tokens: list[str] = []  # [L] each token as text, for clients that asked for logprobs
    top_logprobs: list[list[tuple[str, float]]] | None = None  # [L][k]
    finish_reason: str = "stop"  # stop, length, tool_calls


class Reply(msgspec.Struct, kw_only=True):
    """The whole answer to one request."""

    id: str
    created: int  # seconds since the epoch
    model: str
    choices: list[Choice]
    prompt_ids: list[int]
    step: int = 0  # the policy's step that sampled it
    sampling: Any = None  # the Sampling really used, defaults filled in; None: the endpoint did not say


class Chunk(msgspec.Struct, kw_only=True):
    """A piece of one choice of a streamed answer.

    The first chunk of a stream carries `prompt_ids`; the last of each choice carries `finish_reason`. `choice` holds
    what is new: its `message` is an OpenAI delta, its token lists are the new tokens only.
    """

    id: str
    created: int
    model: str
    choice: Choice
    is_last: bool = False  # of its choice: finish_reason counts
    prompt_ids: list[int] | None = None
    step: int = 0
    sampling: Any = None
