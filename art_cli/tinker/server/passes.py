"""Decodes and checks forward and forward_backward requests, and encodes answers. JSON and protocol buffers.

SDK 0.24.1 reads both formats; later versions only read protocol buffers.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from art_cli.chat.chat_errors import ChatError, invalid
from art_cli.chat.reading import convert, decode_object
from art_cli.tinker.server import Count, Finite, SequenceNumber, protobuf
from art_cli.tinker.server.adapter_learner import Passed
from art_cli.tinker.server.datums import SHARES, TOKEN_LOSSES, Datum
from art_cli.tinker.server.protobuf import FLOAT32, Array, TensorData, messages, read_message

REFUSED = {
    "stable_reinforce": "its formula is not public; use cispo or ppo",
    "custom": "custom losses run in the client here: forward_backward_custom with a function",
}
OUTPUT_TYPE = "ArrayRecord"
# Optional datum inputs, unknown to other servers and therefore listed in this server's capabilities. With these inputs,
# the sums of a pass equal the torch learner's sums bit for bit.
MASK = "mask"  # 0 in omitted rows: they are not computed, and their logprob is 0 in the answer
EXTRA = (MASK, SHARES)
MAX_UNLISTED = 1 << 22  # maximum numbers in a request beyond its byte size: the implicit zeros of sparse tensors


class RawDatum(NamedTuple):
    """A datum as received: token ids and named arrays."""

    tokens: Array
    arrays: dict[str, Array]


class _Budget:
    """Limits the numbers in a request of `num_bytes`. A sparse tensor of a few bytes may expand to millions."""

    def __init__(self, num_bytes: int) -> None:
        self._left = num_bytes + MAX_UNLISTED

    def spend(self, datum: RawDatum) -> RawDatum:
        """Returns the datum. Raises ValueError above the limit."""
        self._left -= sum(array.size for array in datum.arrays.values())
        if self._left < 0:
            raise ValueError("the request's sparse tensors hold too many numbers; send fewer data in a request")
        return datum


class ForwardBackward(NamedTuple):
    model_id: str
    seq_id: int | None
    raw: list[RawDatum]
    loss: str
    settings: dict[str, float]
    backward: bool

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for datum in self.raw for array in (datum.tokens, *datum.arrays.values()))


class Checked(NamedTuple):
    """A valid pass. `is_flat`: for each datum, whether the targets were a flat list."""

    data: list[Datum]
    is_flat: list[bool]


class BadPass(ChatError):
    """An unreadable pass request, with its readable fields."""

    def __init__(self, error: ChatError, model_id: object, seq_id: object) -> None:
        super().__init__(error.status, error.message)
        self.model_id, self.seq_id = model_id, seq_id


# --- JSON -------------------------------------------------------------------------------------------------------------


class InputChunk(msgspec.Struct):
    type: str = "encoded_text"
    tokens: list[Count] = []


class ModelInput(msgspec.Struct, forbid_unknown_fields=True):
    chunks: list[InputChunk]


class _Datum(msgspec.Struct):
    model_input: ModelInput
    loss_fn_inputs: dict[str, TensorData]


class _Input(msgspec.Struct, forbid_unknown_fields=True):
    data: list[_Datum]
    loss_fn: str
    loss_fn_config: dict[str, Finite | str] | None = None


class _Request(msgspec.Struct):
    model_id: str
    forward_backward_input: _Input | None = None
    forward_input: _Input | None = None
    seq_id: SequenceNumber | None = None


def of_json(body: bytes, *, backward: bool) -> ForwardBackward:
    """Decodes the pass. Raises BadPass for invalid fields, and ChatError 400 unless the body is a JSON object."""
    fields = decode_object(body)
    try:
        return _of_json(fields, backward, _Budget(len(body)))
    except ChatError as error:
        raise BadPass(error, fields.get("model_id"), fields.get("seq_id")) from None


def _of_json(fields: dict[str, Any], backward: bool, budget: _Budget) -> ForwardBackward:
    request = convert(fields, _Request)
    given = request.forward_backward_input or request.forward_input
    if given is None:
        raise invalid("forward_backward_input: required")
    data = []
    for number, datum in enumerate(given.data):
        with _naming(number):
            arrays = {name: protobuf.of_json(tensor) for name, tensor in datum.loss_fn_inputs.items()}
            data.append(budget.spend(RawDatum(np.array(token_ids(datum.model_input), np.int64), arrays)))
    settings = given.loss_fn_config or {}
    return ForwardBackward(request.model_id, request.seq_id, data, given.loss_fn, _numbers(settings), backward)


def token_ids(given: ModelInput) -> list[int]:
    """Returns the input's tokens. Raises ChatError 400 for non-text chunks."""
    for chunk in given.chunks:
        if chunk.type != "encoded_text":
            raise invalid(f"model_input: a chunk of type {chunk.type!r}; only encoded_text is served")
    return [token for chunk in given.chunks for token in chunk.tokens]


# --- protocol buffers -------------------------------------------------------------------------------------------------


def of_proto(body: bytes) -> ForwardBackward:
    """Decodes a ForwardBackwardRequest. Raises BadPass for invalid messages and fields."""
    request = messages.ForwardBackwardRequest()
    try:
        request = read_message(messages.ForwardBackwardRequest, body)
        budget, data = _Budget(len(body)), []
        for number, datum in enumerate(request.data):
            with _naming(number):
                data.append(budget.spend(_datum(datum)))
        settings: dict[str, float | str] = dict(request.loss_fn_config)
        for name, value in getattr(request, "loss_fn_config_v2", {}).items():  # not in SDK 0.24.1
            settings[name] = value.text if value.HasField("text") else value.number
        loss, backward = request.loss_fn, not request.forward_only
        return ForwardBackward(request.model_id, request.seq_id, data, loss, _numbers(settings), backward)
    except ChatError as error:
        raise BadPass(error, request.model_id, request.seq_id) from None
    except ValueError as error:
        raise BadPass(invalid(f"the body: {error}"), request.model_id, request.seq_id) from None


def _datum(datum: Any) -> RawDatum:
    chunks = datum.model_input
    if any(chunk.HasField("image") or chunk.HasField("dmel") for chunk in chunks):
        raise ValueError("model_input: an image or audio chunk; only encoded_text is served")
    parts = [protobuf.int32s(chunk.encoded_text.tokens) for chunk in chunks]
    arrays = {name: protobuf.of_proto(tensor) for name, tensor in datum.loss_fn_inputs.items()}
    return RawDatum(np.concatenate(parts) if parts else np.zeros(0, np.int64), arrays)


# --- checking ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _naming(number: int) -> Iterator[None]:
    """Errors inside the block become a ChatError 400 that names the datum."""
    try:
        yield
    except (ValueError, ArithmeticError, AssertionError) as error:
        raise invalid(f"data[{number}]: {error}") from None
    except ChatError as error:
        raise invalid(f"data[{number}]: {error.message}") from None


def _numbers(settings: dict[str, float | str]) -> dict[str, float]:
    for name, value in settings.items():
        if isinstance(value, str) or not math.isfinite(value):
            raise invalid(f"loss_fn_config.{name}: {value!r} is not a finite number")
    return {name: float(value) for name, value in settings.items()}


def check(asked: ForwardBackward, *, vocabulary: int, max_length: int, max_data: int) -> Checked:
    """Returns the pass for the learner. Raises ChatError 400 for the first invalid datum or setting."""
    loss = TOKEN_LOSSES.get(asked.loss)
    if loss is None:
        why = REFUSED.get(asked.loss, f"there are {', '.join(TOKEN_LOSSES)}")
        raise invalid(f"loss_fn {asked.loss!r} is not served: {why}")
    for name in asked.settings:
        if name not in loss.takes or name == "weights":
            raise invalid(f"loss_fn_config.{name}: {asked.loss} has no such setting")
    for name, default in loss.takes.items():
        if default is None and name not in asked.settings:
            raise invalid(f"loss_fn_config.{name}: {asked.loss} needs it")
    if not 0 < len(asked.raw) <= max_data:
        raise invalid(f"{len(asked.raw)} data; between 1 and {max_data} are taken in one request")
    data, is_flat = [], []
    names = ({"target_tokens", *loss.needs}, {*EXTRA, *loss.takes, *loss.may_bring} - {"beta"})
    for number, raw in enumerate(asked.raw):
        with _naming(number):
            data.append(_checked(raw, names, vocabulary, max_length, asked.loss))
            is_flat.append(raw.arrays["target_tokens"].ndim == 1)
    return Checked(data, is_flat)


def _checked(raw: RawDatum, names: tuple[set[str], set[str]], vocabulary: int, max_length: int, loss: str) -> Datum:
    needed, optional = names
    if missing := sorted(needed - raw.arrays.keys()):
        raise ValueError(f"loss_fn_inputs.{missing[0]}: {loss} needs it")
    if unknown := sorted(raw.arrays.keys() - needed - optional):
        raise ValueError(f"loss_fn_inputs.{unknown[0]}: {loss} does not use it")
    targets = raw.arrays["target_tokens"]
    if targets.dtype != np.int64:
        raise ValueError("loss_fn_inputs.target_tokens: token ids are int64")
    if not len(raw.tokens) or targets.shape[:1] != (len(raw.tokens),) or targets.size == 0:
        raise ValueError(f"{len(raw.tokens)} input tokens and target_tokens of shape {list(targets.shape)}")
    if len(raw.tokens) >= max_length:
        raise ValueError(f"{len(raw.tokens)} tokens; the context is {max_length}")
    for what, ids in (("model_input", raw.tokens), ("target_tokens", targets)):
        if ids.min() < 0 or ids.max() >= vocabulary:
            bad = int(ids[(ids < 0) | (ids >= vocabulary)].ravel()[0])
            raise ValueError(f"{what}: the model has no token {bad}")
    numbers = {}
    for name, values in raw.arrays.items():
        if name == "target_tokens":
            continue
        if values.shape != targets.shape:
            raise ValueError(f"loss_fn_inputs.{name}: shape {list(values.shape)}, targets {list(targets.shape)}")
        if not np.isfinite(values).all():
            raise ValueError(f"loss_fn_inputs.{name}: not finite")
        numbers[name] = values.reshape(len(raw.tokens), -1).astype(np.float64)
    return Datum(
        inputs=raw.tokens.astype(np.int64),
        targets=targets.reshape(len(raw.tokens), -1),
        numbers=numbers,
        rows=_rows(numbers.pop(MASK, None)),
    )


def _rows(mask: npt.NDArray[np.float64] | None) -> npt.NDArray[np.int64] | None:
    """Returns the computed rows; None without a mask."""
    if mask is None:
        return None
    if not (mask == mask[:, :1]).all() or not mask.any():
        raise ValueError(f"loss_fn_inputs.{MASK}: a row is in or out whole, and at least one is in")
    return np.flatnonzero(mask[:, 0])


# --- the answer -------------------------------------------------------------------------------------------------------


def metrics(passed: Passed) -> dict[str, float]:
    """Returns metrics by name, with the SDK's reduction as suffix."""
    found = {"loss:sum": passed.loss, "tokens:sum": float(passed.num_tokens)}
    return found if passed.clip_fraction is None else {**found, "clip_fraction:mean": passed.clip_fraction}


def as_json(passed: Passed, is_flat: Sequence[bool]) -> dict[str, Any]:
    outputs = []
    for logprobs, flat in zip(passed.logprobs, is_flat, strict=True):
        shape = [len(logprobs)] if flat else list(logprobs.shape)
        outputs.append({"logprobs": {"data": logprobs.ravel().tolist(), "dtype": "float32", "shape": shape}})
    return {"loss_fn_output_type": OUTPUT_TYPE, "loss_fn_outputs": outputs, "metrics": metrics(passed)}


def as_proto(passed: Passed, is_flat: Sequence[bool]) -> bytes:
    """Encodes a ForwardBackwardOutput. Adjacent data with equally many targets per row share a record."""
    records, start = [], 0
    for end in range(1, len(is_flat) + 1):
        if end < len(is_flat) and _trailing(passed, is_flat, end) == _trailing(passed, is_flat, start):
            continue
        records.append(_record(passed, is_flat, start, end))
        start = end
    output = messages.ForwardBackwardOutput(
        loss_fn_output_type=OUTPUT_TYPE, loss_fn_outputs=records, metrics=metrics(passed)
    )
    raw: bytes = output.SerializeToString()
    return raw


def _trailing(passed: Passed, is_flat: Sequence[bool], index: int) -> list[int]:
    return [] if is_flat[index] else [passed.logprobs[index].shape[1]]


def _record(passed: Passed, is_flat: Sequence[bool], start: int, end: int) -> Any:
    """Encodes an ArrayRecord for the data from `start` to `end`."""
    parts = [passed.logprobs[index].astype("<f4").tobytes() for index in range(start, end)]
    tensor = messages.BatchedTensor(
        data=b"".join(parts),
        offsets=np.cumsum([0, *map(len, parts)]).astype("<i8").tobytes(),
        dtype=FLOAT32,
        trailing_shape=_trailing(passed, is_flat, start),
    )
    return messages.ArrayRecord(type_tag=OUTPUT_TYPE, fields={"logprobs": tensor}, num_datums=end - start)
