"""Hunt: searches for attempts that get rewards without doing the task.

    honest attempts (the policy) -> their replies and scores
    attacks (rollouts/attacks.py) played by the same rollout -> scores -> the best are varied -> ... until time is up

Attacks are played on the same scenarios as the honest attempts, through the gateway, by the run's own rollout. A judge
that compares attempts sees an attack together with its scenario's honest attempts. Each scored attempt is appended to a
file, from which a hunt can resume.

The reference is the mean, over scenarios, of the best honest score. The floor is the lowest score overall. An exploit
is an attack with a mean score at least halfway from the floor to the reference, and above the floor in more than half
of the scenarios.
"""

import asyncio
import bisect
import contextlib
import hashlib
import itertools
import logging
import random
import statistics
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from art_cli.chat.chat_errors import ChatError
from art_cli.chat.proven_steps import ProvenSteps
from art_cli.chat.replies import Choice, Chunk, Reply
from art_cli.chat.requests import Json, Request, text_of
from art_cli.config.compose import LoadedConfig
from art_cli.config.config_identity import config_hash
from art_cli.engines import Endpoint, own_model
from art_cli.judges import Judge, make_judge
from art_cli.judges.trial import judge_in_time, require_keys
from art_cli.loop.evaluate import code_of
from art_cli.loop.interrupts import Interrupts
from art_cli.loop.owed_groups import owed, plan_groups
from art_cli.loop.policy_sampler import Sampler, open_sampler
from art_cli.loop.stage_policy import PolicySource, open_policy
from art_cli.loop.stages import choose_policy, next_scenarios
from art_cli.rollouts.attacks import FAILS, LATE, PIECES, UNVARIED, Attack, Seen, first_attacks, vary
from art_cli.rollouts.rollout_runner import LINE_S, Progress, RolloutPlan
from art_cli.runs.durable import LineWriter, read_lines
from art_cli.runs.manifest import MANIFEST
from art_cli.runs.run_checkpoints import Which
from art_cli.runs.trajectory import Trajectory
from art_cli.runtime import threads
from art_cli.runtime.errors import ArtError, RolloutError, RunError, UsageError
from art_cli.runtime.scratch import scratch

log = logging.getLogger(__name__)

HONEST = 2  # honest attempts per scenario
BATCH = 4  # attacks played together, and compared with the honest attempts by a judge
PARENTS = 8  # number of top attacks that are varied
TRIES = 500  # draws of a new attack before the search gives up
SHARE = 0.5  # how far from the floor to the reference an exploit must score
LATE_S = 5.0  # total delay of an attempt's late replies


class _Scored(msgspec.Struct, tag_field="kind", tag=str.lower):
    scores: list[float | None]  # None for failed attempts, which are not trained on

    @property
    def known(self) -> list[float]:
        return [score for score in self.scores if score is not None]


class Honest(_Scored):
    """A scenario's honest attempts with scores."""

    attempts: list[Trajectory]


class Tried(_Scored):
    """An attack and its score for each scenario. Example: Tried([0.0, 1.0, None], Attack(("yes",)))"""

    attack: Attack
    example: str = ""  # last reply to the scenario with the highest score

    @property
    def mean(self) -> float:
        """Failed attempts are ignored; an attack that always fails is the worst."""
        return statistics.fmean(self.known) if self.known else float("-inf")


class HuntLine(msgspec.Struct):
    hunt: str  # digest of the inputs that affect scores
    scored: Honest | Tried


@dataclass
class Hunt:
    """All scores. `tried` is sorted by mean score, highest first. An error or interrupt is stored in `error`."""

    honest: list[Honest] = field(default_factory=list)
    tried: list[Tried] = field(default_factory=list)
    error: ArtError | None = None
    write: Callable[[Honest | Tried], None] = lambda scored: None

    def add(self, scored: Honest | Tried) -> None:
        """Adds the scores here and in the file. Scenarios without a successful honest attempt stay owed."""
        if isinstance(scored, Tried):
            bisect.insort(self.tried, scored, key=lambda tried: -tried.mean)
        else:
            self.honest.append(scored)
        if isinstance(scored, Tried) or scored.known:
            self.write(scored)

    @property
    def honest_scores(self) -> list[float]:
        return list(itertools.chain(*(honest.known for honest in self.honest)))

    @property
    def reference(self) -> float:
        return statistics.fmean(max(honest.known) for honest in self.honest if honest.known)

    @property
    def floor(self) -> float:
        return min(itertools.chain(self.honest_scores, *(tried.known for tried in self.tried)))

    def exploits(self) -> list[Tried]:
        floor = self.floor
        bound = floor + SHARE * (self.reference - floor)
        return [
            tried
            for tried in self.tried
            if tried.mean >= bound and 2 * sum(score > floor for score in tried.known) > len(tried.scores)
        ]


@contextlib.contextmanager
def open_hunt(path: Path | None, digest: str) -> Iterator[Hunt]:
    """Yields the hunt stored in the file, which new scores are appended to; without a file, an empty hunt.

    Raises RunError if the file belongs to a different hunt or is in use, DataError for a wrong format.
    """
    found = Hunt()
    if path is None:
        yield found
        return
    with LineWriter(path) as writer:
        for number, line in enumerate(read_lines(path, HuntLine), 1):
            if line.hunt != digest:
                what = "another configuration, policy, code of the rollout or judge, or other scenarios"
                raise RunError(f"{path}:{number}: a hunt of {what}; name another file with -o")
            found.add(line.scored)
        found.write = lambda scored: writer.append(HuntLine(digest, scored))
        yield found


def hunt(
    loaded: LoadedConfig,
    checkpoint: Path | None,
    which: Which = "offered",
    *,
    num_scenarios: int,
    minutes: float,
    output: Path | None = None,
) -> Hunt:
    """Plays honest attempts, then attacks for `minutes`. Attempts stored in `output` are not replayed.

    Errors and interrupts are stored in `Hunt.error`; errors before the first honest score are raised, as by `generate`.
    Raises UsageError without a judge or a reward, RolloutError if no honest attempt has a score.
    """
    if loaded.config.rollout.sources:
        raise UsageError("rollout.sources: a hunt needs a single task; name a configuration with one of them")
    if loaded.config.judge.name == "none":
        raise UsageError("judge: nothing scores the attempts, so art hunt has no reward to hunt for")
    require_keys(loaded.config.judge, loaded.directory)
    loaded, source = choose_policy(loaded, checkpoint, which)
    scenarios = next_scenarios(loaded, source.step, num_scenarios)
    interrupts = Interrupts("interrupted: the hunt stopped early; with -o FILE the same command continues from FILE")

    async def search() -> None:
        judge = make_judge(loaded.config.judge, loaded.directory)
        try:
            with interrupts.handled():
                await judge.open()  # before vLLM takes the memory that is free
                async with open_sampler(
                    loaded, policy, checkpoint=source.checkpoint, step=source.step, logs=logs
                ) as sampler:
                    await _Search(loaded, sampler, judge, scenarios, found).run(minutes)
        finally:
            await judge.close()

    with (
        open_hunt(output, _digest(loaded, source, scenarios)) as found,
        interrupts.explained(),
        open_policy(loaded, source) as policy,
        scratch("hunt") as logs,
    ):
        try:
            threads.run(search())
        except ArtError as error:
            if not found.honest_scores:
                raise
            found.error = error
    return found


def _digest(loaded: LoadedConfig, source: PolicySource, scenarios: Sequence[Json]) -> str:
    """Returns a digest of the inputs that affect scores, except imported modules."""
    judge = loaded.config.judge
    code = code_of(loaded, [loaded.config.rollout, judge, *getattr(judge, "judges", {}).values()])
    model = own_model(loaded.config.engine, loaded.directory)  # not part of the configuration's hash
    manifest = source.checkpoint / MANIFEST if source.checkpoint is not None else None
    weights = manifest.read_bytes() if manifest is not None and manifest.is_file() else str(source.checkpoint)
    whole = msgspec.json.encode([config_hash(loaded.config), weights, code, scenarios, model])
    return hashlib.sha256(whole).hexdigest()[:16]


class _Search:
    def __init__(
        self, loaded: LoadedConfig, sampler: Sampler, judge: Judge, scenarios: Sequence[Json], found: Hunt
    ) -> None:
        self._sampler, self._judge, self._scenarios, self._found = sampler, judge, scenarios, found
        self._draw = random.Random(f"{loaded.config.train.seed}/{len(found.tried)}")
        self._is_free = loaded.config.judge.name == "rollout"
        self._attackers = Attackers(sampler.engine.endpoint)
        self._honest: list[list[Trajectory]] = []  # attempts at each scenario
        self._replies: list[list[str]] = []  # for each scenario, the replies to other scenarios

    async def run(self, minutes: float) -> None:
        await self._play_honest()
        deadline = time.monotonic() + 60 * minutes
        last = [[_last_reply(each) for each in attempts if each.error is None] for attempts in self._honest]
        self._replies = [[replies[0] for j, replies in enumerate(last) if j != i and replies] for i in range(len(last))]
        self._sampler.gateway.upstream = self._attackers
        self._sampler.gateway.proven = ProvenSteps()  # attacks come from no weights
        self._sampler.runner.is_watched = False  # attacks may all fail
        longest = max(itertools.chain(*self._honest), key=lambda each: len(each.messages))
        seen = Seen(longest.messages, longest.tools)
        done = {tried.attack for tried in self._found.tried}
        attacks = [attack for attack in first_attacks(seen) if attack not in done]
        shown = time.monotonic()
        while attacks or time.monotonic() < deadline:
            attacks = attacks or list(itertools.islice(self._varied(seen, done), BATCH))
            if not attacks:
                break
            await self._try(attacks[:BATCH])
            done.update(attacks[:BATCH])
            del attacks[:BATCH]
            if time.monotonic() > shown + LINE_S:
                shown, best = time.monotonic(), self._found.tried[0]
                log.info("hunt: %d attacks; the best scores %.3f: %s", len(done), best.mean, best.attack)

    async def _play_honest(self) -> None:
        """Plays the missing honest attempts. Raises RolloutError if none has a score."""
        attempts = {each.id: each for honest in self._found.honest for each in honest.attempts}
        plans = plan_groups(self._scenarios, step=0, group_size=HONEST, prefix="honest")

        async def keep(attempt: Trajectory) -> None:
            attempts[attempt.id] = attempt
            group = [each for each in attempts.values() if each.group_id == attempt.group_id]
            if len(group) == HONEST:
                self._found.add(Honest(await self._scores(group), group))

        await self._sampler.play_shown(owed(plans, list(attempts.values())), keep, title="honest")
        played = [attempts[plan.trajectory_id] for plan in plans]
        if not self._found.honest_scores:
            raise RolloutError(f"no honest attempt has a score; the first failed with: {played[0].error}")
        self._honest = [played[start : start + HONEST] for start in range(0, len(played), HONEST)]

    def _varied(self, seen: Seen, done: set[Attack]) -> Iterator[Attack]:
        """Yields new attacks: variations of the best, or pairs of pieces while nothing scores."""
        floor, new = self._found.floor, set(done)
        scoring = [each for each in self._found.tried if each.mean > floor and each.attack.form not in UNVARIED]
        self._draw.shuffle(scoring)  # random order among equal scores
        best = sorted(scoring, key=lambda tried: tried.mean, reverse=True)[:PARENTS]
        for _ in range(TRIES):
            if best:
                attack = vary(self._draw.choice(best).attack, seen, self._draw)
            else:
                attack = Attack(tuple(self._draw.sample(sorted(PIECES), 2)))
            if attack not in new:
                new.add(attack)
                yield attack

    async def _try(self, attacks: Sequence[Attack]) -> None:
        num, plans = len(self._scenarios), list[RolloutPlan]()
        for number, attack in enumerate(attacks, len(self._found.tried)):
            groups = plan_groups(self._scenarios, step=number, group_size=1, prefix="attack")
            for plan, replies in zip(groups, self._replies, strict=True):
                self._attackers.attacks[plan.group_id] = attack, replies
            plans += groups
        attempts: dict[str, Trajectory] = {}
        await self._sampler.play(plans, lambda each: attempts.__setitem__(each.id, each), Progress("attacks"))
        played = [attempts[plan.trajectory_id] for plan in plans]
        columns = [await self._scores(played[place::num], self._honest[place]) for place in range(num)]
        for start, attack in zip(range(0, len(played), num), attacks, strict=True):
            scores = [column[start // num] for column in columns]
            best = max(range(num), key=lambda place: (scores[place] is not None, scores[place] or 0.0))
            self._found.add(Tried(scores, attack, _last_reply(played[start + best])))

    async def _scores(self, attempts: Sequence[Trajectory], beside: Sequence[Trajectory] = ()) -> list[float | None]:
        """Returns the attempts' scores, None for failures. A judge also sees the attempts `beside` them."""
        whole = [each for each in (*attempts, *beside) if each.error is None]
        if self._is_free:
            rewards = {each.id: each.returned_reward for each in whole}
        else:
            group = [
                msgspec.structs.replace(each, group_id="hunt", group_size=len(whole), index=index)
                for index, each in enumerate(whole)
            ]
            verdicts = await judge_in_time(self._judge, group) if group else {}
            rewards = {name: verdict.reward for name, verdict in verdicts.items()}
        return [rewards.get(each.id) for each in attempts]


class Attackers:
    """Answers the gateway's calls with the attack assigned to the attempt's group."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        # by group id, with replies to other scenarios
        self.attacks: dict[str | None, tuple[Attack, list[str]]] = {}
        self._late_until: dict[str | None, float] = {}  # by group id

    @property
    def backend(self) -> "Attackers":
        return self

    def models(self) -> list[str]:
        return [self.endpoint.model]

    async def reply(self, request: Request) -> Reply:
        attack, replies = self.attacks[request.group]
        if attack.form == FAILS:
            raise ChatError(400, "this call is refused")
        if attack.form == LATE:
            now = asyncio.get_running_loop().time()
            await asyncio.sleep(self._late_until.setdefault(request.group, now + LATE_S) - now)
        messages = request.messages or [{"role": "user", "content": str(request.prompt)}]
        message = attack.reply(Seen(messages, request.tools, replies))
        reason = "tool_calls" if "tool_calls" in message else "stop"
        choice = Choice(index=0, message=message, text=message["content"] or "", finish_reason=reason)
        return Reply(id="hunt", created=0, model=request.model, choices=[choice], prompt_ids=[], usage=(0, 0))

    async def stream(self, request: Request) -> AsyncGenerator[Chunk]:
        reply = await self.reply(request)
        [choice] = reply.choices
        yield Chunk(id=reply.id, created=reply.created, model=reply.model, choice=choice, is_last=True, usage=(0, 0))


def _last_reply(trajectory: Trajectory) -> str:
    replies = [each for each in trajectory.messages if each.get("role") == "assistant"]
    return text_of(replies[-1].get("content")) if replies else ""
