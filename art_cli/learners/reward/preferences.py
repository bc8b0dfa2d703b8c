"""Preferences between attempts, by judges and people, read from scored files and labels. No torch.

    scored.jsonl    pairs of a group whose rewards differ, and values in [0, 1]: rewards that the rollout returned or
                    that users gave, and those of a group of one attempt
    labels.jsonl    pairs that a person ordered (`art label`); they replace the rewards of the same two attempts

A cascade's groups teach what its second judge scored. The groups that its first judge scored alone teach nothing,
because this judge is the pupil. Rewards of other judges may compare within a group only, so they are not values. If a
reward in a file lies outside [0, 1], no group of the same judge gives values. A person's `equal` removes the pair.
Attempts without a reward or without messages, groups without a difference and values, and single rewards outside [0, 1]
teach nothing and are counted.
"""

import contextlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product
from pathlib import Path
from typing import NamedTuple

import msgspec

from art_cli.judges.cascade import FIRST, THEN
from art_cli.judges.files.person_labels import SIGNS, PairLabel, Verdict, message_digest
from art_cli.judges.judge_report import ScoredRow
from art_cli.learners.sft.examples import scored_files
from art_cli.runs.durable import read_lines
from art_cli.runs.json_lines import decode, lines
from art_cli.runs.trajectory import EQUAL_REWARDS, Json, by_group
from art_cli.runtime.errors import DataError, UsageError

LABELS = "labels"  # kind of pairs that a person ordered
ON_ONE_SCALE = ("reward", "feedback")  # kinds whose rewards compare across groups: the rollout's own, and users'


class Taught(NamedTuple):
    """An order of two attempts, by index in the group. Example: Taught(better=0, worse=3, kind="ruler")"""

    better: int
    worse: int
    kind: str  # name of the judge, or LABELS


@dataclass
class PreferenceGroup:
    """A group's attempts with messages, and what is known about them."""

    name: str  # file and group id
    scenario: str  # the data are divided by scenario into trained and held out
    kind: str  # name of the rewards' judge
    ids: list[str]  # [A]
    conversations: list[list[Json]]  # [A]
    pairs: list[Taught] = field(default_factory=list)
    values: dict[int, float] = field(default_factory=dict)  # index -> reward in [0, 1], on one scale for all groups


class Preferences(NamedTuple):
    groups: list[PreferenceGroup]  # those that teach
    counts: dict[str, int]  # pairs by kind, single values, and what was left out


# (group id, attempt id, digest or "") -> the group of each file, and the attempt's index in it
_Places = dict[tuple[str, str, str], list[tuple[PreferenceGroup, int]]]


class _Row(ScoredRow, kw_only=True):
    id: str
    messages: msgspec.Raw
    scenario: Json = {}
    source: str | None = None
    digest: str = ""
    conversation: list[Json] = []

    def __post_init__(self) -> None:
        super().__post_init__()
        self.digest = message_digest(self.messages)
        self.conversation = msgspec.json.decode(self.messages, type=list[Json])


def read_preferences(paths: Sequence[Path]) -> Preferences:
    """Reads scored files, labels and runs, each file once. Raises UsageError and DataError, also if nothing teaches."""
    files = list({file.resolve(): file for path in paths for file in data_files(path)}.values())
    labels, groups = list[PairLabel](), list[PreferenceGroup]()
    left_out = ("without_reward", "without_messages", "without_difference", "beyond_0_to_1", "cascade_not_asked")
    counts = dict.fromkeys(left_out, 0)
    places: _Places = {}
    for file in files:
        if _is_labels(file):
            labels += read_lines(file, PairLabel)
        else:
            groups += [_group(file, rows, places, counts) for rows in by_group(read_lines(file, _Row)).values()]
    counts["unknown_labels"] = _apply(labels, places)
    beyond = {group.kind for group in groups if not all(0 <= value <= 1 for value in group.values.values())}
    for group in groups:
        if group.kind in beyond:
            group.values = {}
    teaching = [group for group in groups if group.pairs or group.values]
    counts["without_difference"] += sum(len(each.ids) > 1 and not (each.pairs or each.values) for each in groups)
    pairs = [pair for group in teaching for pair in group.pairs]
    if not pairs and len({value for group in teaching for value in group.values.values()}) < 2:
        unknown = f"; {counts['unknown_labels']} labels are of attempts in none of these files" if labels else ""
        if not groups:
            raise DataError(f"no attempts found{unknown}", files[0])
        reason = "no two attempts of a group differ in reward or label, and no rewards from 0 to 1 of two groups do"
        if num := counts["cascade_not_asked"]:
            unknown += f"; a cascade's first judge alone scored {num} attempts, and it is the one to learn"
        raise DataError(f"{reason}{unknown}; score the attempts first: art judge, art label", files[0])
    kinds = [pair.kind for pair in pairs]
    counts |= {f"pairs.{kind}": kinds.count(kind) for kind in sorted(set(kinds))}
    return Preferences(teaching, counts | {"values": sum(len(group.values) for group in teaching)})


def data_files(path: Path) -> list[Path]:
    """Returns the file itself, or a run's scored files and their labels. Raises UsageError."""
    if not path.exists():
        raise UsageError(f"{path}: no such file")
    if not path.is_dir():
        return [path]
    found = [file for file in scored_files(path) if file.is_file()]
    if not found:
        raise UsageError(f"{path}: no scored trajectories there; a run has them in step_*/scored.jsonl")
    beside = dict.fromkeys(file.with_name("labels.jsonl") for file in found)
    return [*found, *(file for file in beside if file.is_file())]


def _is_labels(path: Path) -> bool:
    """Returns True if the first line is a label. read_lines names a line's mistakes."""
    first = next(iter(lines(path)), None)
    with contextlib.suppress(ValueError):
        return first is not None and "verdict" in decode(first.data, msgspec.json.Decoder(dict[str, msgspec.Raw]))
    return False


def _group(file: Path, rows: Sequence[_Row], places: _Places, counts: dict[str, int]) -> PreferenceGroup:
    judges = {score.judge for row in rows for score in row.scores}
    kind = "+".join(sorted(judges - {FIRST, THEN})) or "reward"
    scenario = f"{rows[0].source or ''}/{rows[0].scenario.get('id', rows[0].group_id)}"
    whole = [row for row in rows if row.error is None and row.conversation]
    counts["without_messages"] += sum(row.error is None and not row.conversation for row in rows)
    counts["without_reward"] += sum(row.error is not None or row.reward is None for row in rows)
    conversations = [row.conversation for row in whole]
    group = PreferenceGroup(f"{file}:{rows[0].group_id}", scenario, kind, [row.id for row in whole], conversations)
    for index, row in enumerate(whole):
        for digest in (row.digest, ""):
            places.setdefault((row.group_id, row.id, digest), []).append((group, index))
    rewards = [(row.reward, index) for index, row in enumerate(whole) if row.reward is not None]
    if judges == {FIRST}:
        counts["cascade_not_asked"] += len(rewards)
        return group
    if len(rows) == len(rewards) == 1 and not 0 <= rewards[0][0] <= 1:
        counts["beyond_0_to_1"] += 1
        rewards = []
    if len(rows) == 1 or kind in ON_ONE_SCALE:
        group.values = {index: reward for reward, index in rewards}
    for (low, worse), (high, better) in combinations(sorted(rewards), 2):
        if high - low > EQUAL_REWARDS:
            group.pairs.append(Taught(better, worse, kind))
    return group


def _apply(labels: Iterable[PairLabel], places: _Places) -> int:
    """Puts labels in place of the pairs that rewards order. Returns the number of labels for unknown attempts.

    As in `art label`, `undo` removes the label with the same sides, and the first answer about a pair counts.
    """
    num_unknown, said = 0, dict[tuple[str, int, int], tuple[PreferenceGroup, Verdict]]()
    for label in labels:
        digests = label.digests or ("", "")
        left, right = (
            places.get((label.group_id, id, digest), [])
            for id, digest in zip((label.left, label.right), digests, strict=True)
        )
        pairs = product(left, right)
        found = [(group, one, other) for (group, one), (same, other) in pairs if group is same and one != other]
        num_unknown += not found
        for group, one, other in found:
            key = group.name, one, other
            said[key] = group, label.verdict
            if label.verdict == "undo":
                del said[key]
    done = set[tuple[str, frozenset[int]]]()
    for (name, *sides), (group, verdict) in said.items():
        if verdict in SIGNS and (name, frozenset(sides)) not in done:
            done.add((name, frozenset(sides)))
            group.values = {index: value for index, value in group.values.items() if index not in sides}
            group.pairs = [each for each in group.pairs if {each.better, each.worse} != set(sides)]
            if sign := SIGNS[verdict]:
                better, worse = sides[::sign]
                group.pairs.append(Taught(better, worse, LABELS))
    return num_unknown


def divide(
    groups: Sequence[PreferenceGroup], share: float, seed: int
) -> tuple[list[PreferenceGroup], list[PreferenceGroup]]:
    """Returns (trained, held out) groups, divided by scenario. Raises DataError for fewer than two scenarios."""
    scenarios = sorted({group.scenario for group in groups})
    if len(scenarios) < 2:
        raise DataError("all of it is of one scenario, so none can be held out; add groups of others", groups[0].name)
    random.Random(seed).shuffle(scenarios)
    held = set(scenarios[: min(len(scenarios) - 1, max(1, round(share * len(scenarios))))])
    return [each for each in groups if each.scenario not in held], [each for each in groups if each.scenario in held]
