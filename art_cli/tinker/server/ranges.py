"""RANGES: the range of every number that a client may send, by the name of its field. One outside is refused when read.

A server's own limits (BackendLimits, the model's vocabulary and context) are narrower; they are checked where they are
known. A test holds that each number of the records of requests has its line here.
"""

import sys
from typing import Any, NamedTuple, TypeVar

import msgspec

from art_cli.chat.chat_errors import invalid

Record = TypeVar("Record")

INT32, INT64 = 2**31 - 1, 2**63 - 1


class Range(NamedTuple):
    """Example: Range(0, 1, "[)") holds 0 and everything below 1."""

    low: float
    high: float
    ends: str = "[]"

    def holds(self, number: float) -> bool:
        """Returns False also for NaN."""
        is_above = number > self.low if self.ends[0] == "(" else number >= self.low
        return is_above and (number < self.high if self.ends[1] == ")" else number <= self.high)

    def __str__(self) -> str:
        return f"{self.ends[0]}{self.low}, {self.high}{self.ends[1]}"


COUNT = Range(0, INT32)
FINITE = Range(-sys.float_info.max, sys.float_info.max)
SETTING = Range(0, 10**6, "[)")  # of AdamW

RANGES = {
    # models and their requests
    "model_seq_id": Range(0, 999_999_999),  # the store's names of runs have at most nine digits there
    "sampling_session_seq_id": Range(0, INT64),
    "seq_id": Range(0, INT64),
    "rank": Range(1, 2**15),
    "seed": Range(-INT64 - 1, INT64),
    "ttl_seconds": Range(3600, 10 * 365 * 86400),  # an hour to ten years
    "learning_rate": SETTING,
    "beta1": Range(0, 1, "[)"),
    "beta2": Range(0, 1, "[)"),
    "eps": SETTING,
    "weight_decay": SETTING,
    "grad_clip_norm": Range(-(10**6), 10**6),  # 0 and less: nothing is clipped
    # data
    "tokens": COUNT,
    "data": FINITE,
    "shape": COUNT,
    "sparse_crow_indices": COUNT,
    "sparse_col_indices": COUNT,
    "loss_fn_config": FINITE,
    # sampling
    "num_samples": Range(1, INT32),
    "max_tokens": Range(1, INT32),
    "stop": COUNT,
    "temperature": Range(0, 100),
    "top_k": Range(-1, 2**31),
    "top_p": Range(0, 1, "(]"),
    "topk_prompt_logprobs": COUNT,
    "topk_sample_logprobs": COUNT,
    "prompt_alt_tokens_k": COUNT,
    "prompt_logprobs_last_n": COUNT,
    # listings
    "offset": Range(0, 10**9, "[)"),
    "limit": Range(0, 10**9, "[)"),
}


def convert(fields: dict[str, Any], kind: type[Record], *, strict: bool = True) -> Record:
    """Returns the fields as a struct. Raises ChatError 400 that names the first wrong one.

    Without `strict`, numbers may be written as strings.
    """
    try:
        record = msgspec.convert(fields, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise invalid(str(error)) from None
    _check(record, "", "")
    return record


def _check(value: Any, path: str, name: str) -> None:
    """Raises ChatError 400 if a number in `value` is out of the range of its field, which is `name`, at `path`."""
    if isinstance(value, msgspec.Struct):
        for field in value.__struct_fields__:
            _check(getattr(value, field), f"{path}.{field}".removeprefix("."), field)
    elif isinstance(value, dict):
        for key, each in value.items():
            _check(each, f"{path}.{key}", name)
    elif name in RANGES:
        numbers = value if isinstance(value, list) else [value]
        numbers = [each for each in numbers if isinstance(each, int | float) and not isinstance(each, bool)]
        for each in (min(numbers), max(numbers)) if numbers else ():
            if not RANGES[name].holds(each):
                raise invalid(f"{path}: {each!r:.60} is outside {RANGES[name]}")
    elif isinstance(value, list):
        for number, each in enumerate(value):
            _check(each, f"{path}[{number}]", name)
