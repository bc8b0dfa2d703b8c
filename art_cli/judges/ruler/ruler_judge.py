"""RULER: a language model sees all attempts of a group together and scores each relative to the others.

Relative Universal LLM-Elicited Rewards. Needs no labels and no reward function, because the model infers the task from
the attempts. The judge model is not trusted: it votes in several orders, several models can form a panel, and answers
are matched by id and rejected unless complete. RulerJudge reads rubric and instructions from text files and writes the
verdict cache. If a group cannot be scored, it stays owed (JudgeError).

    group -> group.py: different attempts -> Voter: votes of each model -> prompt.py -> providers/ -> verdict.py
          -> votes.py: one score per model -> here: weighted panel mean -> Verdict by id

`ruler_score_group` is RULER as a single Python call, for programs with existing groups.

    judged = await ruler_score_group(group)

A group can be a list of our trajectories or {"messages": [...]} dicts, and the result is a list of scored trajectories.
It can also be an object with `trajectories` (OpenPipe ART), and the result is a copy with rewards set.
"""

import asyncio
import copy
import functools
import logging
import os
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import msgspec
from pydantic import ValidationError

from art_cli.config.schema import JudgeModelConfig, PanelMemberConfig, RulerJudgeConfig
from art_cli.config.sections.judge_config import DEFAULT_JUDGE, RULE
from art_cli.judges import Judge, Verdict, make_key
from art_cli.judges.costs import Budget, CostEstimate, Spent, Usage, find_price
from art_cli.judges.judge_groups import judge_group
from art_cli.judges.providers import LONG_ANSWER, Answer
from art_cli.judges.providers.caller import FIRST_DELAY_S, Caller, make_provider
from art_cli.judges.providers.http import OPENAI, missing_key, openai_base
from art_cli.judges.providers.rule import SAYS, RuleError, read_rules
from art_cli.judges.reliability import error_variance
from art_cli.judges.ruler import votes
from art_cli.judges.ruler.group import JudgedGroup, read_group
from art_cli.judges.ruler.prompt import JudgePrompt, read_instructions, schema, write_prompt
from art_cli.judges.ruler.verdict import Entry, VerdictError, parse_verdict
from art_cli.judges.ruler.verdict_cache import StoredVote, VerdictCache, patiently
from art_cli.judges.ruler.votes import AffineMap
from art_cli.judges.trial import require_keys
from art_cli.runs.trajectory import Json, Score, ScoredTrajectory, Trajectory
from art_cli.runtime.errors import JudgeError, JudgeStopped, UsageError
from art_cli.runtime.scratch import user_cache
from art_cli.runtime.secrets import find_secrets, load_environment

log = logging.getLogger(__name__)

MAX_OFF_SCALE = 3  # consecutive answers on a different scale before the model is given up
MAX_SENT_BACK = 20_000  # characters of an unusable answer sent back to the judge

T = TypeVar("T")
TRIAL_RETRIES = 1  # few, because the user is waiting


@dataclass(frozen=True)
class AttemptVotes:
    """One model's k votes on one attempt: scores, prompt positions, explanations, mean seconds per vote."""

    votes: list[float]  # [k]
    positions: list[int]  # [k]
    explanations: list[str | None]  # [k]
    model: str | None  # model names from the replies, joined by ", "
    latency_s: float

    def rescaled(self, scale: AffineMap) -> "AttemptVotes":
        return replace(self, votes=[scale(vote) for vote in self.votes])


class Voter:
    """Collects the votes of one model. `usage` covers this process's calls, `num_cached` counts reused votes."""

    def __init__(
        self, config: RulerJudgeConfig, caller: Caller, cache: VerdictCache, *, instructions: str, job: str
    ) -> None:
        self.caller, self.member = caller, caller.member
        self._config, self._cache, self._instructions, self._job = config, cache, instructions, job
        self.usage = Usage()
        self.num_cached = 0
        self._num_off_scale = 0  # consecutive answers on a different scale
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    # --- scores -------------------------------------------------------------------------------------------------------

    async def score(self, group: JudgedGroup, *, settings: str) -> list[Score]:
        """Returns [A] the model's score for each attempt; `settings` is stored in every score. Raises JudgeError."""
        first, *others = group.parts(self._config.max_group)
        scored, usage = await self._ask_about(group, first)
        found = dict(zip(first, scored, strict=True))
        if others:
            usage += await self._add_parts(group, first, others, found)
        return [self._write_score(found[index], usage, group, settings) for index in range(len(group.attempts))]

    async def _add_parts(
        self,
        group: JudgedGroup,
        first: Sequence[int],
        others: Sequence[list[int]],
        found: dict[int, AttemptVotes],
    ) -> Usage:
        """Adds votes for all other parts to `found`, mapped to the scale of the first part. Returns the usage."""
        count = votes.num_anchors(self._config.max_group)
        reference = [fmean(found[index].votes) for index in first]
        anchors = [first[rank] for rank in votes.choose_anchors(reference, count)]
        usage = Usage()
        asked = await all_of([self._ask_about(group, [*anchors, *part]) for part in others])
        for part, (marked, took) in zip(others, asked, strict=True):
            usage += took
            here = [fmean(each.votes) for each in marked[:count]]
            scale = votes.fit(here, [fmean(found[index].votes) for index in anchors])
            found |= {index: each.rescaled(scale) for index, each in zip(part, marked[count:], strict=True)}
        scale = votes.into_range([vote for each in found.values() for vote in each.votes])
        found |= {index: each.rescaled(scale) for index, each in found.items()}
        return usage

    async def _ask_about(self, group: JudgedGroup, indices: Sequence[int]) -> tuple[list[AttemptVotes], Usage]:
        """Returns [len(indices)] the votes on these attempts, shown together, and the usage."""
        cast = await all_of([self._vote(group, indices, vote) for vote in range(self._config.votes)])
        usage = sum((vote.usage for vote in cast), Usage())
        model = ", ".join(sorted({vote.model for vote in cast if vote.model})) or None
        return [
            AttemptVotes(
                votes=[vote.entries[at].score for vote in cast],
                positions=[vote.positions[at] for vote in cast],
                explanations=[vote.entries[at].explanation for vote in cast],
                model=model,
                latency_s=usage.latency_s / len(cast),
            )
            for at in range(len(indices))
        ], usage

    def _write_score(self, attempt: AttemptVotes, usage: Usage, group: JudgedGroup, settings: str) -> Score:
        score = min(1.0, max(0.0, fmean(attempt.votes)))
        nearest = min(range(len(attempt.votes)), key=lambda vote: abs(attempt.votes[vote] - score))
        return Score(
            judge="ruler",
            model=self.member.model,
            model_returned=attempt.model,
            score=score,
            explanation=attempt.explanations[nearest],
            votes=attempt.votes,
            spread=votes.spread(attempt.votes),
            positions=attempt.positions,
            cost_usd=None if usage.cost_usd is None else usage.cost_usd / group.num_trajectories,
            prompt_tokens=usage.prompt_tokens / group.num_trajectories,
            completion_tokens=usage.completion_tokens / group.num_trajectories,
            latency_s=attempt.latency_s,
            settings=settings,
        )

    # --- one vote -----------------------------------------------------------------------------------------------------

    async def _vote(self, group: JudgedGroup, indices: Sequence[int], vote: int) -> StoredVote:
        """Returns a usable answer on all these attempts. Raises JudgeError if every answer was unusable."""
        first = self._prompt(group, indices, vote, ask=0)
        key = vote_key(self.member, first)
        async with self._locks.setdefault(key, asyncio.Lock()):  # identical groups wait and reuse the vote
            if stored := await patiently(lambda: self._cache.get(key, len(indices))):
                self.num_cached += 1
                return stored
            fresh = await self._ask_until_usable(group, indices, vote, first)
            await patiently(lambda: self._cache.put(key, fresh))
            return fresh

    def _prompt(self, group: JudgedGroup, indices: Sequence[int], vote: int, *, ask: int) -> JudgePrompt:
        """Returns the prompt for vote number `vote`. Repeated asks keep the order and change the ids."""
        order = votes.order(len(indices), seed=group.seed, vote=vote)
        return write_prompt(
            [group.attempts[index] for index in indices],
            order=order,
            tools=group.tools,
            instructions=self._instructions,
            seed=f"{group.seed}:{vote}:{ask}",
        )

    async def _ask_until_usable(
        self, group: JudgedGroup, indices: Sequence[int], vote: int, first: JudgePrompt
    ) -> StoredVote:
        usage = Usage()
        problem = ""
        for ask in range(self._config.attempts):
            prompt = self._prompt(group, indices, vote, ask=ask) if ask else first
            found, took, problem = await self._ask(prompt, group.group_id)
            usage += took
            if found is not None:
                return msgspec.structs.replace(found, usage=usage)
        raise JudgeError(
            f"{self.member.model}: no usable verdict, asked {self._config.attempts} times; the last: {problem}"
        )

    async def _ask(self, prompt: JudgePrompt, group_id: str) -> tuple[StoredVote | None, Usage, str]:
        """Returns the vote if usable, the usage, and the problem with the answer."""
        messages = prompt.messages
        usage = Usage()
        problem = ""
        for _ in range(2):  # the question, then one correction round
            answer = await self.caller.ask(messages, schema(prompt.ids), num_attempts=len(prompt.ids))
            usage += answer.usage
            try:
                found = await _parse(answer.text, prompt.ids)
            except VerdictError as error:
                problem = str(error) + (" (the answer was cut off)" if answer.finish_reason == "length" else "")
                problem = f"the model refuses to answer: {answer.refusal}" if answer.refusal else problem
                await self._record(answer, group_id, problem)
                log.debug("%s: %s: %s", group_id, self.member.model, problem)
                self._check_scale(error.top)
                messages = [*prompt.messages, *_complaint(answer, error, prompt.ids)]
            else:
                self._num_off_scale = 0
                await self._record(answer, group_id, "verdict")
                vote = StoredVote([found[name] for name in prompt.ids], prompt.positions, usage, answer.model)
                return vote, usage, ""
        return None, usage, problem

    def _check_scale(self, top: float | None) -> None:
        """Counts consecutive answers on a different scale. Raises JudgeStopped at MAX_OFF_SCALE."""
        self._num_off_scale = 0 if top is None else self._num_off_scale + 1
        if top is not None and self._num_off_scale >= MAX_OFF_SCALE:
            raise JudgeStopped(
                f"{self.member.model}: its last {self._num_off_scale} answers are on another scale, with scores up to "
                f"{top:g} and not 1; ask in judge.rubric for scores from 0 to 1, or name another model"
            )

    async def _record(self, answer: Answer, group_id: str, outcome: str) -> None:
        self.usage += answer.usage
        record = functools.partial(self._cache.record_call, job=self._job, model=self.member.model, group_id=group_id)
        await patiently(lambda: record(outcome=outcome[:200], usage=answer.usage))

    # --- costs --------------------------------------------------------------------------------------------------------

    def estimate(self, group: JudgedGroup) -> CostEstimate:
        """Returns the cost of voting on this group now. Uses arbitrary anchors for large groups."""
        total = CostEstimate()
        for part in group.parts_by_example(self._config.max_group):
            for vote in range(self._config.votes):
                prompt = self._prompt(group, part, vote, ask=0)
                if self._cache.get(vote_key(self.member, prompt), len(prompt.ids)):
                    total += CostEstimate(cached=1)
                    continue
                tokens = self.caller.expected_tokens(prompt.messages, len(part))
                price = find_price(self.member)
                total += CostEstimate(1, 0, *tokens, price.cost(*tokens) if price else None)
        return total


async def all_of(waits: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Returns all results. Waits for all before raising a failure, because running calls are already paid for.

    JudgeStopped takes precedence over other failures.
    """
    results = await asyncio.gather(*waits, return_exceptions=True)
    failures = [result for result in results if isinstance(result, BaseException)]
    for failure in sorted(failures, key=lambda failure: not isinstance(failure, JudgeStopped)):
        raise failure
    return [result for result in results if not isinstance(result, BaseException)]


async def _parse(text: str, ids: Sequence[str]) -> dict[str, Entry]:
    """Runs `parse_verdict`, in a thread for long answers."""
    if len(text) < LONG_ANSWER:
        return parse_verdict(text, ids)
    return await asyncio.to_thread(parse_verdict, text, ids)


def vote_key(member: JudgeModelConfig, prompt: JudgePrompt) -> str:
    """Returns a vote's cache key. It covers all inputs that influence the answer, but not API key or price."""
    own = member.needs_litellm or member.is_rule or openai_base() == OPENAI  # old keys omit OpenAI's address
    return make_key(
        model=member.model,
        api_base=member.base_url or (None if own else openai_base()),
        params=member.params,
        response_format=member.response_format,
        messages=prompt.messages,
    )


def _complaint(answer: Answer, error: VerdictError, ids: Sequence[str]) -> list[Json]:
    """Returns two messages for a retry: the unusable answer and its problems."""
    request = (
        f"This answer cannot be used: {'; '.join(error.problems[:10])}. Answer again with one JSON object and nothing "
        f"else, every attempt exactly once, by its id, with a score from 0 to 1: {', '.join(ids)}"
    )
    return [
        {"role": "assistant", "content": answer.text[:MAX_SENT_BACK] or "(nothing)"},
        {"role": "user", "content": request},
    ]


class RulerJudge(Judge):
    """The judge for `judge=ruler`. `rubric` is rubric text that replaces the configured file.

    Raises UsageError for an unreadable rubric or cache, or for a dollar budget with unpriced models.
    """

    settings = ""  # digest of all settings that influence verdicts
    compares = True

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
        self.in_flight = config.concurrency + 8  # keeps all call slots busy during file I/O
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
        """Returns verdicts by trajectory id. The reward is the panel's weighted mean in [0, 1]. Raises JudgeError."""
        if not group:
            return {}
        judged = read_group(group, self.config)
        by_model = await all_of([voter.score(judged, settings=self.settings) for voter in self.voters])
        weights = [member.weight for member in self.panel]
        variance = self._error_variance(by_model)
        verdicts: dict[str, Verdict] = {}
        for ids, *scores in zip(judged.members, *by_model, strict=True):
            reward = sum(weight * score.score for weight, score in zip(weights, scores, strict=True)) / sum(weights)
            verdict = Verdict(reward=min(1.0, max(0.0, reward)), scores=scores, variance=variance)
            verdicts |= dict.fromkeys(ids, verdict)
        return verdicts

    def reseed(self) -> None:
        self.config = self.config.model_copy(update={"seed": self.config.seed + 1})

    def _error_variance(self, by_model: Sequence[Sequence[Score]]) -> float | None:
        """Returns the error variance of each reward (the panel's weighted mean), if there are enough votes.

        If all attempts are identical, they share one score and therefore one error.
        """
        if len(by_model[0]) < 2:
            return 0.0
        variances = [error_variance([score.votes for score in scores]) for scores in by_model]
        known = [variance for variance in variances if variance is not None]
        if len(known) < len(variances):
            return None
        total = sum(member.weight for member in self.panel)
        return sum((member.weight / total) ** 2 * each for member, each in zip(self.panel, known, strict=True))

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
        """Also reads .env files, like the judge."""
        load_environment(directory)
        return {name: member.model for member in _panel(config) if (name := missing_key(member))}

    async def close(self) -> None:
        for voter in self.voters:
            await voter.caller.close()
        self.cache.close()


def _panel(config: RulerJudgeConfig) -> list[PanelMemberConfig]:
    """Returns the configured panel, or a panel of the single configured model."""
    alone = {name: getattr(config, name) for name in JudgeModelConfig.model_fields}
    return config.panel or [PanelMemberConfig(**alone)]


def _cache_path(config: RulerJudgeConfig, directory: Path) -> Path | None:
    if config.cache is None:
        return None
    return user_cache() / "verdicts.sqlite" if config.cache == "user" else directory / Path(config.cache).expanduser()


def _check_prices(config: RulerJudgeConfig, panel: Sequence[JudgeModelConfig]) -> None:
    for member in panel if config.budget_usd is not None else ():
        if find_price(member) is None:
            raise UsageError(
                f"judge.budget_usd: no price is known for {member.model}; set judge.price: {{input: .., output: ..}} "
                "in dollars per million tokens, or use judge.budget_tokens"
            )


def _check_rules(panel: Sequence[JudgeModelConfig], instructions: str) -> None:
    """For builtin:rule, raises UsageError for missing or invalid rules and logs that no model judges."""
    if not any(member.is_rule for member in panel):
        return
    try:
        rules = read_rules(instructions)
    except RuleError as error:
        raise UsageError(f"judge.rubric: {RULE}: {error}") from error
    log.info("judge: %s is not a model; it follows the %d rules of the rubric", RULE, len(rules))


def _settings(config: RulerJudgeConfig, panel: Sequence[JudgeModelConfig], instructions: str) -> str:
    """Returns a digest of all settings that change verdicts. Files with equal digests are comparable."""
    deciding = {"votes", "seed", "max_group", "max_tokens_per_attempt"}
    told = config.model_dump(mode="json", include=deciding) | {"aggregate": "mean"}  # older versions also had a median
    models = [member.model_dump(mode="json", include={"model", "params", "weight"}) for member in panel]
    return make_key(told=told, models=models, instructions=instructions)[:12]


async def ruler_score_group(
    group: Any,
    judge_model: str = DEFAULT_JUDGE,
    extra_litellm_params: Mapping[str, Any] | None = None,
    rubric: str | None = None,
    *,
    swallow_exceptions: bool = False,
    debug: bool = False,
    **settings: Any,
) -> Any:
    """Scores a group. `settings` are fields of the judge section: votes=4, base_url=..., cache=None.

    `rubric` is rubric text. `debug` logs every score with its explanation. Raises JudgeError without a complete verdict
    (returns None with `swallow_exceptions`), and UsageError for invalid settings.
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
    """Converts the group to trajectories; foreign attempts get their index as id."""
    items: list[Any] = list(getattr(group, "trajectories", group))
    if all(isinstance(item, Trajectory) for item in items):
        return items
    return [
        Trajectory(id=str(index), group_id="group", group_size=len(items), index=index, **_fields(item))
        for index, item in enumerate(items)
    ]


def _fields(item: Any) -> Json:
    """Returns messages, side conversations and tools of a foreign attempt."""
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
    """Returns a copy of the foreign group with new rewards. Old rewards are kept in metrics["independent_reward"]."""
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
