"""PromptLearner: `learner: {name: prompt}`, whose policy is a text. A step is one round of reflective prompt search.

    a step's groups: some attempts use a kept prompt (the parent), some a proposed prompt; both are judged together
      -> the proposal is kept if it beat its parent on these groups
      -> next parent, from the Pareto front of the kept prompts' rewards by scenario
      -> reflection.py: a model reads the parent's attempts and proposes a new text for one part

So a proposal is made at the end of one step and tested in the next step, on scenarios that the model was not shown. A
text that recites answers does not pass, and every group is judged only once. The initial step has no attempts to learn
from, so it only plays the starting prompt. GEPA instead tests a proposal on the attempts behind it, then on a separate
set.

Acceptance compares rewards only within a group. The Pareto front and the best prompt compare rewards across groups,
which is rough for judges that rank (ruler).

A checkpoint contains prompt.json (the best prompt so far) and optimizer.json (the search state for resuming).
"""

import math
import random
import time
from collections.abc import Sequence
from itertools import islice, zip_longest
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import msgspec

from art_cli.config.checks import reflecting_model
from art_cli.config.schema import PromptLearnerConfig, RunConfig
from art_cli.learners import Learner, Progress, StepMetrics
from art_cli.learners.prompt.reflection import Example, Reflection, choose_parent, read_example
from art_cli.rollouts.rollout_runner import RolloutPlan
from art_cli.runs.durable import read_object
from art_cli.runs.system_prompt import MAX_PART, PROMPT_FILE, SystemPrompt
from art_cli.runs.trajectory import EQUAL_REWARDS, ScoredTrajectory
from art_cli.runtime.errors import CheckpointError, DataError, LearnerError, UsageError, one_line

STATE_FILE = "optimizer.json"
NUM_EXAMPLES = 16  # attempts kept per prompt for reflection; each question shows fewer
FIRST_PART = "instructions"

Rewarded = list[tuple[float, ScoredTrajectory]]  # attempts with their rewards


class KeptPrompt(msgspec.Struct, kw_only=True):
    """The starting prompt, or a prompt that beat its parent.

    `rewards` maps a scenario id ("source/id" with sources) to (sum of group means, number of groups).
    """

    parts: dict[str, str]
    parent: int | None  # index among the kept prompts; None for the starting prompt
    rewards: dict[str, tuple[float, int]] = {}
    examples: list[Example] = []  # from the latest attempts: each group's worst, then others

    def note(self, groups: Sequence[Rewarded]) -> None:
        """Adds the rewards from this prompt's attempts in each group. Empty groups do not count."""
        for attempts in filter(None, groups):
            first = attempts[0][1]
            name = f"{first.source}/{first.scenario.get('id')}" if first.source else str(first.scenario.get("id"))
            total, num = self.rewards.get(name, (0.0, 0))
            self.rewards[name] = total + _mean(attempts), num + 1
        by_rank = zip_longest(*(sorted(attempts, key=lambda pair: pair[0]) for attempts in groups))
        found = (pair for pairs in by_rank for pair in pairs if pair is not None)
        latest = [read_example(attempt, reward) for reward, attempt in islice(found, NUM_EXAMPLES)]
        self.examples = latest or self.examples


class PromptSearch(msgspec.Struct, kw_only=True):
    """The state of a search."""

    kept: list[KeptPrompt]
    parent: int = 0  # index of the prompt to play next
    proposal: dict[str, str] | None = None  # parts of the proposed prompt to play alongside, if any
    tried: list[str] = []  # all proposed texts
    best: int = 0
    num_steps: int = 0


class PromptMetrics(StepMetrics, kw_only=True):
    """Rewards are means over the step's groups; NaN: there was no proposal to test, or no price is known."""

    reward_parent: float
    reward_proposal: float
    is_accepted: float  # 1 if the proposal was accepted, else 0
    num_prompts: int  # number of kept prompts so far
    reflection_tokens: int
    reflection_usd: float


class PromptLearner(Learner):
    """A Learner without weights. `arrange` assigns a prompt to every rollout in a step."""

    payer: Reflection

    def __init__(self, config: RunConfig, directory: Path) -> None:
        """Raises UsageError if a prompt part is too long, or the reflecting model lacks a requirement."""
        learner, group_size = config.learner, config.rollout.group_size
        assert isinstance(learner, PromptLearnerConfig)
        member = reflecting_model(config, learner)
        assert member is not None, "the configuration was checked"
        self.payer = Reflection(member, directory)
        self._place, self._seed = learner.place, config.train.seed
        self._num_parents = group_size - group_size // 2  # attempts with the parent, if there is a proposal
        parts = {name: _read_part(name, directory / path.expanduser()) for name, path in learner.parts.items()}
        self._search = PromptSearch(kept=[KeptPrompt(parts=parts or {FIRST_PART: ""}, parent=None)])

    # --- a step -------------------------------------------------------------------------------------------------------

    def arrange(self, plans: list[RolloutPlan]) -> list[RolloutPlan]:
        """Returns the rollouts with prompts: the parent's for the lower indexes, the proposal's for the others."""
        parent, proposal = self._search.kept[self._search.parent].parts, self._search.proposal
        sides = [self._as_prompt(parent), self._as_prompt(proposal or parent)]
        return [msgspec.structs.replace(plan, prompt=sides[plan.index >= self._num_parents]) for plan in plans]

    def step(self, groups: Sequence[Sequence[ScoredTrajectory]], *, progress: Progress | None = None) -> PromptMetrics:
        """Tests the proposal, and makes the next. Raises LearnerError if no call can reach the model."""
        begin, before, search = time.perf_counter(), self.payer.usage, self._search
        sides = [self._split(members) for members in groups]
        search.kept[search.parent].note([ours for ours, _ in sides])
        tested = [(_mean(ours), _mean(theirs)) for ours, theirs in sides if ours and theirs]
        gain = fmean(theirs - ours for ours, theirs in tested) if tested else math.nan
        if gain > EQUAL_REWARDS and search.proposal is not None:
            search.kept.append(KeptPrompt(parts=search.proposal, parent=search.parent))
            search.kept[-1].note([theirs for _, theirs in sides])
        search.num_steps += 1
        if groups:
            self._choose_next()
        usd = (before.cost_usd, self.payer.usage.cost_usd)
        attempts = [pair for ours, theirs in sides for pair in (*ours, *theirs)]
        rewards = [reward for reward, _ in attempts] or [0.0]
        return PromptMetrics(
            reward_mean=fmean(rewards),
            reward_std=pstdev(rewards),
            no_signal_share=math.nan,  # equal rewards also teach, because the model reads what was wrong
            num_groups=len(groups),
            num_trajectories=len(attempts),
            num_failed=sum(attempt.error is not None for _, attempt in attempts),
            num_updates=min(1, len(groups)),
            train_s=time.perf_counter() - begin,
            reward_parent=fmean([_mean(ours) for ours, _ in sides if ours] or [0.0]),
            reward_proposal=fmean(theirs for _, theirs in tested) if tested else math.nan,
            is_accepted=float(gain > EQUAL_REWARDS) if tested else math.nan,
            num_prompts=len(search.kept),
            reflection_tokens=self.payer.usage.tokens - before.tokens,
            reflection_usd=math.nan if usd[0] is None or usd[1] is None else usd[1] - usd[0],
        )

    def _split(self, members: Sequence[ScoredTrajectory]) -> tuple[Rewarded, Rewarded]:
        """Returns the parent's and the proposal's attempts. A failed attempt has reward min(0, lowest reward)."""
        floor = min([0.0, *(member.reward for member in members if member.reward is not None)])
        sides: tuple[Rewarded, Rewarded] = [], []
        for member in members:
            is_proposed = self._search.proposal is not None and member.index >= self._num_parents
            sides[is_proposed].append((floor if member.reward is None else member.reward, member))
        return sides

    def _choose_next(self) -> None:
        """Chooses the best prompt and the next parent, then asks for a proposal."""
        search = self._search
        scores, draw = scores_of(search.kept), random.Random(f"{self._seed}/{search.num_steps}")
        search.best = max(range(len(scores)), key=lambda index: (sum(scores[index].values()), index))
        search.parent = choose_parent(scores, draw)
        parent = search.kept[search.parent]
        name = list(parent.parts)[search.num_steps % len(parent.parts)]
        known = {each.parts[name] for each in search.kept} | set(search.tried)
        text = self.payer.propose(parent.parts[name], parent.examples, draw, tried=known)
        search.proposal = None if text is None else parent.parts | {name: text}
        search.tried += [] if text is None else [text]

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def save(self, directory: Path) -> None:
        """Writes the best prompt and the search state. The caller writes the manifest."""
        prompt = self._as_prompt(self._search.kept[self._search.best].parts)
        for name, record in ((PROMPT_FILE, prompt), (STATE_FILE, self._search)):
            (directory / name).write_bytes(msgspec.json.format(msgspec.json.encode(record)) + b"\n")

    def load(self, directory: Path) -> None:
        """Restores a saved search. Raises CheckpointError if the checkpoint has no valid search state."""
        try:
            self._search = msgspec.convert(read_object(directory / STATE_FILE, within=directory), PromptSearch)
        except (DataError, ValueError) as error:  # includes msgspec's errors
            raise CheckpointError(f"{directory}: no search for a prompt: {one_line(error)}") from error

    def _as_prompt(self, parts: dict[str, str]) -> SystemPrompt:
        return SystemPrompt(parts=parts, place=self._place)

    # --- what only weights, or processes of a learner's own, have -----------------------------------------------------

    def _refuse(self, *arguments: Any, **settings: Any) -> Any:
        raise LearnerError("learner 'prompt' changes no weight")

    def _do_nothing(self, *arguments: Any, **settings: Any) -> None:
        """There are no trained tokens to write, and no worker processes."""

    begin_sft = take_sft = end_sft = score = measure = rehearse = _refuse
    write_learned = start = check = close = _do_nothing


def scores_of(kept: Sequence[KeptPrompt]) -> list[dict[str, float]]:
    """Returns each prompt's mean reward for every scenario played by any prompt.

    For scenarios a prompt has not played, it inherits its nearest ancestor's mean, or else the mean over all prompts.
    """
    means = [{name: total / num for name, (total, num) in prompt.rewards.items()} for prompt in kept]
    names = sorted({name for own in means for name in own})
    anyone = {name: fmean(own[name] for own in means if name in own) for name in names}
    scores: list[dict[str, float]] = []
    for prompt, own in zip(kept, means, strict=True):  # parents come before their children
        scores.append((anyone if prompt.parent is None else scores[prompt.parent]) | own)
    return scores


def _mean(attempts: Rewarded) -> float:
    return fmean(reward for reward, _ in attempts)


def _read_part(name: str, path: Path) -> str:
    text = path.read_text(encoding="utf-8-sig").strip()
    if len(text) > MAX_PART:
        raise UsageError(f"learner.parts.{name}: {path}: {len(text)} characters; a part has {MAX_PART} at most")
    return text
