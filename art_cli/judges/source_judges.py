"""SourceJudges: each group is scored by its source's judge."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from art_cli.config.schema import RunConfig
from art_cli.judges import Judge, make_judge
from art_cli.judges.blend import SeveralJudges
from art_cli.judges.costs import CostEstimate
from art_cli.judges.trial import require_keys
from art_cli.runs.trajectory import Trajectory
from art_cli.runtime.errors import JudgeError


class SourceJudges(SeveralJudges):
    """Delegates to one judge per source; `of` returns the judge for a group. Sources may share a judge."""

    title = "the sources' judges"

    def __init__(self, judges: Mapping[str, Judge]) -> None:
        super().__init__({str(id(judge)): judge for judge in judges.values()})
        self._by_source = judges

    def of(self, group: Sequence[Trajectory]) -> Judge:
        """Raises JudgeError for an unknown source."""
        source = group[0].source or ""
        if source not in self._by_source:
            raise JudgeError(f"its source is {source!r}; rollout.sources has: {', '.join(self._by_source)}")
        return self._by_source[source]

    def estimate(self, group: Sequence[Trajectory]) -> CostEstimate | None:
        return self.of(group).estimate(group)


def make_judges(config: RunConfig, directory: Path, *, job: str = "") -> Judge:
    """Returns the run's judge: a SourceJudges if any source has a separate judge. Raises like `make_judge`."""
    shared, judges = None, dict[str, Judge]()
    for name, part in config.by_source.items():
        if name and config.rollout.sources[name].judge is not None:
            judges[name] = make_judge(part.judge, directory, job=f"{job}#source/{name}" if job else "")
        else:
            judges[name] = shared = shared or make_judge(part.judge, directory, job=job)
    return shared if shared is not None and len(set(map(id, judges.values()))) == 1 else SourceJudges(judges)


def require_all_keys(config: RunConfig, directory: Path) -> None:
    """Raises UsageError if any judge's environment variable is missing."""
    for name, part in config.by_source.items():
        require_keys(part.judge, directory, key=config.key_in(name, "judge"))
