"""RULER: a language model sees all attempts of a group at once and scores each against the others.

Relative Universal LLM-Elicited Rewards. No labels and no reward function: the task is read from the attempts. The
judge model is not trusted: it votes in several orders, several models can form a panel, answers are matched by id and
refused unless complete. RulerJudge reads rubric and instructions from text files and writes the verdict cache. A group
that cannot be scored stays owed (JudgeError).

    group -> group.py: different attempts -> voter.py: votes of each model -> prompt.py -> providers/ -> verdict.py
          -> votes.py: one score of each model -> here: weighted mean of the panel -> Verdict by id

`ruler_score_group` is RULER as one Python call, for programs that have groups already.

    judged = await ruler_score_group(group, "openai/o3")

A group is a list of our trajectories or of {"messages": [...]} dicts, and comes back as scored trajectories; or it is
an object with `trajectories` (as OpenPipe ART has them), and comes back as a copy of itself with the rewards set.
"""

import asyncio
import copy
import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from art_cli.config.schema import JudgeModelConfig, PanelMemberConfig, RulerJudgeConfig
from art_cli.config.sections.judge_config import RULE
from art_cli.judges import Judge, Verdict, make_key
from art_cli.judges.costs import Budget, CostEstimate, Spent, Usage, find_price
from art_cli.judges.judge_groups import judge_group, require_keys
from art_cli.judges.providers.caller import FIRST_DELAY_S, Caller, make_provider
from art_cli.judges.providers.http import missing_key, openai_base
from art_cli.judges.providers.rule import SAYS, RuleError, read_rules
from art_cli.judges.ruler.group import read_group
from art_cli.judges.ruler.prompt import read_instructions
from art_cli.judges.ruler.verdict_cache import VerdictCache, user_cache_path
from art_cli.judges.ruler.voter import Voter, all_of
from art_cli.runs.reliability import error_variance
from art_cli.runs.trajectory import Json, Score, ScoredTrajectory, Trajectory
from art_cli.runtime.errors import JudgeError, UsageError
from art_cli.runtime.secrets import find_secrets, load_environment

log = logging.getLogger(__name__)

TRIAL_RETRIES = 1  # tries after a failed call of a trial; few, because a user waits for it


class RulerJudge(Judge):
    """The judge of `judge=ruler`. `rubric` is a rubric as text, in place of the configuration's file.

    Raises UsageError when it is made: an unreadable rubric or cache, a budget in dollars for a model without a price.
    """

    settings = ""  # the digest of the judge's instructions
    has_rounds = True

    def __init__(
        self,
        config: RulerJudgeConfig,
        directory: Path,
        *,
        job: str = "",
        rubric: str | None = None,
        first_delay_s: float = FIRST_DELAY_S,
    ) -> None:
        self.config = config
        self.panel = _panel(config)
        self.title = ", ".join(f"{each.model} ({SAYS})" if each.is_rule else each.model for each in self.panel)
        self.in_flight = config.concurrency + 8  # every call has its slot while other groups are read and written
        _check_prices(config, self.panel)
        load_environment(directory)
        instructions = read_instructions(config, directory, rubric=rubric)
        _check_rules(self.panel, instructions)
        self.settings = _settings(config, self.panel, instructions)
        self.cache = VerdictCache(_cache_path(config, directory))
        spent = self.cache.spent(job) if job else Spent(usd=0.0, tokens=0)
        self.spent_usd = spent.usd
        self.is_priced = all(find_price(member) is not None for member in self.panel)
        self.budget = Budget(config.budget_usd, config.budget_tokens, spent)
        secrets = find_secrets(
            os.environ,
            names=[member.api_key_env or "" for member in self.panel],
            urls=[member.base_url or openai_base() for member in self.panel],
            params=[member.params for member in self.panel],
        )
        slots = asyncio.Semaphore(config.concurrency)
        self.voters = []
        for member in self.panel:
            caller = Caller(
                member,
                make_provider(member, secrets),
                slots=slots,
                budget=self.budget,
                timeout_s=config.timeout_s,
                retries=config.retries,
                first_delay_s=first_delay_s,
            )
            self.voters.append(Voter(config, caller, self.cache, instructions=instructions, job=job))

    async def judge(self, group: Sequence[Trajectory]) -> Mapping[str, Verdict]:
        """Returns one verdict per trajectory id; the reward is the panel's weighted mean in [0, 1]. Raises
        JudgeError."""
        return await self._judge(group, num_rounds=1) if group else {}

    async def judge_again(self, group: Sequence[Trajectory], num_rounds: int) -> Mapping[str, Verdict]:
        """As `judge`, by `num_rounds` times as many votes of each model. Earlier votes come from the cache."""
        return await self._judge(group, num_rounds=num_rounds)

    async def _judge(self, group: Sequence[Trajectory], *, num_rounds: int) -> Mapping[str, Verdict]:
        judged = read_group(group, self.config)
        by_model = await all_of(
            [voter.score(judged, settings=self.settings, num_rounds=num_rounds) for voter in self.voters]
        )
        weights = [member.weight for member in self.panel]
        variance = self._error_variance(by_model)
        verdicts: dict[str, Verdict] = {}
        for ids, *scores in zip(judged.members, *by_model, strict=True):
            reward = sum(weight * score.score for weight, score in zip(weights, scores, strict=True)) / sum(weights)
            verdict = Verdict(reward=min(1.0, max(0.0, reward)), scores=scores, variance=variance)
            verdicts |= dict.fromkeys(ids, verdict)
        return verdicts

    def _error_variance(self, by_model: Sequence[Sequence[Score]]) -> float | None:
        """Returns the error variance of each reward, a weighted mean of the models' scores, or None with too few votes.

        That of a median is pi / 2 times that of a mean, which holds for many votes with normal errors.
        """
        variances = [error_variance([score.votes for score in scores]) for scores in by_model]
        known = [variance for variance in variances if variance is not None]
        if len(known) < len(variances):
            return None
        total = sum(member.weight for member in self.panel)
        variance = sum((member.weight / total) ** 2 * each for member, each in zip(self.panel, known, strict=True))
        return variance * (math.pi / 2 if self.config.aggregate == "median" and self.config.votes > 2 else 1.0)

    @property
    def usage(self) -> Usage:
        return sum((voter.usage for voter in self.voters), Usage())

    @property
    def num_cached(self) -> int:
        return sum(voter.num_cached for voter in self.voters)

    def estimate(self, group: Sequence[Trajectory]) -> CostEstimate | None:
        if all(member.is_rule for member in self.panel):
            return None
        if not group:
            return CostEstimate()
        judged = read_group(group, self.config)
        return sum((voter.estimate(judged) for voter in self.voters), CostEstimate())

    @classmethod
    def for_trial(cls, config: RulerJudgeConfig, directory: Path) -> "RulerJudge":
        asked_once = {"votes": 1, "attempts": 1, "retries": min(config.retries, TRIAL_RETRIES), "cache": None}
        return cls(config.model_copy(update=asked_once), directory)

    @classmethod
    def missing_keys(cls, config: RulerJudgeConfig, directory: Path) -> dict[str, str]:
        """Reads .env files as the judge does."""
        load_environment(directory)
        return {name: member.model for member in _panel(config) if (name := missing_key(member))}

    async def close(self) -> None:
        for voter in self.voters:
            await voter.caller.close()
        self.cache.close()


def _panel(config: RulerJudgeConfig) -> list[PanelMemberConfig]:
    """Returns the panel; without one, a panel of the configuration's own model."""
    alone = {name: getattr(config, name) for name in JudgeModelConfig.model_fields}
    return config.panel or [PanelMemberConfig(**alone)]


def _cache_path(config: RulerJudgeConfig, directory: Path) -> Path | None:
    if config.cache is None:
        return None
    return user_cache_path() if config.cache == "user" else directory / Path(config.cache).expanduser()


def _check_prices(config: RulerJudgeConfig, panel: Sequence[JudgeModelConfig]) -> None:
    for member in panel if config.budget_usd is not None else ():
        if find_price(member) is None:
            raise UsageError(
                f"judge.budget_usd: no price is known for {member.model}; set judge.price: {{input: .., output: ..}} "
                "in dollars per million tokens, or use judge.budget_tokens"
            )


def _check_rules(panel: Sequence[JudgeModelConfig], instructions: str) -> None:
    """Raises UsageError if builtin:rule has no rules, or one that cannot be read; else logs that no model judges."""
    if not any(member.is_rule for member in panel):
        return
    try:
        rules = read_rules(instructions)
    except RuleError as error:
        raise UsageError(f"judge.rubric: {RULE}: {error}") from error
    log.info("judge: %s is no model; it follows the %d rules of the rubric", RULE, len(rules))


def _settings(config: RulerJudgeConfig, panel: Sequence[JudgeModelConfig], instructions: str) -> str:
    """Returns a digest of everything that changes a verdict: two files with the same digest can be compared."""
    told = {"votes", "aggregate", "seed", "max_group", "max_tokens_per_attempt"}
    models = [member.model_dump(mode="json", include={"model", "params", "weight"}) for member in panel]
    return make_key(told=config.model_dump(mode="json", include=told), models=models, instructions=instructions)[:12]


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
