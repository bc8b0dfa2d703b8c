"""A conversation's entries as a trajectory, with its scenario and its group."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from art_cli.chat.requests import Json, Request
from art_cli.config.schema import RedactConfig
from art_cli.runs.trajectory import Trajectory
from art_cli.runtime.secrets import Secrets
from art_cli.serving.gateway.entries import JournalEntry
from art_cli.serving.gateway.journaled_recorder import About, JournaledRecorder
from art_cli.serving.gateway.redaction import Redactor

NOTHING = Redactor(RedactConfig(), Secrets([]))  # entries are redacted already


class GroupPlace(NamedTuple):
    """A trajectory's place in its group. Example: GroupPlace("9a31...-20261122-195028-0", group_size=4, position=2)"""

    group_id: str
    group_size: int
    position: int  # 0 for the first


def scenario_of(request: Request) -> str:
    """Returns the scenario that attempts at one task share: the client's name for it, or a digest of the beginning.

    That is all messages up to the first one of the user: the system prompt and the question. `request` is redacted.
    """
    if request.scenario:
        return request.scenario
    beginning: object = request.prompt
    if request.messages is not None:
        first = next((place for place, sent in enumerate(request.messages) if sent.get("role") == "user"), 0)
        beginning = [[sent.get("role"), sent.get("content")] for sent in request.messages[: first + 1]]
    return hashlib.sha256(msgspec.json.encode(beginning)).hexdigest()[:16]


def places(scenarios: Mapping[str, str], *, group_size: int, file: str) -> dict[str, GroupPlace]:
    """Returns the group and index of each conversation. `scenarios`: conversation -> scenario; `file`: its stamp.

    The attempts at one scenario in one file are divided into groups as equal as possible, of at most `group_size`.
    The file's stamp is part of a group's id, so that the groups of several files can be read as one file.
    """
    by_scenario: dict[str, list[str]] = {}
    for conversation, scenario in scenarios.items():
        by_scenario.setdefault(scenario, []).append(conversation)
    found = {}
    for scenario, members in by_scenario.items():
        num_groups = math.ceil(len(members) / group_size)
        bounds = [len(members) * number // num_groups for number in range(num_groups + 1)]
        for number, (start, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
            for position, conversation in enumerate(members[start:end]):
                found[conversation] = GroupPlace(f"{scenario}-{file}-{number}", end - start, position)
    return found


def trajectory_of(entries: Sequence[JournalEntry], place: GroupPlace) -> Trajectory:
    """Returns the trajectory of a conversation's entries, at least one, in the order of their numbers."""
    first, last = entries[0], entries[-1]
    recorder = JournaledRecorder(About(first.conversation, first.client, first.name, first.scenario), NOTHING, _refuse)
    recorder.replay(entries)
    about: Json = {"client": first.client, "text_only_calls": recorder.num_text_only}
    return Trajectory(
        id=first.conversation,
        group_id=place.group_id,
        group_size=place.group_size,
        index=place.position,
        step=max((turn.step for turn in recorder.turns), default=0),
        scenario={"id": first.scenario},
        messages=recorder.messages,
        branches=recorder.branches,
        tools=recorder.tools,
        turns=recorder.turns,
        metrics=recorder.metrics(),
        metadata=about if first.name is None else {**about, "conversation": first.name},
        started_at=first.at,
        duration_s=max(0.0, last.at - first.at),
    )


def _refuse(entry: JournalEntry) -> int:
    raise AssertionError("what is replayed is written already")
