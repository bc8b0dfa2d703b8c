"""Request: a client's request, the same record for every client protocol. wires/ parses each protocol's JSON."""

from typing import Any

import msgspec

Json = dict[str, Any]

# Names that clients may not set in `template_kwargs`: parameters of transformers' `apply_chat_template`, and variables
# that it passes to every template.
RENDERERS_OWN = frozenset(
    {
        *("self", "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "kwargs"),
        *("conversations", "chat_template_kwargs", "template_kwargs", "bos_token", "eos_token", "pad_token"),
        *("unk_token", "sep_token", "cls_token", "mask_token", "additional_special_tokens"),
    }
)
RESHAPING = ("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "min_tokens")
# Sampling fields replaced by `force_sampling`. They reduce variety between attempts or truncate the distribution.
FORCED = ("temperature", "top_p", "top_k", "seed")
MIN_TEMPERATURE = 1e-6  # logits divided by a lower temperature leave the range of float32


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    max_tokens: int | None = None  # None means up to the end of the context
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()  # tokens that end the reply, in addition to the model's own
    seed: int | None = None
    n: int = 1
    presence_penalty: float = 0.0  # subtracted once from the logit of each sampled token
    frequency_penalty: float = 0.0  # subtracted for each time a token was sampled
    repetition_penalty: float = 1.0  # divides positive and multiplies negative logits of the tokens so far
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, number added to its logit)
    min_tokens: int = 0  # minimum number of sampled tokens before the reply may end
    ignore_eos: bool = False  # the model's own end tokens are sampled and end nothing

    @property
    def reshaping(self) -> list[str]:
        """Names of the active fields that change the logits, so a learner cannot compute the sampled distribution."""
        return [name for name in RESHAPING if getattr(self, name) != getattr(_NEUTRAL, name)]


_NEUTRAL = Sampling()


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One call. Exactly one of `messages` (chat) and `prompt` (plain completion) is set."""

    model: str
    sampling: Sampling
    id: str = ""  # id of the reply; "": the wire uses the reply's id
    messages: list[Json] | None = None  # messages in OpenAI's chat format, for all client protocols
    prompt: str | list[int] | None = None
    more_prompts: list[str | list[int]] = []  # further prompts; the application sends a request for each
    tools: list[Json] = []
    tool_choice: str | Json = "auto"  # "auto", "none", "required", or a named function
    calls_in_parallel: bool = True  # whether a reply may have several tool calls
    failed_calls: frozenset[str] = frozenset()  # ids of calls whose tool message is an error
    response_format: Json | None = None  # OpenAI's json_object or json_schema; None means text
    template_kwargs: Json = {}  # chat_template_kwargs: {"enable_thinking": false}
    thinks: bool | None = None  # whether the model thinks, if the template supports it; default: the template's default
    caps_tokens: bool = False  # whether max_tokens is only an upper bound, so the context may end the reply earlier
    is_stream: bool = False
    wants_usage: bool = False  # stream_options.include_usage
    wants_running_usage: bool = False  # vLLM's stream_options.continuous_usage_stats: usage in each event
    wants_logprobs: bool = False
    # whether reported logprobs are under the sampled distribution instead of softmax(logits)
    is_processed: bool = False
    top_logprobs: int = 0
    wants_token_ids: bool = False  # vLLM's return_token_ids
    echo: bool = False  # the wire puts the prompt before the text
    instructions: str | None = None  # prefix of the system message, only for this call
    # id of the earlier reply that the messages continue (`Memory` in wires/openai_responses.py)
    previous: str | None = None
    is_kept: bool = False  # whether later requests may refer to the reply by `id`
    repeated: Json = {}  # fields that the wire echoes in its reply; backends ignore them
    digest: bytes = b""  # hash of the body, used by the gateway to recognize retries
    is_count: bool = False  # only the prompt's number of tokens is wanted
    is_recorded: bool = True  # False: the gateway writes no turn down (a question about a prompt, an opponent's move)
    num_retries: int = 0  # number of earlier times that the client's SDK sent this body and gave up
    group: str | None = None  # id of the attempt's group, whose prompts share a prefix; used for routing to servers
    state: str | None = None  # key of the environment's state, from the header X-Art-State
    conversation: str | None = None  # X-Art-Conversation; assigns calls to conversations in `art gateway`
    scenario: str | None = None  # X-Art-Scenario; groups attempts at the same task in `art gateway`
    user_set: frozenset[str] = frozenset()  # names of the sampling fields that the client gave
    overridden: Json = {}  # sampling fields that the gateway replaced, with the values that the client gave


def needs_echo(request: Request) -> bool:
    """Returns whether the backend must fill in `Choice.echo`, because the wire only has the prompt's text."""
    return request.echo and (request.wants_logprobs or not isinstance(request.prompt, str))


def demands_format(request: Request) -> bool:
    """Returns whether the reply has to be JSON or a tool call."""
    return request.response_format is not None or request.tool_choice not in ("auto", "none")


def masks_logits(request: Request) -> bool:
    """Returns whether a format, forced call, penalty or bias changes the logits in ways no learner can reproduce."""
    return demands_format(request) or bool(request.sampling.reshaping)


def with_defaults(request: Request, defaults: Sampling) -> Request:
    """Returns the request with `defaults` for the sampling fields that the client did not give."""
    given = {name: getattr(request.sampling, name) for name in request.user_set}
    return msgspec.structs.replace(request, sampling=msgspec.structs.replace(defaults, **given))


def force_sampling(request: Request, defaults: Sampling) -> Request:
    """Replaces the fields in FORCED by `defaults`. `overridden` holds the client's different values."""
    given = {name: getattr(request.sampling, name) for name in FORCED if name in request.user_set}
    overridden = {name: value for name, value in given.items() if value != getattr(defaults, name)}
    forced = {name: getattr(defaults, name) for name in FORCED}
    sampling = msgspec.structs.replace(request.sampling, **forced)
    return msgspec.structs.replace(request, sampling=sampling, overridden={**request.overridden, **overridden})


def cap_tokens(request: Request, most: int | None) -> Request:
    """Limits max_tokens to `most`, if max_tokens is only a bound. `overridden` holds the client's value."""
    asked = request.sampling.max_tokens
    if not request.caps_tokens or most is None or asked is None or asked <= most:
        return request
    sampling = msgspec.structs.replace(request.sampling, max_tokens=most)
    return msgspec.structs.replace(request, sampling=sampling, overridden={**request.overridden, "max_tokens": asked})


def text_of(content: str | list[Json] | None, between: str = "") -> str:
    """Returns a message's content as a string: text parts are joined, and null is empty."""
    if isinstance(content, list):
        return between.join(part.get("text") or part.get("refusal") or "" for part in content)
    return content or ""


def prompt_text(content: str | list[Json] | None) -> str:
    """Returns the same as a template gets it: parts are joined by line breaks, as vLLM joins them."""
    return text_of(content, "\n")
