"""The attempts of a group laid over each other: a tree of messages in which no shared message stands twice.

attempts   s u a1 x1    s u a1 x2    s u a2       (s u: the same system prompt and task)
tree       s - u - a1 - x1
                |     - x2
                - a2
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from art_cli.runs.trajectory import Json, Trajectory
from art_cli.view.rows import text_of

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
