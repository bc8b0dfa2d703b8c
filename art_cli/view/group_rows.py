"""A step's groups as rows, a group's attempts as a tree of messages, and the histogram of a step's rewards.

Rows are sorted, filtered by reward, error and text. In the tree no message that attempts share stands twice. Reads the
index and trajectories; writes nothing.

attempts   s u a1 x1    s u a1 x2    s u a2       (s u: the same system prompt and task)
tree       s - u - a1 - x1
                |     - x2
                - a2
"""

import contextlib
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import msgspec

from art_cli.runs.json_lines import decode
from art_cli.runs.trajectory import Json, Trajectory
from art_cli.view.index import IndexedGroup, IndexedStep
from art_cli.view.rows import IndexRow, text_of

MAX_TREE_NODES = 5_000
MAX_NODE_TEXT = 20_000  # characters of a message in the tree; the trajectory's own page has all of it
MAX_NODE_CALLS = 100  # tool calls of a message in the tree


class Node(msgspec.Struct):
    """One message of one or more attempts.

    Example: Node(3, 1, "assistant", "right", [], [0, 2], True)
    """

    id: int
    parent: int | None  # id of the message before it, or None for the first
    role: str
    text: str
    calls: list[Json]  # [{"name", "arguments"}]
    attempts: list[int]  # places in the list of attempts
    is_sampled: bool  # whether the model wrote it
    num_left_out: int = 0  # characters and calls beyond what is shown here


Known = dict[tuple[int | None, bytes], Node]  # (id of the parent, message) -> its node


class MessageTree(msgspec.Struct):
    """`num_left_out` messages are beyond the first MAX_TREE_NODES."""

    nodes: list[Node]
    num_left_out: int = 0


def build_tree(attempts: Sequence[Trajectory]) -> MessageTree:
    """Returns all conversations of all attempts, branches included."""
    tree = MessageTree([])
    known: Known = {}
    for place, attempt in enumerate(attempts):
        for conversation in (*attempt.branches, attempt.messages):
            _insert(tree, known, conversation, place)
    return tree


def _insert(tree: MessageTree, known: Known, messages: Sequence[Json], place: int) -> None:
    parent: int | None = None
    for number, message in enumerate(messages):
        step = (parent, msgspec.json.encode(_plain(message), order="sorted"))
        node = known.get(step)
        if node is None:
            if len(tree.nodes) >= MAX_TREE_NODES:
                tree.num_left_out += len(messages) - number
                return
            node = known[step] = _node(len(tree.nodes), parent, message)
            tree.nodes.append(node)
        if place not in node.attempts[-1:]:
            node.attempts.append(place)
        parent = node.id


def _plain(message: Json) -> Json:
    """Returns the content by which messages are compared, without the ids of tool calls, which are random."""
    return {"role": message.get("role"), "content": message.get("content"), "reasoning": reasoning_of(message),
            "calls": calls_of(message), "name": message.get("name")}  # fmt: skip


def _node(number: int, parent: int | None, message: Json) -> Node:
    text, calls = text_of(message.get("content")), calls_of(message)
    if reasoning := reasoning_of(message):
        text = f"{reasoning}\n\n{text}"
    left_out = max(0, len(text) - MAX_NODE_TEXT) + max(0, len(calls) - MAX_NODE_CALLS)
    role = str(message.get("role"))
    shown = [{**call, "arguments": call["arguments"][:MAX_NODE_TEXT]} for call in calls[:MAX_NODE_CALLS]]
    return Node(number, parent, role, text[:MAX_NODE_TEXT], shown, [], role == "assistant", left_out)


def reasoning_of(message: Json) -> str:
    """Returns the model's thoughts before its answer, if the engine reported them separately."""
    found = message.get("reasoning_content") or message.get("reasoning")
    return found if isinstance(found, str) else ""


def calls_of(message: Json) -> list[Json]:
    """Returns the tool calls of a message: name and arguments, as text."""
    calls = message.get("tool_calls")
    found = []
    for call in calls if isinstance(calls, list) else ():
        function: Any = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            arguments = function.get("arguments")
            text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
            found.append({"name": str(function.get("name")), "arguments": text})
    return found


MAX_ATTEMPTS = 512  # attempts of a group that its row and its page have
MAX_SEARCHES = 8  # texts whose findings a step keeps, for further pages of the list
MAX_BINS, BINS = 8, 20  # so many different rewards have a bin each; more share this number of equal ranges

Key = Callable[[IndexedGroup], float | None]  # the number that groups are sorted by, or None if unknown
Sort = Literal["index", "reward", "spread", "errors", "length"]


class GroupRow(msgspec.Struct):
    """One group in the list of a step."""

    group_id: str
    scenario_id: str
    label: str
    rewards: list[float | None]
    mean: float | None
    spread: float | None  # standard deviation of the rewards
    num_attempts: int  # `rewards` and `ids` have the first 512
    num_errors: int
    error: str | None  # the commonest kind
    num_turns: float | None
    num_tokens: float | None
    ids: list[str]
    source: str = ""  # of rollout.sources
    text: str | None = None  # the page of a file searches it; None if the server does


class RowPage(msgspec.Struct):
    total: int
    rows: list[GroupRow]


class Query(NamedTuple):
    """The query of a list of groups."""

    sort: Sort = "index"
    is_descending: bool = False
    text: str = ""
    min: float | None = None
    max: float | None = None
    has_errors: bool = False
    source: str = ""  # or "" for all
    offset: int = 0
    limit: int = 100


def find_groups(step: IndexedStep, query: Query) -> RowPage:
    """Returns the rows that the query asks for."""
    groups = [group for group in step.groups() if _passes(group, query)]
    if query.text:
        holding = search(step, query.text)
        groups = [group for group in groups if any(row.id in holding for row in group.rows)]
    if query.sort != "index":
        groups = _sorted(groups, KEYS[query.sort], is_descending=query.is_descending)
    elif query.is_descending:
        groups.reverse()
    shown = groups[query.offset : query.offset + query.limit]
    return RowPage(len(groups), [row_of(group) for group in shown])


def row_of(group: IndexedGroup) -> GroupRow:
    rows = group.rows
    errors = Counter(row.error for row in rows if row.error is not None)
    return GroupRow(
        group_id=group.id,
        scenario_id=rows[0].scenario,
        label=group.label,
        rewards=[row.reward for row in rows[:MAX_ATTEMPTS]],
        mean=group.mean,
        spread=_spread(group),
        num_attempts=len(rows),
        num_errors=errors.total(),
        error=errors.most_common(1)[0][0] if errors else None,
        num_turns=_mean([row.num_turns for row in rows]),
        num_tokens=_mean([row.num_tokens for row in rows if row.num_tokens is not None]),
        ids=[row.id for row in rows[:MAX_ATTEMPTS]],
        source=rows[0].source,
    )


def _passes(group: IndexedGroup, query: Query) -> bool:
    if query.source and group.rows[0].source != query.source:
        return False
    if query.has_errors and not any(row.error for row in group.rows):
        return False
    if query.min is None and query.max is None:
        return True
    low = -math.inf if query.min is None else query.min
    high = math.inf if query.max is None else query.max
    return any(low <= reward <= high for reward in group.rewards)


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _spread(group: IndexedGroup) -> float | None:
    rewards = group.rewards
    mean = _mean(rewards)
    return None if mean is None else math.hypot(*(reward - mean for reward in rewards)) / math.sqrt(len(rewards))


def _num_errors(group: IndexedGroup) -> float:
    return sum(row.error is not None for row in group.rows)


def _length(group: IndexedGroup) -> float | None:
    tokens = [row.num_tokens for row in group.rows if row.num_tokens is not None]
    return _mean(tokens or [row.length for row in group.rows])


KEYS: dict[str, Key] = {
    "reward": lambda group: group.mean,
    "spread": _spread,
    "errors": _num_errors,
    "length": _length,
}


def _sorted(groups: Iterable[IndexedGroup], key: Key, *, is_descending: bool) -> list[IndexedGroup]:
    """By the key; those without one come last, and equal ones keep their order."""
    keyed = [(key(group), group) for group in groups]
    known = [(value, group) for value, group in keyed if value is not None]
    known.sort(key=lambda pair: pair[0], reverse=is_descending)
    return [group for _, group in known] + [group for value, group in keyed if value is None]


# --- histogram --------------------------------------------------------------------------------------------------------


class Bin(msgspec.Struct):
    """The number of rewards from `low` to `high`, both included. As a filter it finds exactly these."""

    low: float
    high: float
    count: int


class Histogram(msgspec.Struct):
    bins: list[Bin]
    missing: int  # attempts without a reward


def histogram(step: IndexedStep) -> Histogram:
    """Returns a bin for each different reward, or 20 equal ranges where there are more."""
    rewards = [row.reward for row in step.rows()]
    counts = Counter(reward for reward in rewards if reward is not None)
    if len(counts) <= MAX_BINS:
        bins = [Bin(reward, reward, count) for reward, count in sorted(counts.items())]
    else:
        bins = _ranges(counts)
    return Histogram(bins, rewards.count(None))


def _ranges(counts: Counter[float]) -> list[Bin]:
    low, high = min(counts), max(counts)
    width = high / BINS - low / BINS  # each divided first: their difference may be infinite
    edges = [low + place * width for place in range(BINS)] + [math.nextafter(high, math.inf)]
    totals = [0] * BINS
    for reward, count in counts.items():
        place = min(BINS - 1, max(0, int(reward / width - low / width)))
        while place > 0 and reward < edges[place]:
            place -= 1
        while place < BINS - 1 and reward >= edges[place + 1]:
            place += 1
        totals[place] += count
    return [Bin(edges[i], math.nextafter(edges[i + 1], -math.inf), total) for i, total in enumerate(totals)]


# --- text -------------------------------------------------------------------------------------------------------------

# Characters that every writer of JSON writes as they are, so that a line without them need not be decoded.
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyz0123456789 .,:;!?()[]{}=+-*_#@%")


class _Said(msgspec.Struct):
    """The fields of a line that are searched."""

    messages: list[Json] = []
    messages_and_choices: list[Json] = []
    branches: list[list[Json]] = []
    error: str | None = None
    scores: list[Json] = []


_SAID = msgspec.json.Decoder(_Said)


def search(step: IndexedStep, text: str) -> set[str]:
    """Returns the ids of the rows whose messages, error, or judge's words have the text, in whatever case."""
    wanted = text.lower()
    known = step.searches.get(wanted)
    if known is not None and known[0] == step.revision:
        return known[1]
    revision, is_plain = step.revision, all(letter in _PLAIN for letter in wanted)
    found = set()
    with contextlib.ExitStack() as stack:
        files: dict[Path, IO[bytes]] = {}
        for row in step.rows():
            path = step.path_of(row)
            with contextlib.suppress(OSError):
                if path not in files:
                    files[path] = stack.enter_context(step.open(path))
                if _has_text(files[path], row, wanted, is_plain=is_plain):
                    found.add(row.id)
    while len(step.searches) >= MAX_SEARCHES:
        step.searches.pop(next(iter(step.searches)), None)
    step.searches[wanted] = revision, found
    return found


def _has_text(file: IO[bytes], row: IndexRow, wanted: str, *, is_plain: bool) -> bool:
    file.seek(row.offset)
    line = file.read(row.length)
    if is_plain and wanted.encode() not in line.lower():
        return False
    return wanted in said(line, row).lower()


def said(line: bytes, row: IndexRow) -> str:
    """Returns all that is searched of a row: its messages, tool calls, error, and the judge's words."""
    try:
        found = decode(line, _SAID)
    except ValueError:
        return line.decode(errors="replace")
    if row.kind == "art":  # a whole group stands in the line
        return line.decode(errors="replace")
    texts = [found.error or "", *(str(score.get("explanation") or "") for score in found.scores)]
    chosen = [each.get("message", each) for each in found.messages_and_choices]
    for conversation in (*found.branches, found.messages, chosen):
        texts += [words_of(message) for message in conversation if isinstance(message, dict)]
    return "\n".join(texts)


def words_of(message: Json) -> str:
    calls = [f"{call['name']} {call['arguments']}" for call in calls_of(message)]
    return "\n".join(filter(None, [reasoning_of(message), text_of(message.get("content")), *calls]))
