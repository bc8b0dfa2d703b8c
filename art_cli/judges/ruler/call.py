"""`ruler_score_group`: RULER as one Python call, for programs that have groups already.

    judged = await ruler_score_group(group, "openai/o3")

A group is a list of our trajectories or of {"messages": [...]} dicts, and comes back as scored trajectories; or it is
an object with `trajectories` (as OpenPipe ART has them), and comes back as a copy of itself with the rewards set.
"""

import copy
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from art_cli.config.schema import RulerJudgeConfig
from art_cli.judges.judge_groups import judge_group
from art_cli.judges.ruler.ruler_judge import RulerJudge
from art_cli.judges.smoke_test import require_keys
from art_cli.runs.trajectory import Json, ScoredTrajectory, Trajectory
from art_cli.runtime.errors import JudgeError, UsageError

log = logging.getLogger(__name__)


async def ruler_score_group(
    group: Any,
    judge_model: str = "openai/o3",
    extra_litellm_params: Mapping[str, Any] | None = None,
    rubric: str | None = None,
    *,
    swallow_exceptions: bool = False,
    debug: bool = False,
    **settings: Any,
) -> Any:
    """Returns the group, scored. `settings` are those of the judge section: votes=4, base_url=..., cache=None.

    `rubric` is the text of a rubric. `debug` logs every score with its explanation. Raises JudgeError when no complete
    verdict came (with `swallow_exceptions` it returns None instead), and UsageError when a setting is wrong.
    """
    judge = _make_judge(judge_model, extra_litellm_params, rubric, settings)
    try:
        scored = await judge_group(judge, _read_group(group))
    except JudgeError as error:
        if not swallow_exceptions:
            raise
        log.warning("a group was not scored: %s", error)
        return None
    finally:
        await judge.close()
    for trajectory in scored if debug else ():
        log.info("%s: %s %s", trajectory.id, trajectory.reward, [score.explanation for score in trajectory.scores])
    return _give_back(group, scored) if hasattr(group, "trajectories") else scored


def _make_judge(model: str, params: Mapping[str, Any] | None, rubric: str | None, settings: Json) -> RulerJudge:
    given = {"model": model} if not settings.get("panel") else {}
    if params:
        given["params"] = dict(params)  # type: ignore[assignment]
    try:
        config = RulerJudgeConfig(name="ruler", **{**given, **settings})
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
        raise UsageError(f"ruler_score_group: {'; '.join(problems)}") from error
    require_keys(config, Path.cwd())
    return RulerJudge(config, Path.cwd(), rubric=rubric)


def _read_group(group: Any) -> list[Trajectory]:
    """Returns the group's attempts as our trajectories; foreign attempts get their index as id."""
    items: list[Any] = list(getattr(group, "trajectories", group))
    if all(isinstance(item, Trajectory) for item in items):
        return items
    return [
        Trajectory(id=str(index), group_id="group", group_size=len(items), index=index, **_fields(item))
        for index, item in enumerate(items)
    ]


def _fields(item: Any) -> Json:
    """Messages, side conversations and tools of a foreign attempt."""
    if isinstance(item, Mapping):
        return {"messages": list(item.get("messages") or []), "tools": list(item.get("tools") or [])}
    histories = getattr(item, "additional_histories", None) or []
    return {
        "messages": _messages(item),
        "branches": [_messages(history) for history in histories],
        "tools": list(getattr(item, "tools", None) or []),
    }


def _messages(item: Any) -> list[Json]:
    messages = item.messages() if callable(getattr(item, "messages", None)) else item.messages
    return [message if isinstance(message, dict) else message.model_dump(exclude_none=True) for message in messages]


def _give_back(group: Any, scored: Sequence[ScoredTrajectory]) -> Any:
    """Returns a copy of the foreign group with new rewards; metrics["independent_reward"] keeps the old ones."""
    judged = copy.copy(group)
    judged.trajectories = [copy.deepcopy(item) for item in group.trajectories]
    for item, trajectory in zip(judged.trajectories, scored, strict=True):
        metrics = getattr(item, "metrics", None)
        if isinstance(metrics, dict):
            metrics["independent_reward"] = getattr(item, "reward", None)
            metrics["ruler_score"] = trajectory.reward
        item.reward = trajectory.reward
        if callable(record := getattr(item, "log", None)):
            record(f"RULER explanation: {trajectory.scores[0].explanation}")
    return judged
