"""FunctionJudge: a user's Python function or Judge class, sync or async, with a deadline.

    def judge(group: list[Trajectory]) -> list[float] | dict[str, float]

    class Mine(art_cli.Judge):
        def __init__(self, strictness=1): ...                # judge.options
        async def judge(self, group): ...                    # same return types, or a dict of Verdicts

Lists follow the group's order; dicts are keyed by trajectory id. All rewards must be present and finite.
"""

import asyncio
import copy
import hashlib
import inspect
import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import msgspec

from art_cli.config.sections.judge_config import FunctionJudgeConfig
from art_cli.judges import Judge, Verdict, make_key
from art_cli.judges.costs import CostEstimate, Usage
from art_cli.runs.trajectory import Score, Trajectory
from art_cli.runtime.errors import JudgeError, UsageError, describe
from art_cli.runtime.plugins import place_of, resolve
from art_cli.runtime.threads import LoopThread, call_in_thread, is_being_cancelled

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0  # maximum wait for user code to finish


class FunctionJudge(Judge):
    """Runs the user's code, validates its answers and forwards the attributes of a user's class.

    Raises UsageError if the code cannot be loaded, or if the class cannot be created with `judge.options`.
    """

    title = "function"

    def __init__(self, config: FunctionJudgeConfig, directory: Path, *, job: str = "") -> None:
        self._entry = config.entry
        self.timeout_s = config.timeout_s
        self._root = directory.resolve()
        found = resolve(config.entry, base=directory)
        self._own = self._make(found, config.options) if isinstance(found, type) else Judge()
        self._function: Callable[[list[Trajectory]], Any] = self._own.judge if isinstance(found, type) else found
        if not callable(self._function):
            raise UsageError(f"{config.entry}: not a function but {type(self._function).__name__}")
        if config.options and not isinstance(found, type):
            raise UsageError(f"judge.options: {config.entry} is a function, and only a class is made with options")
        self._source = _digest(config.entry, directory, config.options)
        self.in_flight, self.needs_reward = self._own.in_flight, self._own.needs_reward
        self._loop, self._slots = LoopThread("judge"), asyncio.Semaphore(max(1, self.in_flight))

    def _make(self, found: type, options: Mapping[str, Any]) -> Judge:
        if not issubclass(found, Judge):
            raise UsageError(f"{self._entry}: the class is not a subclass of art_cli.Judge")
        try:
            return found(**options)
        except UsageError:
            raise
        except Exception as error:  # the boundary to the user's class
            raise UsageError(f"{self._entry}: {describe(error)}{self._where(error)}") from error

    @property
    def settings(self) -> str:
        """A digest of the code and its options, plus the settings of a user's class."""
        return make_key(source=self._source, own=self._own.settings)[:12] if self._own.settings else self._source

    async def judge(self, group: Sequence[Trajectory]) -> Mapping[str, Verdict]:
        """Raises JudgeError if the code fails, times out, or omits a finite reward for any trajectory."""
        if not group:
            return {}
        return self._check(await self._call(copy.deepcopy(list(group))), group)

    def reseed(self) -> None:
        self._own.reseed()

    async def _call(self, group: list[Trajectory]) -> Any:
        try:
            async with self._slots, asyncio.timeout(self.timeout_s) as limit:
                if inspect.iscoroutinefunction(self._function):
                    return await self._loop.run(self._function(group))
                return await call_in_thread(self._function, group)
        except JudgeError:  # deliberately raised by user code
            raise
        except asyncio.CancelledError as error:
            if is_being_cancelled():
                raise
            raise JudgeError(f"{self._entry}: it cancelled itself") from error
        except Exception as error:  # the boundary to the user's code
            if limit.expired():
                raise JudgeError(f"{self._entry}: no answer within {self.timeout_s:g} s (judge.timeout_s)") from error
            raise JudgeError(f"{self._entry}: {describe(error)}{self._where(error)}") from error

    def _where(self, error: Exception) -> str:
        place = place_of(error, self._root)
        return f" ({place})" if place else ""

    def _check(self, answer: Any, group: Sequence[Trajectory]) -> dict[str, Verdict]:
        """Validates the answer; returns a verdict with a finite reward per trajectory id."""
        ids = [trajectory.id for trajectory in group]
        answer = answer.tolist() if hasattr(answer, "tolist") else answer  # an array or a tensor
        if isinstance(answer, Mapping):
            if missing := [id for id in ids if id not in answer]:
                raise JudgeError(f"{self._entry}: no reward for {missing[0]} ({len(missing)} of {len(ids)} missing)")
            if unknown := [id for id in answer if id not in ids]:
                raise JudgeError(f"{self._entry}: a reward for {unknown[0]!r}, which is not in the group")
            return {id: self._verdict(answer[id], id) for id in ids}
        if isinstance(answer, str | bytes) or not isinstance(answer, Sequence):
            raise JudgeError(f"{self._entry}: must return a list of numbers or a dict by id, not {_kind(answer)}")
        if len(answer) != len(ids):
            raise JudgeError(f"{self._entry}: returned {len(answer)} rewards for {len(ids)} trajectories")
        return {id: self._verdict(value, id) for id, value in zip(ids, answer, strict=True)}

    def _verdict(self, value: Any, id: str) -> Verdict:
        if isinstance(value, Verdict):
            try:
                numbers = [
                    msgspec.structs.replace(
                        each, score=self._number(each.score, id), votes=[self._number(vote, id) for vote in each.votes]
                    )
                    for each in value.scores
                ]
                scores = msgspec.json.decode(msgspec.json.encode(numbers), type=list[Score])  # as if read from a file
            except (AttributeError, TypeError, ValueError) as error:
                raise JudgeError(f"{self._entry}: the scores of {id} are not a list of Score: {error}") from error
            variance = None if value.variance is None else self._number(value.variance, id)
            return Verdict(reward=self._number(value.reward, id), scores=scores, variance=variance)
        reward = self._number(value, id)
        return Verdict(reward=reward, scores=[Score(judge="function", score=reward)])

    def _number(self, value: Any, id: str) -> float:
        try:
            number = float(value) if isinstance(value, Real) else math.nan
        except (OverflowError, ValueError):  # an integer too large for a float
            number = math.inf
        if not math.isfinite(number):
            raise JudgeError(f"{self._entry}: the reward of {id} is {value!r:.60}, not a finite number")
        return number

    # --- attributes of a user's class ---------------------------------------------------------------------------------

    @property
    def usage(self) -> Usage:
        return self._own.usage

    @property
    def num_cached(self) -> int:
        return self._own.num_cached

    def estimate(self, group: Sequence[Trajectory]) -> CostEstimate | None:
        return self._own.estimate(group)

    async def close(self) -> None:
        """Closes the user's judge, then its event loop thread."""
        if type(self._own) is not Judge:
            try:
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self._loop.run(self._own.close())
            except Exception as error:  # the boundary to the user's class
                log.warning("%s: close: %s", self._entry, describe(error))
        await self._loop.close(CLOSE_TIMEOUT_S)


def _digest(entry: str, directory: Path, options: Mapping[str, Any]) -> str:
    """Returns a digest of the code's name, source file and options. Imported modules are not included."""
    module, _, name = entry.rpartition(":")
    is_file = module.endswith(".py")
    source = directory / module if is_file else Path(getattr(sys.modules[module], "__file__", None) or "")
    text = source.read_bytes() if source.is_file() else entry.encode()
    given = {"options": dict(options)} if options else {}  # omitted if empty, so old digests stay valid
    return make_key(function=name, source=hashlib.sha256(text).hexdigest(), **given)[:12]


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__name__
