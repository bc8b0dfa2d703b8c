"""Attempts merged into a tree of parts, each a run of messages, in which no shared message stands twice.

Pure. The root is an empty part. The path from the root to the part where a conversation ends spells the conversation:

    attempts   s u a1 x1    s u a1 x2    s u a2       (s u: the same system prompt and task)
    tree       [s u] - [a1] - [x1]
                     |      - [x2]
                     - [a2]
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from art_cli.judges.ruler.attempts import Attempt, Message


@dataclass(eq=False)
class Part:
    """A run of messages after those of `parent`. `attempts` are the indices of the attempts that pass through it."""

    parent: "Part | None"
    messages: list[Message] = field(default_factory=list)
    attempts: set[int] = field(default_factory=set)
    children: list["Part"] = field(default_factory=list)  # children in the order in which attempts reach them

    @property
    def is_shared(self) -> bool:
        return len(self.attempts) > 1

    def walk(self) -> Iterator["Part"]:
        """This part and all below it, parents first."""
        waiting = [self]
        while waiting:
            part = waiting.pop()
            yield part
            waiting += reversed(part.children)


@dataclass(frozen=True)
class AttemptTree:
    """The parts, and for each attempt the parts where its conversations end, the main one's last."""

    root: Part
    ends: list[list[Part]]

    def parts(self) -> list[Part]:
        """Returns all parts but the empty root, parents first."""
        return list(self.root.walk())[1:]


def build(attempts: Sequence[Attempt]) -> AttemptTree:
    """Returns the attempts' tree. Its children, and everything written from it, follow the order of `attempts`."""
    root = Part(None)
    steps: dict[tuple[int, Message], Part] = {}  # (id of the parent, message) -> the part of that one message
    ends = []
    for index, attempt in enumerate(attempts):
        ends.append([_insert(conversation, index, root, steps) for conversation in attempt.conversations])
    stops = {id(part) for own in ends for part in own}
    merged: dict[int, Part] = {}  # id of a one-message part -> the part that it was joined to
    _merge(root, stops, merged)
    return AttemptTree(root, [[merged.get(id(part), part) for part in own] for own in ends])


def _insert(conversation: Sequence[Message], index: int, root: Part, steps: dict[tuple[int, Message], Part]) -> Part:
    part = root
    part.attempts.add(index)
    for message in conversation:
        step = steps.get((id(part), message))
        if step is None:
            step = steps[id(part), message] = Part(part, [message])
            part.children.append(step)
        step.attempts.add(index)
        part = step
    return part


def _merge(root: Part, stops: set[int], merged: dict[int, Part]) -> None:
    """Joins each part with its only child, unless a conversation ends or forks between them."""
    waiting = list(root.children)
    while waiting:
        part = waiting.pop()
        last = part
        while len(last.children) == 1 and id(last) not in stops and last.children[0].attempts == part.attempts:
            last = last.children[0]
            part.messages += last.messages
            merged[id(last)] = part
        part.children = last.children
        for child in part.children:
            child.parent = part
        waiting += part.children


def repeated_texts(parts: Sequence[Part], min_length: int) -> list[str]:
    """Texts of at least `min_length` characters that appear in the tree more than once, in order of appearance."""
    counts = Counter(
        segment.text
        for part in parts
        for message in part.messages
        for segment in message.segments
        if not segment.omitted and len(segment.text) >= min_length
    )
    return [text for text, count in counts.items() if count > 1]
