"""A request to sample: read, checked, as engines take it; and its answer in JSON and in protocol buffers."""

from typing import Any

import msgspec
import numpy as np

from art_cli.chat.chat_errors import invalid
from art_cli.chat.replies import Reply
from art_cli.chat.requests import Request, Sampling
from art_cli.tinker.server import passes
from art_cli.tinker.server.base_model import Base
from art_cli.tinker.server.futures import SMALL, FutureAnswer
from art_cli.tinker.server.passes import ModelInput
from art_cli.tinker.server.protobuf import messages

REFUSED = ("topk_prompt_logprobs", "topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k")
MAX_STOPS = 64
TOKEN_BYTES = 100  # of a sampled token: its id and two logprobs as Python numbers, and its text


class SamplingParams(msgspec.Struct, forbid_unknown_fields=True):
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class SampleRequest(msgspec.Struct, forbid_unknown_fields=True):
    prompt: ModelInput
    sampling_params: SamplingParams
    num_samples: int = 1
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: int | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: dict[str, Any] | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None
    type: str = "sample"


def sampling_request(request: SampleRequest, base: Base, *, max_samples: int) -> Request:
    """Returns the request as engines take it. Raises ChatError 400 with what is wrong with it."""
    for name in REFUSED:
        if getattr(request, name):
            raise invalid(f"{name}: not served here")
    if request.record_stability_info:
        raise invalid("record_stability_info: not served here, because stable_reinforce is not")
    asked, ids = request.sampling_params, passes.token_ids(request.prompt)
    if request.num_samples > max_samples:
        raise invalid(f"num_samples {request.num_samples}: between 1 and {max_samples}")
    if not ids or min(ids) < 0 or max(ids) >= base.vocabulary:
        raise invalid("prompt: it is empty, or holds a token that the model does not have")
    room = base.max_length - len(ids)
    if room < 1 or (asked.max_tokens is not None and asked.max_tokens > room):
        raise invalid(f"prompt: {len(ids)} tokens and max_tokens {asked.max_tokens}; the context is {base.max_length}")
    stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
    if len(stop) > MAX_STOPS or any(isinstance(each, str) and not 0 < len(each) <= 1000 for each in stop):
        raise invalid(f"sampling_params.stop: at most {MAX_STOPS}, none of them empty or over 1000 characters")
    sampling = Sampling(
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=max(0, asked.top_k),
        max_tokens=room if asked.max_tokens is None else asked.max_tokens,
        stop=tuple(each for each in stop if isinstance(each, str)),
        stop_ids=tuple(each for each in stop if isinstance(each, int)),
        seed=None if asked.seed is None else asked.seed % 2**63,
        n=request.num_samples,
    )
    return Request(model="policy", prompt=ids, sampling=sampling, caps_tokens=True)


def sample_answer(reply: Reply, scores: list[float] | None) -> FutureAnswer:
    """Returns the answer; `scores` are the prompt's logprobs, if they are asked for."""
    size = SMALL + TOKEN_BYTES * (sum(len(choice.token_ids) for choice in reply.choices) + len(scores or ()))
    return FutureAnswer(lambda: _as_json(reply, scores), lambda: _as_proto(reply, scores), size)


def _logprobs(choice: Any) -> list[float]:
    """Returns those of the policy itself, which forward_backward computes too, whatever the temperature was."""
    found: list[float] = choice.logprobs if choice.raw_logprobs is None else choice.raw_logprobs
    return found


def _as_json(reply: Reply, scores: list[float] | None) -> dict[str, Any]:
    sequences = [
        {
            "stop_reason": "length" if choice.finish_reason == "length" else "stop",
            "tokens": choice.token_ids,
            "logprobs": _logprobs(choice),
        }
        for choice in reply.choices
    ]
    prompt = None if scores is None else [None if score != score else score for score in scores]
    return {"type": "sample", "sequences": sequences, "prompt_logprobs": prompt}


def _as_proto(reply: Reply, scores: list[float] | None) -> bytes:
    """Returns a message SampleResponse."""
    sequences = [
        messages.SampledSequence(
            stop_reason=int(choice.finish_reason == "length"),
            tokens=np.array(choice.token_ids, "<i4").tobytes(),
            logprobs=np.array(_logprobs(choice), "<f4").tobytes(),
        )
        for choice in reply.choices
    ]
    prompt = None if scores is None else np.array(scores, "<f4").tobytes()
    raw: bytes = messages.SampleResponse(sequences=sequences, prompt_logprobs=prompt).SerializeToString()
    return raw
