"""Every number that a client may send has a range, and one outside of it harms nobody."""

import copy
import importlib
import inspect
import json
import math
import os
import pkgutil
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import msgspec.inspect as kinds
import numpy as np
import pytest

from art_cli.models.adapters import on_base
from art_cli.models.weights import token_logprobs
from art_cli.tinker import server as backend
from art_cli.tinker.server import checkpoint_store as store
from art_cli.tinker.server.base_model import Base
from art_cli.tinker.server.passes import _Request
from art_cli.tinker.server.samplers import SampleRequest
from art_cli.tinker.server.wire import PROTO, CreateModel, Load, NewSampler, OptimStep, Page, Save, Search, Ttl
from tests.support.servers.backend_server import Client, Json, datum, passing, serving, tiny_base

JSON = {"content-type": "application/json"}
NumberPath = tuple[str | int, ...]
NumberType = kinds.IntType | kinds.FloatType
STORED = (store.RunNotes, store.Notes)
PROMPT = [5, 6, 7, 8, 9]
L = len(PROMPT)
VALUES: list[Any] = [
    -(2**70),
    -(10**9),
    -1,
    0,
    1,
    L,
    2 * L,
    10**9,
    2**63,
    2**70,
    10**400,
    math.nan,
    math.inf,
    1e308,
    1.0,
    True,
]
ALLOWED_GROWTH = 64 * 2**20  # bytes


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return tiny_base(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def address(base: Base, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(base, tmp_path_factory.mktemp("root")) as address:
        yield address


def records() -> set[type[msgspec.Struct]]:
    """All records of the package's modules that are not kept in files."""
    found = set()
    for module in pkgutil.iter_modules(backend.__path__, "art_cli.tinker.server."):
        for _, each in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if issubclass(each, msgspec.Struct) and each.__module__ == module.name and each not in STORED:
                found.add(each)
    return found


def numbers_of(kind: kinds.Type, path: NumberPath = ()) -> Iterator[tuple[NumberPath, NumberType]]:
    """The path and type of each number in a record, with 0 for a list's elements and "x" for a dictionary's."""
    match kind:
        case kinds.StructType():
            for field in kind.fields:
                yield from numbers_of(field.type, (*path, field.encode_name))
        case kinds.UnionType():
            for each in kind.types:
                yield from numbers_of(each, path)
        case kinds.ListType():
            yield from numbers_of(kind.item_type, (*path, 0))
        case kinds.DictType():
            yield from numbers_of(kind.value_type, (*path, "x"))
        case kinds.IntType() | kinds.FloatType():
            yield path, kind


def holds(kind: NumberType, value: float) -> bool:
    """Whether the number is in the range of the type; False for NaN."""
    is_above = kind.ge is not None and value >= kind.ge or kind.gt is not None and value > kind.gt
    return is_above and (kind.le is not None and value <= kind.le or kind.lt is not None and value < kind.lt)


def test_each_number_of_each_record_has_its_range() -> None:
    """Made from the declarations, so that a new number without a range fails."""
    numbers = [(record, *number) for record in records() for number in numbers_of(kinds.type_info(record))]
    assert numbers
    for record, path, kind in numbers:
        assert (kind.ge is None) != (kind.gt is None), (record, path)
        assert (kind.le is None) != (kind.lt is None), (record, path)


# --- each number of each request, at each value -----------------------------------------------------------------------

Request = tuple[str, Json]
PASS = passing(datum([1, 2, 3, 4]))
SPARSE = {"dtype": "float32", "shape": [3, 1], "sparse_crow_indices": [0, 1, 1, 1], "sparse_col_indices": [0]}
NUMBERED = ("forward_backward", "optim_step", "save_weights", "load_weights")


def sound_requests(client: Client, model: str) -> dict[type[msgspec.Struct], Request]:
    """A request of each record that has numbers."""
    data = copy.deepcopy(PASS)
    arrays = data["data"][0]["loss_fn_inputs"]
    arrays["weights"], arrays["target_tokens"]["shape"] = {"data": [1.0], **SPARSE}, [3, 1]
    params = {"max_tokens": 2, "stop": [3], "seed": 1}
    new = {"session_id": client.session, "model_seq_id": 10**6, "base_model": "tiny", "lora_config": {"rank": 4}}
    sampler = {"session_id": client.session, "sampling_session_seq_id": 0, "base_model": "tiny"}
    return {
        OptimStep: ("optim_step", {"adam_params": {}}),
        Save: ("save_weights", {"path": "x", "overwrite": True}),
        Load: ("load_weights", {"path": f"tinker://{model}/weights/x"}),
        CreateModel: ("create_model", new),
        NewSampler: ("create_sampling_session", sampler),
        SampleRequest: ("asample", sampling(last_n=None) | {"sampling_params": params}),
        Search: ("sessions/search", {}),
        Ttl: (f"PUT training_runs/{model}/checkpoints/weights/x/ttl", {}),
        Page: ("GET checkpoints", {}),
        _Request: (
            "forward_backward",
            {"forward_backward_input": data},
        ),  # the last one, because it spoils the update after it
    }


def sampling(*, last_n: int | None) -> Json:
    """A request for one token and the prompt's logprobs."""
    prompt = {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]}
    asked = {"base_model": "tiny", "prompt": prompt, "sampling_params": {"max_tokens": 1}, "prompt_logprobs": True}
    return asked | {"prompt_logprobs_last_n": last_n}


def with_value(fields: Json, path: NumberPath, value: Any) -> Json:
    """The fields with that value at the path. What is missing on the way there is made."""
    found: Any = copy.deepcopy(fields)
    here = found
    for part, following in zip(path, (*path[1:], None), strict=True):
        if part == "x":  # any name that is there
            part = next(iter(here), "beta")
        inner = value if following is None else [] if following == 0 else {}
        if isinstance(here, list):
            here[:1] = [inner] if following is None or not here else here[:1]
        elif following is None or here.get(part) is None:
            here[part] = inner
        here = here[part]
    return found


def is_part(kind: type[msgspec.Struct], of: type[msgspec.Struct]) -> bool:
    """Whether the numbers of `kind` are among those of the other record."""
    own, others = ({path[-1] for path, _ in numbers_of(kinds.type_info(each))} for each in (kind, of))
    return own <= others


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Sender:
    """Sends requests of a model under the numbers 1, 2, 3, ..., and waits for each one's result.

    A request that never took its turn would keep the next one's result back for ever.
    """

    def __init__(self, client: Client, model: str) -> None:
        self.client, self.model, self.next = client, model, 1

    def send(self, path: str, fields: Json) -> tuple[int, Json]:
        """The status, and the answer or the result that it promises."""
        method, _, route = path.rpartition(" ")
        if method == "GET":
            answer = self.client.http.get(route, params={name: str(value) for name, value in fields.items()})
            return answer.status_code, answer.json()
        if route in NUMBERED and "session_id" not in fields:
            fields = {"model_id": self.model, "seq_id": self.next, **fields}
        body = json.dumps(fields).encode()  # NaN and Infinity too, as Python writes them
        answer = self.client.http.request(method or "POST", route, content=body, headers=JSON)
        found: Json = answer.json()
        if "request_id" not in found:
            return answer.status_code, found
        self.next += route in NUMBERED
        result = self.client.result(found["request_id"])
        if route == "create_model" and "error" not in result:
            self.client.call("unload_model", model_id=found["model_id"])
        return answer.status_code, result


@pytest.mark.slow
def test_no_number_breaks_a_request_fills_memory_or_stops_a_models_queue(address: str) -> None:
    """The first value within a field's range, all others, and numbers of another type."""
    with Client(address) as client:
        sender = Sender(client, client.new_model())
        sound = sound_requests(client, sender.model)
        paths = {kind: list(numbers_of(kinds.type_info(kind))) for kind in records()}
        for kind in [kind for kind, found in paths.items() if found and kind not in sound]:
            assert any(is_part(kind, of) for of in sound), f"{kind.__name__} has numbers, and no request here"
        for kind in (Save, *sound):
            path, fields = sound[kind]
            status, result = sender.send(path, fields)
            assert status == 200 and "error" not in result, (path, result)
            for at, bounds in paths[kind]:
                before = resident_bytes()
                within = [index for index, value in enumerate(VALUES[:-2]) if holds(bounds, value)]
                for value in [value for index, value in enumerate(VALUES) if index not in within[1:]]:
                    status, result = sender.send(path, with_value(fields, at, value))
                    assert status < 500 and result.get("category") != "server", (path, at, value, result)
                assert resident_bytes() - before < ALLOWED_GROWTH, (path, at)
        done = client.call("forward", model_id=sender.model, seq_id=sender.next, forward_input=PASS)
        assert "metrics" in done, "the model's queue goes on"


# --- protocol buffers, with numbers that the generated messages refuse ---


def bytes_field(number: int, value: bytes | str) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return write_varint(number << 3 | 2) + write_varint(len(raw)) + raw


def varint_field(number: int, value: int) -> bytes:
    return write_varint(number << 3 | 0) + write_varint(value)


def double_field(number: int, value: float) -> bytes:
    return write_varint(number << 3 | 1) + struct.pack("<d", value)


def packed_field(number: int, values: Iterable[int]) -> bytes:
    return bytes_field(number, b"".join(map(write_varint, values)))


def write_varint(number: int) -> bytes:
    number &= 2**64 - 1
    written = bytearray()
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)


def proto_pass(model: str, seq_id: int, *, dtype: int = 1, shape: int = 2, token: int = 1, beta: float = 0.0) -> bytes:
    """A message ForwardBackwardRequest of one datum of two rows."""
    inputs = bytes_field(1, bytes_field(1, bytes_field(1, np.array([token, 2], "<i4").tobytes())))
    targets = bytes_field(1, np.array([2, 3], "<i8").tobytes()) + varint_field(3, 2) + packed_field(4, [2])
    weights = bytes_field(1, np.ones(2, "<f4").tobytes()) + varint_field(3, dtype) + packed_field(4, [shape])
    for name, tensor in (("target_tokens", targets), ("weights", weights)):
        inputs += bytes_field(2, bytes_field(1, name) + bytes_field(2, tensor))
    settings = bytes_field(5, bytes_field(1, "beta") + double_field(2, beta)) if beta else b""
    head = bytes_field(1, model) + varint_field(2, seq_id)
    return head + bytes_field(3, inputs) + bytes_field(4, "cross_entropy") + settings


def test_no_number_of_a_protocol_buffer_stops_a_models_queue(address: str) -> None:
    """At the ends of their 64 and 32 bits. Each request takes its turn and fails, or is refused."""
    with Client(address) as client:
        model, number = client.new_model(), 0
        ends = (-(2**63), -(2**31), -1, 2**31 - 1, 2**63 - 1)
        wrong: list[Json] = [{"seq_id": each} for each in (*ends, 10**9)]
        wrong += [{name: each} for name in ("dtype", "shape") for each in ends]
        wrong += [{"token": each} for each in ends[1:4]] + [{"beta": each} for each in (math.nan, -math.inf, 1e308)]
        for changed in (*wrong, {}):
            body = proto_pass(model, **{"seq_id": number + 1, **changed})
            answer = client.http.post("forward_backward", content=body, headers={"content-type": PROTO})
            assert (answer.status_code == 200) == ("seq_id" not in changed) and answer.status_code < 500, changed
            if answer.status_code == 200:
                number += 1
                result = client.result(answer.json()["request_id"])
                assert result.get("category") == ("user" if changed else None), (changed, result)


@pytest.mark.slow
@pytest.mark.parametrize("last_n", [None, 0, 1, L - 1, L, L + 1, 2 * L - 1, 2 * L, 2**31 - 1])
def test_the_prompts_last_logprobs_are_those_of_the_plain_answer(last_n: int | None, address: str, base: Base) -> None:
    """Also where more are asked for than the prompt has tokens."""
    with Client(address) as client:
        found = client.call("asample", **sampling(last_n=last_n))["prompt_logprobs"]
    plain = [None, *token_logprobs(on_base(base.weights, None), PROMPT)]
    shown = L if last_n is None else min(last_n, L)
    assert found == [None] * (L - shown) + [each and pytest.approx(each, abs=1e-4) for each in plain[L - shown :]]
