"""RemoteMethod: a method that another process answers; and the table of a learner's, which all its processes answer.

The proxy that calls, the process that answers and the node that passes a call on are all made from one table. What is
sent and returned has the types of the method's annotations, and is read as nothing else. It is MessagePack in base64
(records.py), inside a message of runtime/processes/process_calls.py.
"""

import base64
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast, get_type_hints

import msgspec

from art_cli.learners import Learner, Progress
from art_cli.learners.processes.records import decode, encode
from art_cli.runtime.errors import LearnerError

LOST = 71  # exit status of a process that ended because it lost another one

P = ParamSpec("P")
Result = TypeVar("Result")


class RemoteObject(Protocol):
    """An object with remote methods."""

    def call(self, method: str, given: str, progress: Progress | None) -> str:
        """Sends a call and returns the result that came back, both encoded."""


class RemoteMethod(Generic[P, Result]):
    """An attribute of a Caller's class. Example: `save = RemoteMethod(Learner.save, path="saved")`"""

    def __init__(self, function: Callable[Concatenate[Any, P], Result], *, path: str = "") -> None:
        """`path` is the file or directory of another node that stands for a path of this machine, which is not sent."""
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
        """Returns the parameters by name. Raises LearnerError if they have other types."""
        return msgspec.structs.asdict(cast(msgspec.Struct, _decode(given, self._params, self.name)))

    def at(self, path: Path) -> str:
        """Returns the encoded parameters of a method whose only one is a path."""
        return self.encode(dict.fromkeys(self._params.__struct_fields__, path))

    def answer(self, target: object, given: str, progress: Progress) -> str:
        """Calls the target's method of that name. Returns its encoded result."""
        params = self.decode(given) | ({"progress": progress} if self._reports else {})
        return _encode(getattr(target, self.name)(**params))


def remote_methods(owner: type) -> dict[str, RemoteMethod[..., Any]]:
    """Returns the remote methods of a class by name."""
    return {each.name: each for each in vars(owner).values() if isinstance(each, RemoteMethod)}


class RemoteLearner:
    """The methods of a Learner that its processes answer."""

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
    except (TypeError, ValueError) as error:  # TypeError: not a text
        raise LearnerError(f"the learner's processes sent what does not belong to {method}: {error}") from error
    return value
