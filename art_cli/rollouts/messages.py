"""What goes between a run and its rollout processes: one message a line, as JSON. process.py tells which follows which.

Standard library only: the other end may be a Python that has none of our dependencies (start.py). What comes from there
was written in one process with the user's code, so it is checked whole.
"""

from dataclasses import dataclass, fields
from functools import cache
from typing import Any, get_origin

from art_cli.outcome import MAX_NUMBER, Outcome
from art_cli.processes.plain_json import dump, is_deep, load

Json = dict[str, Any]

MAX_LINE_BYTES = 2**30  # of a message


@dataclass(frozen=True)
class Play:
    id: int
    base_url: str
    api_key: str
    model: str
    step: int
    scenario: Json


@dataclass(frozen=True)
class Cancel:
    id: int


@dataclass(frozen=True)
class Explain:
    id: int


@dataclass(frozen=True)
class Ready:
    """The function is loaded. Example: Ready(0, "3.12.1")"""

    id: int
    version: str  # of the Python that loaded it


@dataclass(frozen=True)
class Done:
    """An Outcome."""

    id: int
    reward: float | None
    metrics: dict[str, float]
    metadata: Json

    def __post_init__(self) -> None:
        numbers = [*self.metrics.values(), *([] if self.reward is None else [self.reward])]
        if not all(isinstance(number, float) and abs(number) <= MAX_NUMBER for number in numbers):
            raise ValueError("a reward or metric that is no finite number")
        if is_deep(self.metadata):
            raise ValueError("metadata that are nested too deeply")

    @property
    def outcome(self) -> Outcome:
        return Outcome(reward=self.reward, metrics=self.metrics, metadata=self.metadata)


@dataclass(frozen=True)
class Failed:
    """An AttemptError."""

    id: int
    kind: str
    message: str
    is_transport: bool


@dataclass(frozen=True)
class Refused:
    """What every attempt would fail with: an error of errors.py, by name."""

    id: int
    error: str
    message: str


@dataclass(frozen=True)
class Guess:
    id: int
    text: str


ToProcess = Play | Cancel | Explain
FromProcess = Ready | Done | Failed | Refused | Guess
TO_PROCESS = (Play, Cancel, Explain)
FROM_PROCESS = (Ready, Done, Failed, Refused, Guess)


def encode(message: ToProcess | FromProcess) -> bytes:
    """Its line. Raises TypeError or ValueError: it holds what JSON has no form for."""
    return dump({"type": type(message).__name__, **vars(message)}) + b"\n"


def decode(line: bytes, kinds: tuple[type, ...]) -> Any:
    """The message of a line, one of these kinds. Raises ValueError: it is none, or has a wrong field."""
    given = load(line)
    if not isinstance(given, dict):
        raise ValueError(f"a message is a JSON object, not {type(given).__name__}")
    name = given.pop("type", None)
    kind = next((kind for kind in kinds if kind.__name__ == name), None)
    if kind is None:
        raise ValueError(f"no such message: {name!r:.40}")
    wanted = _types(kind)
    if given.keys() != wanted.keys():
        raise ValueError(f"{name}: its fields are {', '.join(wanted)}")
    for field, expected in wanted.items():
        if not isinstance(given[field], expected):
            raise ValueError(f"{name}.{field}: {type(given[field]).__name__}")
    return kind(**given)


@cache
def _types(kind: type) -> dict[str, Any]:
    """What each field of a message is an instance of."""
    return {each.name: dict if get_origin(each.type) is dict else each.type for each in fields(kind)}
