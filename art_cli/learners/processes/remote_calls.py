"""RemoteMethod: a method answered by another process; and the table of learner methods that all processes answer.

The calling proxy, the answering process and the forwarding node are all built from one table. Parameters and results
are decoded strictly by the method's annotations. They are MessagePack in base64 (wire_records.py), in a message from
runtime/processes/process_calls.py.
"""

import base64
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast, get_type_hints

import msgspec

from art_cli.learners import Learner, Progress
from art_cli.learners.processes.wire_records import decode, encode
from art_cli.runtime.errors import LearnerError

LOST = 71  # exit status for processes ending because they lost another process

P = ParamSpec("P")
Result = TypeVar("Result")


class RemoteObject(Protocol):
    """An object with remote methods."""

    def call(self, method: str, given: str, progress: Progress | None) -> str:
        """Sends an encoded call and returns the encoded result."""


class RemoteMethod(Generic[P, Result]):
    """A class attribute of a RemoteObject. Example: `save = RemoteMethod(Learner.save, path="saved")`"""

    def __init__(self, function: Callable[Concatenate[Any, P], Result], *, path: str = "") -> None:
        """`path` names the file or directory that replaces this machine's path on another node."""
        self.name, self.path = function.__name__, path
        self._signature, types = inspect.signature(function), get_type_hints(function)
        self._reports = types.pop("progress", None) is not None
        self._result = types.pop("return")
        self._params = msgspec.defstruct(self.name, list(types.items()))

    def __get__(self, caller: RemoteObject, owner: type) -> Callable[P, Result]:
        return partial(self._call, caller)

    def _call(self, caller: RemoteObject, *args: P.args, **kwargs: P.kwargs) -> Result:
        bound = self._signature.bind(None, *args, **kwargs)
        bound.apply_defaults()
        _, *values = bound.arguments.items()
        params = dict(values)
        progress = params.pop("progress", None)
        return cast(Result, _decode(caller.call(self.name, self.encode(params), progress), self._result, self.name))

    def encode(self, params: Mapping[str, Any]) -> str:
        return _encode(self._params(**params))

    def decode(self, given: str) -> dict[str, Any]:
        """Returns the parameters by name. Raises LearnerError if their types do not match."""
        return msgspec.structs.asdict(cast(msgspec.Struct, _decode(given, self._params, self.name)))

    def at(self, path: Path) -> str:
        """Encodes the parameters of a method whose only parameter is a path."""
        return self.encode(dict.fromkeys(self._params.__struct_fields__, path))

    def answer(self, target: object, given: str, progress: Progress) -> str:
        """Calls the target's method with this name. Returns the encoded result."""
        params = self.decode(given) | ({"progress": progress} if self._reports else {})
        return _encode(getattr(target, self.name)(**params))


def remote_methods(owner: type) -> dict[str, RemoteMethod[..., Any]]:
    """Returns a class's remote methods by name."""
    return {each.name: each for each in vars(owner).values() if isinstance(each, RemoteMethod)}


class RemoteLearner:
    """The Learner methods answered by worker processes."""

    step = RemoteMethod(Learner.step)
    rehearse = RemoteMethod(Learner.rehearse)
    write_learned = RemoteMethod(Learner.write_learned, path="learned.jsonl")
    begin_sft = RemoteMethod(Learner.begin_sft)
    take_sft = RemoteMethod(Learner.take_sft)
    end_sft = RemoteMethod(Learner.end_sft)
    score = RemoteMethod(Learner.score)
    measure = RemoteMethod(Learner.measure)
    save = RemoteMethod(Learner.save, path="saved")
    load = RemoteMethod(Learner.load, path="loaded")


LEARNER = remote_methods(RemoteLearner)


def _encode(value: object) -> str:
    return base64.b64encode(encode(value)).decode()


def _decode(text: str, kind: Any, method: str) -> object:
    try:
        value: object = decode(base64.b64decode(text, validate=True), kind)
    except (TypeError, ValueError) as error:  # TypeError: not a string
        raise LearnerError(f"a learner process sent invalid data for {method}: {error}") from error
    return value
