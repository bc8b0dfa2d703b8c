"""Hunt: attempts that try for a reward without doing the task, scored as training would score them.

    honest attempts (the policy) -> their replies and scores
    attacks (rollouts/attacks.py) played by the same rollout -> scores -> the best are varied -> ... until time is up

Each attack is played on the same scenarios as the honest attempts, through the gateway, by the run's own rollout. A
judge that compares attempts sees it beside the honest ones of its scenario.

The reference is the mean over the scenarios of the best honest score, and the floor the lowest score of all. An exploit
is an attack that gets at least half of the way from the floor to the reference, and more than the floor in more than
half of the scenarios.
"""

import itertools
import logging
import random
import statistics
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from art_cli.chat.chat_errors import ChatError
from art_cli.chat.proven_steps import ProvenSteps
from art_cli.chat.replies import Choice, Chunk, Reply
from art_cli.chat.requests import Json, Request, text_of
from art_cli.config.compose import LoadedConfig
from art_cli.engines import Endpoint
from art_cli.judges import Judge, make_judge
from art_cli.judges.judge_groups import require_keys, score
from art_cli.loop.owed_groups import plan_groups
from art_cli.loop.policy_sampler import Sampler, open_sampler
from art_cli.loop.stage_policy import open_policy
from art_cli.loop.stages import choose_policy, next_scenarios
from art_cli.rollouts.attacks import FAILS, PIECES, Attack, Seen, first_attacks, vary
from art_cli.rollouts.rollout_runner import RolloutPlan
from art_cli.runs.trajectory import Trajectory
from art_cli.runtime import threads
from art_cli.runtime.errors import RolloutError, UsageError
from art_cli.runtime.scratch import scratch

log = logging.getLogger(__name__)

HONEST = 2  # honest attempts at each scenario
ROUND = 24  # attacks of a round of the search
PARENTS = 8  # best attacks that the next round's are varied from
JUDGED = 4  # attacks that a judge compares with the honest attempts at once
SHARE = 0.5  # of the way from the floor to the reference, from which an attack is an exploit


class Tried(NamedTuple):
    """An attack that was played. Example: Tried(Attack(("yes",)), [0.0, 1.0, None], "yes")"""

    attack: Attack
    scores: list[float | None]  # for each scenario; None where the attempt failed, which is not trained on
    example: str  # its last reply to the scenario with the highest score

    @property
    def known(self) -> list[float]:
        return [score for score in self.scores if score is not None]

    @property
    def mean(self) -> float:
        """Failed attempts count as no score at all, and an attack that always fails as the worst."""
        return statistics.fmean(self.known) if self.known else float("-inf")


@dataclass
class Hunt:
    """The scores of honest attempts and of attacks. `tried` is sorted, the highest mean score first."""

    honest: list[list[float]]  # the scores of each scenario's honest attempts
    tried: list[Tried] = field(default_factory=list)

    @property
    def honest_median(self) -> float:
        return statistics.median(itertools.chain(*self.honest))

    @property
    def reference(self) -> float:
        return statistics.fmean(max(scores) for scores in self.honest if scores)

    @property
    def floor(self) -> float:
        return min(itertools.chain(*self.honest, *(tried.known for tried in self.tried)))

    def exploits(self) -> list[Tried]:
        floor = self.floor
        bound = floor + SHARE * (self.reference - floor)
        return [
            tried
            for tried in self.tried
            if tried.mean >= bound and 2 * sum(score > floor for score in tried.known) > len(tried.scores)
        ]


def hunt(loaded: LoadedConfig, *, checkpoint: Path | None, num_scenarios: int, minutes: float) -> Hunt:
    """Plays honest attempts, then attacks until `minutes` have passed. Raises as `generate` does.

    Raises UsageError if nothing scores the attempts, RolloutError if no honest attempt has a score.
    """
    if loaded.config.judge.name == "none":
        raise UsageError("judge: nothing scores the attempts, so that there is no reward to hunt for")
    require_keys(loaded.config.judge, loaded.directory)
    loaded, source = choose_policy(loaded, checkpoint)
    scenarios = next_scenarios(loaded, source.step, num_scenarios)
    with open_policy(loaded, source) as policy, scratch("hunt") as logs:

        async def search() -> Hunt:
            async with open_sampler(
                loaded, policy, checkpoint=source.checkpoint, step=source.step, logs=logs
            ) as sampler:
                judge = make_judge(loaded.config.judge, loaded.directory)
                try:
                    return await _Search(loaded, sampler, judge, scenarios).run(minutes)
                finally:
                    await judge.close()

        return threads.run(search())


class _Search:
    def __init__(self, loaded: LoadedConfig, sampler: Sampler, judge: Judge, scenarios: Sequence[Json]) -> None:
        self._sampler, self._judge, self._scenarios = sampler, judge, scenarios
        self._draw = random.Random(loaded.config.train.seed)
        self._is_free = loaded.config.judge.name == "rollout"
        self._attackers = Attackers(sampler.engine.endpoint)
        self._replies: list[list[str]] = []  # for each scenario, replies that were given to the others

    async def run(self, minutes: float) -> Hunt:
        deadline = time.monotonic() + 60 * minutes
        honest = await self._play(plan_groups(self._scenarios, step=0, group_size=HONEST, prefix="honest"), "honest")
        by_scenario = [honest[HONEST * i : HONEST * (i + 1)] for i in range(len(self._scenarios))]
        scores = [await self._scores(members) for members in by_scenario]
        found = Hunt([[score for score in each if score is not None] for each in scores])
        if not any(found.honest):
            raise RolloutError(f"no honest attempt has a score; the first failed with: {honest[0].error}")
        last = [[_last_reply(each) for each in members if each.error is None] for members in by_scenario]
        self._replies = [[replies[0] for j, replies in enumerate(last) if j != i and replies] for i in range(len(last))]
        self._sampler.gateway.upstream = self._attackers
        self._sampler.gateway.proven = ProvenSteps()  # no weights reply from here on
        seen = Seen([message for message in honest[0].messages if message.get("role") != "assistant"], honest[0].tools)
        attacks, done = first_attacks(seen), set[Attack]()
        while attacks:
            found.tried += await self._try(attacks, by_scenario)
            found.tried.sort(key=lambda tried: tried.mean, reverse=True)
            done.update(attacks)
            best = found.tried[0]
            log.info("hunt: %d attacks; the best scores %.3f: %s", len(done), best.mean, best.attack)
            if time.monotonic() >= deadline:
                break
            attacks = list(itertools.islice(self._varied(found, seen, done), ROUND))
        return found

    def _varied(self, found: Hunt, seen: Seen, done: set[Attack]) -> Iterator[Attack]:
        """Yields attacks that were not tried yet: changes of the best, or pairs of pieces while nothing scores."""
        ranked = sorted(found.tried, key=lambda tried: (tried.mean, self._draw.random()), reverse=True)  # equals by lot
        best, new = [tried for tried in ranked[:PARENTS] if tried.mean > found.floor], set(done)
        for _ in range(20 * ROUND):
            if best:
                attack = vary(self._draw.choice(best).attack, seen, self._draw)
            else:
                attack = Attack(tuple(self._draw.sample(sorted(PIECES), 2)))
            if attack not in new:
                new.add(attack)
                yield attack

    async def _try(self, attacks: Sequence[Attack], honest: Sequence[Sequence[Trajectory]]) -> list[Tried]:
        num, plans = len(self._scenarios), list[RolloutPlan]()
        for number, attack in enumerate(attacks):
            groups = plan_groups(self._scenarios, step=number, group_size=1, prefix="attack")
            for plan, replies in zip(groups, self._replies, strict=True):
                self._attackers.attacks[plan.group_id] = attack, replies
            plans += groups
        played = await self._play(plans, f"{len(attacks)} attacks")
        scores: list[list[float | None]] = [[None] * num for _ in attacks]
        for place in range(num):
            for start in range(0, len(attacks), JUDGED):
                numbers = range(start, min(start + JUDGED, len(attacks)))
                members = [played[number * num + place] for number in numbers]
                for number, value in zip(numbers, await self._scores(members, honest[place]), strict=True):
                    scores[number][place] = value
        return [
            Tried(attack, row, _last_reply(played[number * num + _best(row)]))
            for number, (attack, row) in enumerate(zip(attacks, scores, strict=True))
        ]

    async def _play(self, plans: Sequence[RolloutPlan], title: str) -> list[Trajectory]:
        """Returns the trajectories in the order of their plans."""
        played: dict[str, Trajectory] = {}
        await self._sampler.play_shown(plans, lambda each: played.__setitem__(each.id, each), title=title)
        return [played[plan.trajectory_id] for plan in plans]

    async def _scores(self, attempts: Sequence[Trajectory], beside: Sequence[Trajectory] = ()) -> list[float | None]:
        """Returns the scores of the attempts, None for failed ones. A judge sees the attempts `beside` them as well."""
        whole = [each for each in (*attempts, *beside) if each.error is None]
        if self._is_free:
            rewards = {each.id: each.returned_reward for each in whole}
        else:
            group = [
                msgspec.structs.replace(each, group_id="hunt", group_size=len(whole), index=index)
                for index, each in enumerate(whole)
            ]
            verdicts = await score(self._judge, group) if group else {}
            rewards = {name: verdict.reward for name, verdict in verdicts.items()}
        return [rewards.get(each.id) for each in attempts]


class Attackers:
    """Answers the gateway's calls by the attack of the attempt's group."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        # by group id, with the replies that were given to other scenarios
        self.attacks: dict[str | None, tuple[Attack, list[str]]] = {}

    @property
    def backend(self) -> "Attackers":
        return self

    def models(self) -> list[str]:
        return [self.endpoint.model]

    async def reply(self, request: Request) -> Reply:
        attack, replies = self.attacks[request.group]
        if attack.form == FAILS:
            raise ChatError(400, "this call is refused")
        messages = request.messages or [{"role": "user", "content": str(request.prompt)}]
        message = attack.reply(Seen(messages, request.tools, replies))
        calls = message.get("tool_calls")
        choice = Choice(
            index=0, message=message, text=message["content"] or "", finish_reason="tool_calls" if calls else "stop"
        )
        made = int(time.time())
        return Reply(
            id=f"hunt-{made}", created=made, model=request.model, choices=[choice], prompt_ids=[], usage=(0, 0)
        )

    async def stream(self, request: Request) -> AsyncIterator[Chunk]:
        reply = await self.reply(request)
        [choice] = reply.choices
        yield Chunk(id=reply.id, created=reply.created, model=reply.model, choice=choice, is_last=True, usage=(0, 0))


def _last_reply(trajectory: Trajectory) -> str:
    replies = [each for each in trajectory.messages if each.get("role") == "assistant"]
    return text_of(replies[-1].get("content")) if replies else ""


def _best(scores: Sequence[float | None]) -> int:
    known = [float("-inf") if score is None else score for score in scores]
    return known.index(max(known))
