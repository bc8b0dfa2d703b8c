"""What a client asks, in our words: one Request for chat and for plain completions.

`parse_request` (below) reads OpenAI's JSON; everything after it works on these records only.
"""

from typing import Any

import msgspec

Json = dict[str, Any]


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How to sample one request. None in a client's request means: the endpoint's default."""

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    max_tokens: int | None = None  # None: to the end of the context
    stop: tuple[str, ...] = ()
    seed: int | None = None
    n: int = 1


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One call. Exactly one of `messages` (chat) and `prompt` (plain completion) is set."""

    model: str
    sampling: Sampling
    messages: list[Json] | None = None  # as the client sent them
    prompt: str | list[int] | None = None
    tools: list[Json] = []
    tool_choice: str | Json = "auto"  # "auto", "none", "required", or a named function
    response_format: Json | None = None
    template_kwargs: Json = {}  # chat_template_kwargs: {"enable_thinking": false}
    is_stream: bool = False
    wants_usage: bool = False  # stream_options.include_usage
    wants_logprobs: bool = False
    top_logprobs: int = 0
    wants_token_ids: bool = False  # vLLM's return_token_ids
    echo: bool = False
    user_set: frozenset[str] = frozenset()  # the sampling fields that the client itself gave
