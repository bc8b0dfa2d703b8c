"""FunctionJudge: a user's Python function over a group, sync or async, with a deadline.

    def judge(group: list[Trajectory]) -> list[float] | dict[str, float]

A list is in the order of the group, a dict by trajectory id. Either must be complete and finite; nothing is filled in.
"""

import asyncio
import copy
import hashlib
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from art_cli.config.schema import FunctionJudgeConfig
from art_cli.errors import JudgeError, UsageError, describe
from art_cli.judges import Judge, Verdict, make_key
from art_cli.plugins import place_of, resolve
from art_cli.threads import LoopThread, call_in_thread
from art_cli.trajectory import Score, Trajectory

CLOSE_TIMEOUT_S = 5.0


class FunctionJudge(Judge):
    """Raises UsageError when it is made: the function cannot be loaded."""

    title = "function"
    settings = ""  # the digest of the function's name and file

    def __init__(self, config: FunctionJudgeConfig, directory: Path, *, job: str = "") -> None:
        self._entry = config.entry
        self.timeout_s = config.timeout_s
        self._root = directory.resolve()
        self._function: Callable[[list[Trajectory]], Any] = resolve(config.entry, base=directory)
        if not callable(self._function):
            raise UsageError(f"{config.entry}: not a function but {type(self._function).__name__}")
        self.settings = _digest(config.entry, directory)
        self._loop = LoopThread("judge")

    async def judge(self, group: Sequence[Trajectory]) -> Mapping[str, Verdict]:
        """Raises JudgeError: the function raised, took too long, or did not give each trajectory one finite number."""
        if not group:
            return {}
        rewards = self._check(await self._call(copy.deepcopy(list(group))), group)
        return {
            id: Verdict(reward=reward, scores=[Score(judge="function", score=reward)]) for id, reward in rewards.items()
        }

    async def close(self) -> None:
        await self._loop.close(CLOSE_TIMEOUT_S)

    async def _call(self, group: list[Trajectory]) -> Any:
        try:
            async with asyncio.timeout(self.timeout_s) as limit:
                if inspect.iscoroutinefunction(self._function):
                    return await self._loop.run(self._function(group))
                return await call_in_thread(self._function, group)
        except Exception as error:  # the boundary to the user's function
            if limit.expired():
                raise JudgeError(f"{self._entry}: no answer within {self.timeout_s:g} s (judge.timeout_s)") from error
            place = place_of(error, self._root)
            where = f" ({place})" if place else ""
            raise JudgeError(f"{self._entry}: {describe(error)}{where}") from error

    def _check(self, answer: Any, group: Sequence[Trajectory]) -> dict[str, float]:
        """The answer by id, each a finite number."""
        ids = [trajectory.id for trajectory in group]
        answer = answer.tolist() if hasattr(answer, "tolist") else answer  # an array or a tensor
        if isinstance(answer, Mapping):
            if missing := [id for id in ids if id not in answer]:
                raise JudgeError(f"{self._entry}: no reward for {missing[0]} ({len(missing)} of {len(ids)} missing)")
            if unknown := [id for id in answer if id not in ids]:
                raise JudgeError(f"{self._entry}: a reward for {unknown[0]!r}, which is not in the group")
            return {id: self._number(answer[id], id) for id in ids}
        if isinstance(answer, str | bytes) or not isinstance(answer, Sequence):
            raise JudgeError(f"{self._entry}: must return a list of numbers or a dict by id, not {_kind(answer)}")
        if len(answer) != len(ids):
            raise JudgeError(f"{self._entry}: returned {len(answer)} rewards for {len(ids)} trajectories")
        return {id: self._number(value, id) for id, value in zip(ids, answer, strict=True)}

    def _number(self, value: Any, id: str) -> float:
        try:
            number = float(value) if isinstance(value, Real) else math.nan
        except (OverflowError, ValueError):  # a whole number beyond all floats
            number = math.inf
        if not math.isfinite(number):
            raise JudgeError(f"{self._entry}: the reward of {id} is {value!r:.60}, not a finite number")
        return number


def _digest(entry: str, directory: Path) -> str:
    """A digest of the function's name and of the file it is loaded from; what that file imports is not looked at."""
    module, _, name = entry.rpartition(":")
    source = (
        directory / module if module.endswith(".py") else Path(getattr(sys.modules[module], "__file__", None) or "")
    )
    text = source.read_bytes() if source.is_file() else entry.encode()
    return make_key(function=name, source=hashlib.sha256(text).hexdigest())[:12]


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__name__
