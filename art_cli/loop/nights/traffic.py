"""Traffic: what `art gateway` recorded, read as scenarios for training and as ratings for the canary."""

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from art_cli.config.schema import ImproveConfig
from art_cli.loop.nights.canary_test import Rating
from art_cli.rollouts.near_duplicates import is_same, words_of
from art_cli.rollouts.tables.columns import check_id
from art_cli.runs.durable import read_lines
from art_cli.runs.feedback import FEEDBACK_FILE, USER, FeedbackEntry, latest
from art_cli.runs.trajectory import Json, Trajectory
from art_cli.runtime import plugins
from art_cli.runtime.errors import DataError, describe

log = logging.getLogger(__name__)

Convert = Callable[[Json, list[Json]], Json | None]
# trajectories-20261130-090000.jsonl, and not the file that `art judge` writes next to it
PATTERN, JOURNALS = f"trajectories-{'[0-9]' * 8}-{'[0-9]' * 6}.jsonl", "calls-*.jsonl"
READ_MORE = 4  # conversations are read up to this multiple of `max_scenarios`, because many give the same scenario
INSTRUCTIONS = ("system", "developer")  # roles


class Traffic(NamedTuple):
    files: list[Path]  # trajectory files that no earlier night has read
    num_conversations: int
    scenarios: list[Json]  # oldest first, near duplicates joined


def read_traffic(
    config: ImproveConfig, directories: Sequence[Path], base: Path, *, read_before: set[Path], tested: Iterable[Json]
) -> Traffic:
    """Returns the scenarios of the conversations in new files: all but those of `read_before`, which are resolved.

    Left out are conversations that failed, scenarios that resemble those on which candidates are `tested`, and
    conversations for which the user's function fails, so that no client can stop the nights. Raises DataError for
    unreadable files, and if it fails for most conversations.
    """
    convert: Convert = _first_call if config.scenario is None else plugins.resolve(config.scenario, base=base)
    named = config.scenario or "scenario"
    files = [path for each in directories for path in sorted(each.glob(PATTERN)) if path.resolve() not in read_before]
    feedback = {id: entries for each in directories for id, entries in latest(each).items()}
    conversations = sorted(
        (each.started_at, path, each.id) for path in files for each in read_lines(path, Trajectory) if _is_usable(each)
    )
    wanted = {(path, id) for _, path, id in conversations[-READ_MORE * config.max_scenarios :]}
    found: list[tuple[float, Json]] = []
    failures: list[str] = []
    for path in files:
        for each in read_lines(path, Trajectory):
            if (path, each.id) not in wanted:
                continue
            entries = [msgspec.to_builtins(entry) for entry in feedback.get(each.id, [])]
            try:
                if (scenario := convert(msgspec.to_builtins(each), entries)) is not None:
                    found.append((each.started_at, _checked(scenario, each, named)))
            except Exception as error:  # the boundary to the user's function, and to what a client sent
                failures.append(f"conversation {each.id} of {path}: {describe(error)}")
    if failures:
        text = f"{len(failures)} of {len(wanted)} conversations gave no scenario; the first: {failures[0]}"
        if len(failures) > len(wanted) / 2:
            raise DataError(text, named)
        log.warning("%s: %s", named, text)
    found.sort(key=lambda pair: pair[0])
    joined = _joined([scenario for _, scenario in found], tested)[-config.max_scenarios :]
    return Traffic(files, len(conversations), joined)


def count_unwritten(directories: Iterable[Path]) -> int:
    """Returns the number of calls that are in a gateway's journal, and not yet in a trajectory file."""
    num = 0
    for path in [path for each in directories for path in each.glob(JOURNALS)]:
        with contextlib.suppress(FileNotFoundError):  # the gateway has written its trajectories in the meantime
            num += path.read_bytes().count(b"\n")
    return num


def read_ratings(
    directories: Sequence[Path], metric: str, *, promoted: str, candidate: str, since: float
) -> Iterator[Rating]:
    """Yields the first rating of each conversation that one of the policies answered after `since`, by arrival.

    A later change of mind does not count, because the test has already used the rating.
    """
    rated: set[str] = set()
    entries = (
        (entry.at, f"{place}/{entry.client}", entry)  # every gateway numbers its own clients
        for place, each in enumerate(directories)
        for entry in read_lines(each / FEEDBACK_FILE, FeedbackEntry)
        if entry.metric == metric and entry.policy in (promoted, candidate) and entry.answered_at >= since
    )
    for _, client, entry in sorted(entries, key=lambda each: each[0]):
        value = entry.value
        if not isinstance(value, bool | float) or entry.conversation in rated:
            continue
        rated.add(entry.conversation)
        share = min(max(float(value), 0.0), 1.0)
        share = 1.0 - share if entry.optimize == "min" else share
        yield Rating(entry.policy == candidate, share, client, entry.tags.get(USER, ""))


def _is_usable(trajectory: Trajectory) -> bool:
    return trajectory.error is None and bool(trajectory.messages)


def _first_call(conversation: Json, feedback: list[Json]) -> Json | None:
    """Returns what the client sent first: its messages up to the first reply, and its tools."""
    messages = conversation["messages"]
    replies = [place for place, message in enumerate(messages) if message.get("role") == "assistant"]
    asked = messages[: replies[0]] if replies else messages
    return {"messages": asked, "tools": conversation.get("tools", [])} if asked else None


def _checked(scenario: object, trajectory: Trajectory, named: str) -> Json:
    """Returns the scenario with an id: its own, or a hash of it."""
    if not isinstance(scenario, dict):
        raise DataError(f"a scenario is a JSON object or None, not {type(scenario).__name__}", named)
    try:
        content = msgspec.json.encode(scenario, order="deterministic")
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"a scenario is plain JSON data: {error}", named) from None
    if "id" not in scenario:
        return {"id": hashlib.sha256(content).hexdigest()[:16], **scenario}
    check_id(scenario["id"], f"{named}, conversation {trajectory.id}")
    return scenario


def unlike(scenarios: Sequence[Json], others: Iterable[Json]) -> list[Json]:
    """Returns the scenarios that resemble none of the others."""
    known, words = [_words(each) for each in others], [_words(each) for each in scenarios]
    return [
        scenario
        for scenario, its in zip(scenarios, words, strict=True)
        if not any(is_same(its, other) for other in known)
    ]


def _joined(scenarios: Sequence[Json], tested: Iterable[Json]) -> list[Json]:
    """Keeps the newest of near duplicates, and drops those of `tested`."""
    known = [_words(each) for each in tested]
    kept: list[Json] = []
    ids: set[str] = set()
    for scenario in reversed(scenarios):
        words = _words(scenario)
        if str(scenario["id"]) in ids or any(is_same(words, each) for each in known):
            continue
        ids.add(str(scenario["id"]))
        known.append(words)
        kept.append(scenario)
    return kept[::-1]


def _words(scenario: Json) -> frozenset[str]:
    """Returns the words that tell scenarios apart: not the system prompt, nor the tools, which all of them share."""
    asked = {key: value for key, value in scenario.items() if key not in ("id", "tools")}
    if isinstance(messages := scenario.get("messages"), list):
        spoken = [each for each in messages if isinstance(each, dict) and each.get("role") not in INSTRUCTIONS]
        asked["messages"] = [each.get("content") for each in spoken]
    return words_of(msgspec.json.encode(asked).decode())
