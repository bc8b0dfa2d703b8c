"""PromptLearner: `learner: {name: prompt}`, whose policy is a text. A step is a round of reflective prompt search.

    groups of a step: some attempts with a kept prompt (the parent), some with a proposed one, judged together
      -> the proposal is kept if it beat its parent on these groups
      -> next parent, from the Pareto front of the kept prompts' rewards by scenario
      -> reflection.py: a model reads the parent's attempts and proposes a new text for one part of it

So a proposal is made at the end of a step and tested in the next one, on scenarios that the model was not shown: a text
that recites their answers does not pass, and each group has one verdict. The first step has nothing to propose from, so
that all its attempts are the starting prompt's. GEPA instead tests a proposal on the attempts it was made from, and
then on a separate set.

A group's rewards are compared within that group alone where it is decided what is kept. The Pareto front and the
offered prompt compare rewards of different groups, which is rough with a judge that ranks (ruler).

A checkpoint has prompt.json, the best prompt so far, and optimizer.json, the search: all that a resumed run needs.
"""

import math
import random
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, NoReturn

import msgspec

from art_cli.config.schema import JudgeModelConfig, PromptLearnerConfig
from art_cli.learners import Progress, SftProgress, StepMetrics
from art_cli.learners.reflection import Example, Reflection, choose_parent, read_example
from art_cli.rollouts.rollout_runner import RolloutPlan
from art_cli.runs.durable import read_object
from art_cli.runs.system_prompt import MAX_PART, PROMPT_FILE, SystemPrompt
from art_cli.runs.trajectory import EQUAL_REWARDS, ScoredTrajectory
from art_cli.runtime.errors import CheckpointError, DataError, LearnerError, UsageError, one_line

STATE_FILE = "optimizer.json"
NUM_EXAMPLES = 16  # attempts of a prompt that are kept to reflect on; a question shows fewer
FIRST_PART = "instructions"
NO_WEIGHTS = "learner 'prompt' changes no weight"


class KeptPrompt(msgspec.Struct, kw_only=True):
    """A prompt that beat its parent, or the first one. `rewards` is scenario id -> (sum of its means there, number)."""

    parts: dict[str, str]
    parent: int | None  # its index among the kept, or None for the first
    rewards: dict[str, tuple[float, int]] = {}
    examples: list[Example] = []  # of its latest attempts
    num_changed: int = 0  # number of proposals that were made from it


class Search(msgspec.Struct, kw_only=True):
    """The state of a search."""

    kept: list[KeptPrompt]
    parent: int = 0  # index of the prompt that plays next
    proposal: dict[str, str] | None = None  # parts of the prompt that plays beside it, or None
    tried: list[str] = []  # all proposed texts
    best: int = 0
    num_steps: int = 0


class PromptMetrics(StepMetrics, kw_only=True):
    """Rewards are means over the step's groups; NaN: there was no proposal to test."""

    reward_parent: float
    reward_proposal: float = math.nan
    is_accepted: float = math.nan  # 1 if the proposal is kept, else 0
    num_prompts: int  # prompts that are kept so far
    reflection_tokens: int
    reflection_usd: float = math.nan  # NaN: the price is unknown


class PromptLearner:
    """A Learner without weights. `arrange` gives each rollout of a step its prompt."""

    def __init__(
        self, config: PromptLearnerConfig, member: JudgeModelConfig, directory: Path, *, seed: int, group_size: int
    ) -> None:
        """Raises UsageError: a part's file cannot be read, or what the reflecting model needs is missing."""
        self.payer = Reflection(member, directory, timeout_s=config.timeout_s)
        self._place, self._seed = config.place, seed
        self._num_parents = group_size - group_size // 2  # of a group's attempts, where there is a proposal
        parts = {name: _read_part(name, directory / path.expanduser()) for name, path in config.parts.items()}
        self._search = Search(kept=[KeptPrompt(parts=parts or {FIRST_PART: ""}, parent=None)])

    # --- a step -------------------------------------------------------------------------------------------------------

    def arrange(self, plans: list[RolloutPlan]) -> list[RolloutPlan]:
        """Returns the rollouts with their prompts: the parent's, or from some index on the proposal's."""
        parent, proposal = self._search.kept[self._search.parent].parts, self._search.proposal
        sides = [self._as_prompt(parent), self._as_prompt(proposal or parent)]
        return [msgspec.structs.replace(plan, prompt=sides[plan.index >= self._num_parents]) for plan in plans]

    def step(self, groups: Sequence[Sequence[ScoredTrajectory]], *, progress: Progress | None = None) -> PromptMetrics:
        """Decides on the proposal, and makes the next one. Raises LearnerError: no call can reach the model."""
        begin, before, search = time.perf_counter(), self.payer.usage, self._search
        rewarded = [(members, _rewards(members)) for members in groups]
        sides = [self._sides(members, rewards) for members, rewards in rewarded]
        tested = [(ours, theirs) for ours, theirs in sides if ours and theirs]
        numbers = _numbers(rewarded, [fmean(ours) for ours, _ in sides if ours])
        self._note(search.kept[search.parent], groups, sides, 0)
        if search.proposal is not None and tested:
            gains = [fmean(theirs) - fmean(ours) for ours, theirs in tested]
            numbers.reward_proposal = fmean(fmean(theirs) for _, theirs in tested)
            numbers.is_accepted = float(fmean(gains) > EQUAL_REWARDS)
            if numbers.is_accepted:
                search.kept.append(KeptPrompt(parts=search.proposal, parent=search.parent))
                self._note(search.kept[-1], groups, sides, 1)
        search.num_steps += 1
        if groups:
            self._choose_next()
        usage = self.payer.usage
        numbers.num_prompts = len(search.kept)
        numbers.reflection_tokens = usage.tokens - before.tokens
        if usage.cost_usd is not None and before.cost_usd is not None:
            numbers.reflection_usd = usage.cost_usd - before.cost_usd
        numbers.train_s = time.perf_counter() - begin
        return numbers

    def _sides(self, members: Sequence[ScoredTrajectory], rewards: Sequence[float]) -> tuple[list[float], list[float]]:
        """Returns the rewards of the parent's attempts, and those of the proposal's."""
        sides: tuple[list[float], list[float]] = [], []
        for member, reward in zip(members, rewards, strict=True):
            sides[self._is_proposed(member)].append(reward)
        return sides

    def _is_proposed(self, member: ScoredTrajectory) -> bool:
        return self._search.proposal is not None and member.index >= self._num_parents

    def _note(
        self,
        prompt: KeptPrompt,
        groups: Sequence[Sequence[ScoredTrajectory]],
        sides: Sequence[tuple[list[float], list[float]]],
        side: int,
    ) -> None:
        """Adds a prompt's rewards, and keeps examples of its attempts: of each group the worst, then the others."""
        by_rank: list[tuple[int, Example]] = []
        for members, rewards in zip(groups, sides, strict=True):
            if not rewards[side]:
                continue
            name = str(members[0].scenario.get("id"))
            total, num = prompt.rewards.get(name, (0.0, 0))
            prompt.rewards[name] = total + fmean(rewards[side]), num + 1
            own = [member for member in members if self._is_proposed(member) == bool(side)]
            ranked = sorted(zip(rewards[side], count(), own, strict=False))
            by_rank += [(rank, read_example(each, reward)) for rank, (reward, _, each) in enumerate(ranked)]
        by_rank.sort(key=lambda ranked: (ranked[0], ranked[1].reward))
        prompt.examples = [example for _, example in by_rank[:NUM_EXAMPLES]] or prompt.examples

    def _choose_next(self) -> None:
        """Chooses the best prompt, the next parent, and makes a proposal from it."""
        search, draw = self._search, random.Random(f"{self._seed}/{self._search.num_steps}")
        scores = self._scores()
        totals = [sum(each.values()) for each in scores]
        search.best = max(range(len(totals)), key=lambda index: (totals[index], index))
        search.parent = choose_parent(scores, draw)
        parent = search.kept[search.parent]
        name = list(parent.parts)[parent.num_changed % len(parent.parts)]
        parent.num_changed += 1
        known = {each.parts[name] for each in search.kept} | set(search.tried)
        text = self.payer.propose(parent.parts[name], parent.examples, draw, tried=known)
        search.proposal = None if text is None else parent.parts | {name: text}
        search.tried += [] if text is None else [text]

    def _scores(self) -> list[dict[str, float]]:
        """Returns the mean reward of each kept prompt at every scenario that any of them has played.

        One that has not played a scenario counts there as its nearest ancestor that has, else as the mean of all.
        """
        kept = self._search.kept
        names = sorted({name for prompt in kept for name in prompt.rewards})
        means = [{name: total / num for name, (total, num) in prompt.rewards.items()} for prompt in kept]
        anyone = {name: fmean(each[name] for each in means if name in each) for name in names}
        scores: list[dict[str, float]] = []
        for prompt, own in zip(kept, means, strict=True):  # a parent comes before its children
            inherited = anyone if prompt.parent is None else scores[prompt.parent]
            scores.append({name: own.get(name, inherited[name]) for name in names})
        return scores

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def save(self, directory: Path) -> None:
        """Writes the best prompt, and the search. The caller writes the manifest."""
        prompt = self._as_prompt(self._search.kept[self._search.best].parts)
        for name, record in ((PROMPT_FILE, prompt), (STATE_FILE, self._search)):
            (directory / name).write_bytes(msgspec.json.format(msgspec.json.encode(record)) + b"\n")

    def load(self, directory: Path) -> None:
        """Continues from what `save` wrote. Raises CheckpointError: it is no search."""
        try:
            search = msgspec.convert(read_object(directory / STATE_FILE, within=directory), Search)
        except (DataError, ValueError) as error:  # msgspec's errors are ValueErrors
            raise CheckpointError(f"{directory}: no search for a prompt: {one_line(error)}") from error
        self._search = search

    def _as_prompt(self, parts: dict[str, str]) -> SystemPrompt:
        return SystemPrompt(parts=parts, place=self._place)

    # --- what only weights have ---------------------------------------------------------------------------------------

    def write_learned(self, path: Path) -> None:
        """Writes nothing, because no token is trained."""

    def begin_sft(self, examples: Sequence[dict[str, Any]], evaluated: Sequence[dict[str, Any]] = ()) -> int:
        _refuse()

    def take_sft(self, num_updates: int) -> SftProgress:
        _refuse()

    def end_sft(self) -> None:
        _refuse()

    def score(self, token_ids: Sequence[int], *, temperature: float = 1.0) -> list[float]:
        _refuse()

    def start(self) -> None:
        """Has no process."""

    def check(self) -> None:
        """Has no process."""

    def close(self) -> None:
        """Holds nothing."""


def _refuse() -> NoReturn:
    raise LearnerError(NO_WEIGHTS)


def _rewards(members: Sequence[ScoredTrajectory]) -> list[float]:
    """Returns the reward of each attempt. A failed one has 0, or the group's lowest reward if that is less."""
    known = [member.reward for member in members if member.reward is not None]
    return [min([0.0, *known]) if member.reward is None else member.reward for member in members]


def _numbers(
    rewarded: Sequence[tuple[Sequence[ScoredTrajectory], list[float]]], parents: Sequence[float]
) -> PromptMetrics:
    """Returns the numbers of the groups, before anything is decided. An empty step has means of 0."""
    rewards = [reward for _, each in rewarded for reward in each]
    members = [member for group, _ in rewarded for member in group]
    return PromptMetrics(
        reward_mean=fmean(rewards or [0.0]),
        reward_std=pstdev(rewards or [0.0]),
        no_signal_share=math.nan,  # equal rewards teach too, because the model reads what was wrong
        num_groups=len(rewarded),
        num_samples=0,
        num_trajectories=len(members),
        num_failed=sum(member.error is not None for member in members),
        num_updates=int(bool(rewarded)),
        tokens_trained=0,
        tokens_flat=0,
        tokens_computed=0,
        reward_parent=fmean(parents or [0.0]),
        num_prompts=0,
        reflection_tokens=0,
    )


def _read_part(name: str, path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise UsageError(f"learner.parts.{name}: {path}: {reason}") from error
    if len(text) > MAX_PART:
        raise UsageError(f"learner.parts.{name}: {path}: {len(text)} characters; a part has {MAX_PART} at most")
    return text
