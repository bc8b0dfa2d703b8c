"""RULER: a language model sees all attempts of a group at once and scores each against the others.

Relative Universal LLM-Elicited Rewards. No labels and no reward function: the task is read from the attempts. The
judge is not trusted: votes in several orders, panels of several models, answers matched by id and refused unless whole.
Reads rubric and instructions from text files, writes the verdict cache. What cannot be scored stays owed (JudgeError).

    group -> docket -> (parts) -> poll: prompt -> caller -> verdict -> votes -> (scale) -> panel mean -> Verdict by id
"""

import asyncio
import importlib.util
import os
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from art_cli.config.schema import JudgeModelConfig, PanelMemberConfig, RulerJudgeConfig, no_litellm
from art_cli.errors import JudgeStopped, UsageError
from art_cli.judges import Verdict, scale, votes
from art_cli.judges.budget import Budget
from art_cli.judges.cache import Spent, Usage, VerdictCache, make_key, user_cache_path
from art_cli.judges.caller import FIRST_DELAY_S, Caller
from art_cli.judges.docket import Docket, read_docket
from art_cli.judges.instructions import read_instructions
from art_cli.judges.keys import Secrets, find_secrets, load_environment, openai_base
from art_cli.judges.poll import Poll
from art_cli.judges.prices import find_price
from art_cli.judges.provider import Provider
from art_cli.trajectory import Score, Trajectory

T = TypeVar("T")


@dataclass(frozen=True)
class Marks:
    """What one model gave one attempt: k votes, where each showed it, why, and the seconds a vote took on average."""

    votes: list[float]  # [k]
    positions: list[int]  # [k]
    explanations: list[str | None]  # [k]
    latency_s: float

    def scaled(self, line: scale.Line) -> "Marks":
        return replace(self, votes=[line(vote) for vote in self.votes])


class RulerJudge:
    """The Judge. `directory` is what paths in the configuration are relative to; `job` names whose budget it spends;
    `rubric` is a rubric as text, in place of the configuration's file.

    `settings` is a digest of what the judge is told; `usage` and `num_cached` count what this process paid and did not.
    Raises UsageError when it is made: an unreadable rubric or cache, a budget in dollars for a model without a price.
    """

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
        self.panel = config.panel or [_lone(config)]
        _check_prices(config, self.panel)
        load_environment(directory)
        instructions = read_instructions(config, directory, rubric=rubric)
        self.settings = _settings(config, self.panel, instructions)
        self.cache = VerdictCache(_cache_path(config, directory))
        self.budget = Budget(
            config.budget_usd, config.budget_tokens, self.cache.spent(job) if job else Spent(usd=0.0, tokens=0)
        )
        secrets = find_secrets(
            os.environ,
            names=[member.api_key_env or "" for member in self.panel],
            urls=[member.api_base or openai_base() for member in self.panel],
            params=[member.params for member in self.panel],
        )
        slots = asyncio.Semaphore(config.concurrency)
        self.polls = []
        for member in self.panel:
            caller = Caller(
                member,
                _make_provider(member, secrets),
                slots=slots,
                budget=self.budget,
                timeout_s=config.timeout_s,
                retries=config.retries,
                first_delay_s=first_delay_s,
            )
            self.polls.append(Poll(config, caller, self.cache, instructions=instructions, job=job))

    @property
    def usage(self) -> Usage:
        return sum((poll.total for poll in self.polls), Usage())

    @property
    def num_cached(self) -> int:
        return sum(poll.num_cached for poll in self.polls)

    async def judge(self, group: Sequence[Trajectory]) -> Mapping[str, Verdict]:
        """One verdict per trajectory id; the reward is the panel's weighted mean, in [0, 1]. Raises JudgeError."""
        if not group:
            return {}
        docket = read_docket(group, self.config)
        results = await _all([self._score(poll, docket) for poll in self.polls])
        weights = [member.weight for member in self.panel]
        verdicts: dict[str, Verdict] = {}
        for place, ids in enumerate(docket.members):
            scores = [
                self._write_score(poll, marks[place], usage, docket.num_trajectories)
                for poll, (marks, usage) in zip(self.polls, results, strict=True)
            ]
            reward = sum(w * score.score for w, score in zip(weights, scores, strict=True)) / sum(weights)
            verdicts |= {name: Verdict(reward=min(1.0, max(0.0, reward)), scores=scores) for name in ids}
        return verdicts

    async def _score(self, poll: Poll, docket: Docket) -> tuple[list[Marks], Usage]:
        """[A] what one model gives each attempt, and what that took. Groups too large for one call go in parts."""
        first, *others = docket.parts(self.config.max_group)
        marks, usage = await self._score_part(poll, docket, first)
        found = dict(zip(first, marks, strict=True))
        if others:
            reference = [self._aggregate(found[place]) for place in first]
            count = scale.num_anchors(self.config.max_group)
            anchors = [first[at] for at in scale.choose_anchors(reference, count)]
            results = await _all([self._score_part(poll, docket, [*anchors, *part]) for part in others])
            for part, (marks, took) in zip(others, results, strict=True):
                usage += took
                here = [self._aggregate(mark) for mark in marks[:count]]
                line = scale.fit(here, [self._aggregate(found[place]) for place in anchors])
                found |= {place: mark.scaled(line) for place, mark in zip(part, marks[count:], strict=True)}
            squeeze = scale.squeeze([vote for mark in found.values() for vote in mark.votes])
            found = {place: mark.scaled(squeeze) for place, mark in found.items()}
        return [found[place] for place in range(len(docket.attempts))], usage

    async def _score_part(self, poll: Poll, docket: Docket, places: Sequence[int]) -> tuple[list[Marks], Usage]:
        """[len(places)] the votes on these attempts, all shown together."""
        attempts = [docket.attempts[place] for place in places]
        polled = await _all(
            [
                poll.vote(attempts, docket.tools, seed=docket.seed, vote=vote, group_id=docket.group_id)
                for vote in range(self.config.votes)
            ]
        )
        usage = sum((vote.usage for vote in polled), Usage())
        marks = [
            Marks(
                votes=[vote.entries[at].score for vote in polled],
                positions=[vote.positions[at] for vote in polled],
                explanations=[vote.entries[at].explanation for vote in polled],
                latency_s=usage.latency_s / len(polled),
            )
            for at in range(len(attempts))
        ]
        return marks, usage

    def _aggregate(self, marks: Marks) -> float:
        return votes.aggregate(marks.votes, self.config.aggregate)

    def _write_score(self, poll: Poll, marks: Marks, usage: Usage, num_trajectories: int) -> Score:
        score = min(1.0, max(0.0, self._aggregate(marks)))
        nearest = min(range(len(marks.votes)), key=lambda vote: abs(marks.votes[vote] - score))
        return Score(
            judge="ruler",
            model=poll.member.model,
            score=score,
            explanation=marks.explanations[nearest],
            votes=marks.votes,
            spread=votes.spread(marks.votes),
            positions=marks.positions,
            cost_usd=None if usage.cost_usd is None else usage.cost_usd / num_trajectories,
            prompt_tokens=usage.prompt_tokens / num_trajectories,
            completion_tokens=usage.completion_tokens / num_trajectories,
            latency_s=marks.latency_s,
            settings=self.settings,
        )

    async def close(self) -> None:
        for poll in self.polls:
            await poll.caller.close()
        self.cache.close()


async def _all(waits: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results. A failure is raised after the others are in: what is under way is paid for and worth keeping."""
    results = await asyncio.gather(*waits, return_exceptions=True)
    failures = [result for result in results if isinstance(result, BaseException)]
    for failure in sorted(failures, key=lambda failure: not isinstance(failure, JudgeStopped)):
        raise failure
    return [result for result in results if not isinstance(result, BaseException)]


def _lone(config: RulerJudgeConfig) -> PanelMemberConfig:
    """A panel of one: the model of the configuration itself."""
    return PanelMemberConfig(**{name: getattr(config, name) for name in JudgeModelConfig.model_fields})


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


def _settings(config: RulerJudgeConfig, panel: Sequence[JudgeModelConfig], instructions: str) -> str:
    """A digest of everything that changes what the judge says: two files with the same one can be compared."""
    told = {"votes", "aggregate", "seed", "max_group", "max_tokens_per_attempt"}
    models = [member.model_dump(mode="json", include={"model", "params", "weight"}) for member in panel]
    return make_key(told=config.model_dump(mode="json", include=told), models=models, instructions=instructions)[:12]


def _make_provider(member: JudgeModelConfig, secrets: Secrets) -> Provider:
    """The provider that `member` means; neither connects nor imports a client yet."""
    if not member.needs_litellm:
        from art_cli.judges.http_provider import HttpProvider

        return HttpProvider(member, secrets)
    if importlib.util.find_spec("litellm") is None:
        raise UsageError(f"judge.model: {no_litellm(member)}")
    from art_cli.judges.litellm_provider import LitellmProvider

    return LitellmProvider(member, secrets)
