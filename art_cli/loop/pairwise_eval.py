"""An evaluation by a judge: attempts against fixed reference attempts.

A judge such as RULER compares the attempts of one group, so its scores of two checkpoints are comparable only if both
met the same opponents. Here each scenario's attempts are judged in one group with the reference attempts, which are
those of the first policy that was evaluated. The reward is the share of comparisons won. Only the order of scores
within a group counts, so a judge that is harsher in one call than in another changes nothing.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import product
from statistics import fmean

import msgspec

from art_cli.config.schema import RunConfig
from art_cli.judges import Judge
from art_cli.judges.judge_groups import judge_groups
from art_cli.runs.trajectory import ScoredTrajectory, Trajectory
from art_cli.runtime.errors import JudgeError

IN_FLIGHT = 32  # number of scenarios judged at once; a judge that makes calls bounds those itself
REFERENCE = "reference-"  # prefix of the ids of reference attempts while they are judged


def is_judged(config: RunConfig, trajectories: Sequence[Trajectory]) -> bool:
    """Returns True if the judge gives an evaluation's reward, because the rollouts finished and returned none."""
    assert config.eval is not None, "no eval section"
    finished = [trajectory for trajectory in trajectories if trajectory.error is None]
    is_silent = bool(finished) and all(trajectory.returned_reward is None for trajectory in finished)
    return config.eval.judge and config.judge.name not in ("rollout", "none") and is_silent


async def judge_contest(
    judge: Judge, attempts: Sequence[Trajectory], references: Sequence[Trajectory]
) -> dict[str, float]:
    """Returns, by scenario id, the share of comparisons with reference attempts that its attempts win.

    A tie counts half. A failed attempt loses to one that did not fail. References against themselves get 0.5
    everywhere, without asking the judge. A scenario without references is left out. Raises JudgeError: most scenarios
    could not be scored, or no further one can be.
    """
    theirs = _by_scenario(references)
    ours = {name: members for name, members in _by_scenario(attempts).items() if name in theirs}
    if {trajectory.id for trajectory in attempts} == {t.id for t in references} and attempts == references:
        return dict.fromkeys(ours, 0.5)
    won: dict[str, float] = {}

    def keep(scored: list[ScoredTrajectory]) -> None:
        won[scored[0].group_id] = _share_won(scored)

    groups = ((name, partial(_mix, name, members, theirs[name])) for name, members in ours.items())
    tally = await judge_groups(judge, groups, keep, in_flight=IN_FLIGHT)
    if tally.stopped or len(tally.owed) > tally.num_scored:
        reason = tally.stopped or next(iter(tally.owed.values()))
        raise JudgeError(f"evaluation: {len(ours) - len(won)} of {len(ours)} scenarios were not judged ({reason})")
    return won


def _by_scenario(trajectories: Sequence[Trajectory]) -> dict[str, list[Trajectory]]:
    by_scenario: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        by_scenario[str(trajectory.scenario.get("id", trajectory.group_id))].append(trajectory)
    return by_scenario


def _mix(name: str, attempts: Sequence[Trajectory], references: Sequence[Trajectory]) -> list[Trajectory]:
    """Returns one group of both, with new ids, because two policies at the same step have the same ids."""
    sides = [("attempt-", attempts), (REFERENCE, references)]
    named = [(f"{side}{number}", t) for side, members in sides for number, t in enumerate(members)]
    return [
        msgspec.structs.replace(trajectory, id=id, group_id=name, group_size=len(named), index=index)
        for index, (id, trajectory) in enumerate(named)
    ]


def _share_won(scored: Sequence[ScoredTrajectory]) -> float:
    rewards: tuple[list[float], list[float]] = [], []  # those of the attempts, and those of the references
    for each in scored:  # a failed attempt has no reward
        rewards[each.id.startswith(REFERENCE)].append(float("-inf") if each.reward is None else each.reward)
    return fmean((ours > theirs) + (ours == theirs) / 2 for ours, theirs in product(*rewards))
