"""A forward or forward_backward request: out of JSON or of protocol buffers, checked, as the learner's datums.

The answer is made in both forms too, because SDK 0.24.1 reads either and later ones read protocol buffers only.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from art_cli.chat.chat_errors import ChatError, invalid
from art_cli.chat.reading import decode_object
from art_cli.learners.adapter_learner import Passed
from art_cli.learners.datums import Datum
from art_cli.learners.token_losses import SHARES, TOKEN_LOSSES
from art_cli.tinker.server import tensors
from art_cli.tinker.server.protobuf import (
    BYTES,
    EIGHT,
    VARINT,
    ProtoReader,
    Value,
    bytes_field,
    double_field,
    packed_field,
    signed,
    text,
    varint_field,
)
from art_cli.tinker.server.ranges import convert
from art_cli.tinker.server.tensors import FLOAT32, Array, TensorData

REFUSED = {
    "stable_reinforce": "its formula is not public; use cispo or ppo",
    "custom": "custom losses run in the client here: forward_backward_custom with a function",
}
OUTPUT_TYPE = "ArrayRecord"
# Numbers that a datum may bring beside its loss's. Servers elsewhere do not know them, so that this one says in its
# capabilities that it does. With them the sums of a pass are those of the torch learner, bit for bit.
MASK = "mask"  # 0 in rows that are left out: they cost nothing, and their logprob in the answer is 0
EXTRA = (MASK, SHARES)
MAX_UNLISTED = 1 << 22  # numbers of a request beyond its bytes: those that its sparse tensors do not list


class RawDatum(NamedTuple):
    """A datum as it was sent: token ids, and arrays by name."""

    tokens: Array
    arrays: dict[str, Array]


class _Budget:
    """How many numbers a request of `num_bytes` may hold. A sparse tensor of a few bytes may name millions."""

    def __init__(self, num_bytes: int) -> None:
        self._left = num_bytes + MAX_UNLISTED

    def spend(self, datum: RawDatum) -> RawDatum:
        """The datum. Raises ValueError: it is too much."""
        self._left -= sum(array.size for array in datum.arrays.values())
        if self._left < 0:
            raise ValueError("the request's sparse tensors hold too many numbers; send fewer data at once")
        return datum


class Pass(NamedTuple):
    """One request for a pass over data."""

    model_id: str
    seq_id: int | None
    raw: list[RawDatum]
    loss: str
    settings: dict[str, float]
    backward: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of its numbers."""
        return sum(array.nbytes for datum in self.raw for array in (datum.tokens, *datum.arrays.values()))


class Checked(NamedTuple):
    """A pass that can be run. `is_flat`: of each datum whether its targets were one list."""

    data: list[Datum]
    is_flat: list[bool]


class BadPass(ChatError):
    """A request for a pass that cannot be read, with what of it could be."""

    def __init__(self, error: ChatError, model_id: object, seq_id: object) -> None:
        super().__init__(error.status, error.message)
        self.model_id, self.seq_id = model_id, seq_id


# --- JSON -------------------------------------------------------------------------------------------------------------


class InputChunk(msgspec.Struct):
    type: str = "encoded_text"
    tokens: list[int] = []


class ModelInput(msgspec.Struct, forbid_unknown_fields=True):
    chunks: list[InputChunk]


class _Datum(msgspec.Struct):
    model_input: ModelInput
    loss_fn_inputs: dict[str, TensorData]


class _Input(msgspec.Struct, forbid_unknown_fields=True):
    data: list[_Datum]
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None = None


class _Request(msgspec.Struct):
    model_id: str
    forward_backward_input: _Input | None = None
    forward_input: _Input | None = None
    seq_id: int | None = None


def of_json(body: bytes, *, backward: bool) -> Pass:
    """Raises BadPass: a field that does not fit; ChatError 400: no JSON object."""
    fields = decode_object(body)
    try:
        return _of_json(fields, backward, _Budget(len(body)))
    except ChatError as error:
        raise BadPass(error, fields.get("model_id"), fields.get("seq_id")) from None


def _of_json(fields: dict[str, Any], backward: bool, budget: _Budget) -> Pass:
    request = convert(fields, _Request)
    given = request.forward_backward_input or request.forward_input
    if given is None:
        raise invalid("forward_backward_input: required")
    data = []
    for number, datum in enumerate(given.data):
        with _naming(number):
            arrays = {name: tensors.of_json(tensor) for name, tensor in datum.loss_fn_inputs.items()}
            data.append(budget.spend(RawDatum(np.array(token_ids(datum.model_input), np.int64), arrays)))
    settings = given.loss_fn_config or {}
    return Pass(request.model_id, request.seq_id, data, given.loss_fn, _numbers(settings), backward)


def token_ids(given: ModelInput) -> list[int]:
    """The tokens of a model input. Raises ChatError 400: a part of it is no text."""
    for chunk in given.chunks:
        if chunk.type != "encoded_text":
            raise invalid(f"model_input: a chunk of type {chunk.type!r}; only encoded_text is served")
    return [token for chunk in given.chunks for token in chunk.tokens]


# --- protocol buffers -------------------------------------------------------------------------------------------------


def of_proto(body: bytes) -> Pass:
    """Raises BadPass: no message ForwardBackwardRequest."""
    reading = _ProtoPass(_Budget(len(body)))
    try:
        return reading.read(body)
    except ChatError as error:
        raise BadPass(error, reading.model_id, reading.seq_id) from None
    except (ValueError, ArithmeticError, AssertionError) as error:
        raise BadPass(invalid(f"the body: {error}"), reading.model_id, reading.seq_id) from None


class _ProtoPass:
    """A message ForwardBackwardRequest while it is read."""

    def __init__(self, budget: _Budget) -> None:
        self._budget = budget
        self.model_id, self.seq_id, self.loss, self.forward_only = "", 0, "", 0
        self._data: list[RawDatum] = []
        self._settings: dict[str, float | str] = {}

    def read(self, body: bytes) -> Pass:
        reader = ProtoReader()
        kinds = {1: BYTES, 2: VARINT, 3: BYTES, 4: BYTES, 5: BYTES, 6: VARINT, 7: BYTES}
        for number, value in reader.fields(body, kinds):
            self._take(reader, number, value)
        settings = _numbers(self._settings)
        return Pass(self.model_id, self.seq_id, self._data, self.loss, settings, not self.forward_only)

    def _take(self, reader: ProtoReader, number: int, value: Value) -> None:
        match number, value:
            case 1, bytes():
                self.model_id = text(value)
            case 2, int():
                self.seq_id = signed(value)
            case 3, bytes():
                with _naming(len(self._data)):
                    self._data.append(self._budget.spend(_datum(reader, value)))
            case 4, bytes():
                self.loss = text(value)
            case 5, bytes():
                name, amount = _entry(reader, value, EIGHT)
                self._settings.setdefault(name, float(amount))
            case 6, int():
                self.forward_only = value
            case 7, bytes():  # the later form of the settings, which may be text too
                name, message = _entry(reader, value, BYTES)
                found = dict(reader.fields(message, {1: EIGHT, 2: BYTES}))
                self._settings[name] = text(found[2]) if 2 in found else float(found.get(1, 0.0))


def _datum(reader: ProtoReader, message: bytes) -> RawDatum:
    parts, arrays = [], {}
    for number, value in reader.fields(message, {1: BYTES, 2: BYTES}):
        assert isinstance(value, bytes)
        if number == 1:
            chunk = dict(reader.fields(value, {1: BYTES, 2: BYTES, 3: BYTES}))
            if 2 in chunk or 3 in chunk:
                raise ValueError("model_input: an image or audio chunk; only encoded_text is served")
            inner = dict(reader.fields(chunk.get(1, b""), {1: BYTES}))  # type: ignore[arg-type]
            parts.append(tensors.int32s(inner.get(1, b"")))
        else:
            name, tensor = _entry(reader, value, BYTES)
            assert isinstance(tensor, bytes)
            arrays[name] = tensors.of_proto(reader, tensor)
    return RawDatum(np.concatenate(parts) if parts else np.zeros(0, np.int64), arrays)


def _entry(reader: ProtoReader, message: bytes, kind: int) -> tuple[str, Any]:
    """Key and value of one entry of a map."""
    entry = dict(reader.fields(message, {1: BYTES, 2: kind}))
    return text(entry.get(1, b"")), entry.get(2, 0.0 if kind == EIGHT else b"")


# --- checking ---------------------------------------------------------------------------------------------------------


class _naming:
    """What is raised inside becomes a ChatError 400 that names the datum."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, ValueError | ArithmeticError | AssertionError):
            raise invalid(f"data[{self._number}]: {error}") from None
        if isinstance(error, ChatError):
            raise invalid(f"data[{self._number}]: {error.message}") from None


def _numbers(settings: dict[str, float | str]) -> dict[str, float]:
    for name, value in settings.items():
        if isinstance(value, str) or not math.isfinite(value):
            raise invalid(f"loss_fn_config.{name}: {value!r} is no finite number")
    return {name: float(value) for name, value in settings.items()}


def check(asked: Pass, *, vocabulary: int, max_length: int, max_data: int) -> Checked:
    """The pass as the learner takes it. Raises ChatError 400: the first thing wrong, with its datum."""
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
    """The rows that a mask leaves in; None: there is no mask."""
    if mask is None:
        return None
    if not (mask == mask[:, :1]).all() or not mask.any():
        raise ValueError(f"loss_fn_inputs.{MASK}: a row is in or out whole, and at least one is in")
    return np.flatnonzero(mask[:, 0])


# --- the answer -------------------------------------------------------------------------------------------------------


def metrics(passed: Passed) -> dict[str, float]:
    """By name and how several answers are reduced to one."""
    found = {"loss:sum": passed.loss, "tokens:sum": float(passed.num_tokens)}
    return found if passed.clip_fraction is None else {**found, "clip_fraction:mean": passed.clip_fraction}


def as_json(passed: Passed, is_flat: Sequence[bool]) -> dict[str, Any]:
    outputs = []
    for logprobs, flat in zip(passed.logprobs, is_flat, strict=True):
        shape = [len(logprobs)] if flat else list(logprobs.shape)
        outputs.append({"logprobs": {"data": logprobs.ravel().tolist(), "dtype": "float32", "shape": shape}})
    return {"loss_fn_output_type": OUTPUT_TYPE, "loss_fn_outputs": outputs, "metrics": metrics(passed)}


def as_proto(passed: Passed, is_flat: Sequence[bool]) -> bytes:
    """A message ForwardBackwardOutput. Data whose rows have the same number of targets share a record."""
    message = bytes_field(1, OUTPUT_TYPE)
    start = 0
    for end in range(1, len(is_flat) + 1):
        if end < len(is_flat) and _trailing(passed, is_flat, end) == _trailing(passed, is_flat, start):
            continue
        message += bytes_field(2, _record(passed, is_flat, start, end))
        start = end
    for name, value in metrics(passed).items():
        message += bytes_field(3, bytes_field(1, name) + double_field(2, value))
    return message


def _trailing(passed: Passed, is_flat: Sequence[bool], index: int) -> list[int]:
    return [] if is_flat[index] else [passed.logprobs[index].shape[1]]


def _record(passed: Passed, is_flat: Sequence[bool], start: int, end: int) -> bytes:
    parts = [passed.logprobs[index].astype("<f4").tobytes() for index in range(start, end)]
    offsets = np.cumsum([0, *map(len, parts)]).astype("<i8").tobytes()
    tensor = bytes_field(1, b"".join(parts)) + bytes_field(2, offsets) + varint_field(3, FLOAT32)
    if trailing := _trailing(passed, is_flat, start):
        tensor += packed_field(4, trailing)
    entry = bytes_field(1, "logprobs") + bytes_field(2, tensor)
    return bytes_field(1, OUTPUT_TYPE) + bytes_field(2, entry) + varint_field(3, end - start)
