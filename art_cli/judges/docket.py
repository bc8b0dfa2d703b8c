"""A group as it goes before the judge: each different attempt once, in an order that depends on content alone."""

from collections.abc import Sequence
from dataclasses import dataclass

from art_cli.config.schema import RulerJudgeConfig
from art_cli.judges.cache import make_key
from art_cli.judges.scale import num_anchors, split
from art_cli.judges.shorten import shorten
from art_cli.judges.transcript import Attempt, digest, read_attempt
from art_cli.trajectory import Json, Trajectory


@dataclass(frozen=True)
class Docket:
    """A different attempts of G trajectories.

    Example: trajectories a, b, c, of which a and c are word for word the same: members [["b"], ["a", "c"]].
    """

    group_id: str
    attempts: list[Attempt]  # [A] shortened
    members: list[list[str]]  # [A] ids of the trajectories that are this attempt
    tools: list[Json]  # each once
    seed: str

    @property
    def num_trajectories(self) -> int:
        return sum(map(len, self.members))

    def parts(self, max_group: int) -> list[list[int]]:
        """Places of the attempts judged together: all, or the first part and the newcomers of each further one."""
        if len(self.attempts) <= max_group:
            return [list(range(len(self.attempts)))]
        return split(len(self.attempts), max_group=max_group, seed=self.seed)

    def parts_by_example(self, max_group: int) -> list[list[int]]:
        """The same with arbitrary anchors among the newcomers: what the calls will be like before any is made."""
        first, *others = self.parts(max_group)
        return [first, *([*first[: num_anchors(max_group)], *part] for part in others)]


def read_docket(group: Sequence[Trajectory], config: RulerJudgeConfig) -> Docket:
    """The group's docket. The same trajectories in another order, or under other ids, give the same questions."""
    assert group, "an empty group has no docket"
    found: dict[str, tuple[Attempt, list[str]]] = {}
    for trajectory in group:
        attempt = read_attempt(trajectory)
        found.setdefault(digest(attempt), (attempt, []))[1].append(trajectory.id)
    names = sorted(found)
    tools = {make_key(tool=tool): tool for trajectory in group for tool in trajectory.tools}
    return Docket(
        group[0].group_id,
        shorten([found[name][0] for name in names], config.max_tokens_per_attempt),
        [found[name][1] for name in names],
        [tools[key] for key in sorted(tools)],
        make_key(seed=config.seed, attempts=names),
    )
