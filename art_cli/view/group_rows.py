"""A step's groups as rows, a group's attempts as a message tree, and a histogram of rewards.

Rows are sorted, and filtered by reward, error and text. The tree contains shared messages only once. Reads the index
and trajectories; writes nothing.

attempts   s u a1 x1    s u a1 x2    s u a2       (s u: the same system prompt and task)
tree       s - u - a1 - x1
                |     - x2
                - a2
"""

import contextlib
import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import msgspec

from art_cli.runs.json_lines import decode
from art_cli.runs.trajectory import Json, Trajectory
from art_cli.view.index import IndexedGroup, IndexedStep
from art_cli.view.rows import IndexRow, text_of

MAX_TREE_NODES = 5_000
MAX_NODE_TEXT = 20_000  # characters of a message in the tree; the trajectory's page shows the full text
MAX_NODE_CALLS = 100  # tool calls of a message in the tree
MAX_ATTEMPTS = 512  # maximum attempts in a group's row and page
MAX_SEARCHES = 8  # number of cached searches per step
MAX_BINS, BINS = 8, 20  # up to MAX_BINS different rewards get a bin each; otherwise BINS equal ranges
Key = Callable[[IndexedGroup], float | None]  # sorting key; None if unknown
Sort = Literal["index", "reward", "spread", "errors", "length"]
# Characters that all JSON writers leave unescaped, so lines without them need no decoding.
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyz0123456789 .,:;!?()[]{}=+-*_#@%")


class Node(msgspec.Struct):
    """A message shared by attempts. Example: Node(3, 1, "assistant", "right", [], [0, 2], True)"""

    id: int
    parent: int | None  # id of the previous message; None at the root
    role: str
    text: str
    calls: list[Json]  # [{"name", "arguments"}]
    attempts: list[int]  # positions in the list of attempts
    is_sampled: bool  # True if the model wrote it
    num_left_out: int = 0  # characters and calls not shown here


Known = dict[tuple[int | None, bytes], Node]  # (parent id, message) -> node


class MessageTree(msgspec.Struct):
    """`num_left_out` counts messages beyond MAX_TREE_NODES."""

    nodes: list[Node]
    num_left_out: int = 0


def build_tree(attempts: Sequence[Trajectory]) -> MessageTree:
    """Returns the tree of all attempts' conversations, including branches."""
    tree = MessageTree([])
    known: Known = {}
    for place, attempt in enumerate(attempts):
        for conversation in (*attempt.branches, attempt.messages):
            _insert(tree, known, conversation, place)
    return tree


def _insert(tree: MessageTree, known: Known, messages: Sequence[Json], place: int) -> None:
    parent: int | None = None
    for number, message in enumerate(messages):
        compared = {"role": message.get("role"), "content": message.get("content"), "reasoning": reasoning_of(message),
                    "calls": calls_of(message), "name": message.get("name")}  # fmt: skip
        step = (parent, msgspec.json.encode(compared, order="sorted"))  # without the random ids of tool calls
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


def _node(number: int, parent: int | None, message: Json) -> Node:
    text, calls = text_of(message.get("content")), calls_of(message)
    if reasoning := reasoning_of(message):
        text = f"{reasoning}\n\n{text}"
    left_out = max(0, len(text) - MAX_NODE_TEXT) + max(0, len(calls) - MAX_NODE_CALLS)
    role = str(message.get("role"))
    shown = [{**call, "arguments": call["arguments"][:MAX_NODE_TEXT]} for call in calls[:MAX_NODE_CALLS]]
    return Node(number, parent, role, text[:MAX_NODE_TEXT], shown, [], role == "assistant", left_out)


def reasoning_of(message: Json) -> str:
    """Returns the model's reasoning, if the engine reports it separately."""
    found = message.get("reasoning_content") or message.get("reasoning")
    return found if isinstance(found, str) else ""


def calls_of(message: Json) -> list[Json]:
    """Returns a message's tool calls: name and arguments as text."""
    calls = message.get("tool_calls")
    found = []
    for call in calls if isinstance(calls, list) else ():
        function: Any = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            arguments = function.get("arguments")
            text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
            found.append({"name": str(function.get("name")), "arguments": text})
    return found


class GroupRow(msgspec.Struct):
    """A group in a step's list."""

    group_id: str
    scenario_id: str
    label: str
    rewards: list[float | None]
    mean: float | None
    spread: float | None  # standard deviation of the rewards
    num_attempts: int  # `rewards` and `ids` contain at most 512
    num_errors: int
    error: str | None  # most common kind
    num_turns: float | None
    num_tokens: float | None
    ids: list[str]
    source: str = ""  # from rollout.sources
    text: str | None = None  # searched by a page file; missing if the server searches


class RowPage(msgspec.Struct):
    total: int
    rows: list[GroupRow]


class Query(NamedTuple):
    """A query for a list of groups."""

    sort: Sort = "index"
    is_descending: bool = False
    text: str = ""
    min: float | None = None
    max: float | None = None
    has_errors: bool = False
    source: str = ""  # "" for all
    offset: int = 0
    limit: int = 100


def find_groups(step: IndexedStep, query: Query) -> RowPage:
    groups = [group for group in step.groups() if _passes(group, query)]
    if query.text:
        holding = search(step, query.text)
        groups = [group for group in groups if any(row.id in holding for row in group.rows)]
    if query.sort != "index":
        keyed = [(KEYS[query.sort](group), group) for group in groups]
        known = [(value, group) for value, group in keyed if value is not None]
        known.sort(key=lambda pair: pair[0], reverse=query.is_descending)
        groups = [group for _, group in known] + [group for value, group in keyed if value is None]
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


def _length(group: IndexedGroup) -> float | None:
    tokens = [row.num_tokens for row in group.rows if row.num_tokens is not None]
    return _mean(tokens or [row.length for row in group.rows])


KEYS: dict[str, Key] = {
    "reward": lambda group: group.mean,
    "spread": _spread,
    "errors": lambda group: sum(row.error is not None for row in group.rows),
    "length": _length,
}


# --- histogram --------------------------------------------------------------------------------------------------------


class Bin(msgspec.Struct):
    """The number of rewards from `low` to `high` (inclusive), which also work as a filter."""

    low: float
    high: float
    count: int


class Histogram(msgspec.Struct):
    bins: list[Bin]
    missing: int  # attempts without a reward


def histogram(step: IndexedStep) -> Histogram:
    """Returns a bin per distinct reward, or 20 equal ranges for more than MAX_BINS rewards."""
    rewards = [row.reward for row in step.rows()]
    counts = Counter(reward for reward in rewards if reward is not None)
    if len(counts) <= MAX_BINS:
        bins = [Bin(reward, reward, count) for reward, count in sorted(counts.items())]
    else:
        bins = _ranges(counts)
    return Histogram(bins, rewards.count(None))


def _ranges(counts: Counter[float]) -> list[Bin]:
    low, high = min(counts), max(counts)
    width = high / BINS - low / BINS  # divided separately, because the difference may overflow
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


class _Said(msgspec.Struct):
    """The searched fields of a line."""

    messages: list[Json] = []
    messages_and_choices: list[Json] = []
    branches: list[list[Json]] = []
    error: str | None = None
    scores: list[Json] = []


_SAID = msgspec.json.Decoder(_Said)


def search(step: IndexedStep, text: str) -> set[str]:
    """Returns the ids of rows with the text in messages, error or judge explanations, ignoring case."""
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
                files[path].seek(row.offset)
                line = files[path].read(row.length)
                if (not is_plain or wanted.encode() in line.lower()) and wanted in said(line, row).lower():
                    found.add(row.id)
    while len(step.searches) >= MAX_SEARCHES:
        step.searches.pop(next(iter(step.searches)), None)
    step.searches[wanted] = revision, found
    return found


def said(line: bytes, row: IndexRow) -> str:
    """Returns a row's searchable text: messages, tool calls, error and judge explanations."""
    try:
        found = decode(line, _SAID)
    except ValueError:
        return line.decode(errors="replace")
    if row.kind == "art":  # the line contains a whole group
        return line.decode(errors="replace")
    texts = [found.error or "", *(str(score.get("explanation") or "") for score in found.scores)]
    chosen = [each.get("message", each) for each in found.messages_and_choices]
    for conversation in (*found.branches, found.messages, chosen):
        texts += [words_of(message) for message in conversation if isinstance(message, dict)]
    return "\n".join(texts)


def words_of(message: Json) -> str:
    calls = [f"{call['name']} {call['arguments']}" for call in calls_of(message)]
    return "\n".join(filter(None, [reasoning_of(message), text_of(message.get("content")), *calls]))
