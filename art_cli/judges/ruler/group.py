"""JudgedGroup: a group prepared for the judge model, deduplicated and shortened.

Pure. The order of attempts depends only on their content. Each attempt has a token budget. To fit the budget, texts are
cut to a common length, so short texts stay complete: first only tool outputs, down to a floor, then all texts. A cut
text keeps its head and tail, with the number of omitted characters in between. A message shared by several attempts
gets the largest of their limits, so it stays shared. Very long conversations lose their middle.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from art_cli.config.schema import RulerJudgeConfig
from art_cli.judges import make_key
from art_cli.judges.judge_text import BYTES_PER_TOKEN, count_tokens
from art_cli.judges.ruler import attempt_tree
from art_cli.judges.ruler.attempt_tree import Attempt, Conversation, Message, Segment, digest, read_attempt
from art_cli.judges.ruler.votes import num_anchors, split
from art_cli.runs.trajectory import Json, Trajectory

MARK_TOKENS = 8  # estimated tokens of a mark line
TOOL_FLOOR = 100  # tokens per tool output, before other texts are cut too
_HEAD_SHARE = 2 / 3  # head share of a cut text; the head shows the topic, the tail the outcome


@dataclass(frozen=True)
class JudgedGroup:
    """The A different of G attempts. Example: a, b, c with identical a and c have members [["b"], ["a", "c"]]."""

    group_id: str
    attempts: list[Attempt]  # [A] shortened
    members: list[list[str]]  # [A] trajectory ids with this attempt
    tools: list[Json]  # deduplicated definitions
    seed: str

    @property
    def num_trajectories(self) -> int:
        return sum(map(len, self.members))

    def parts(self, max_group: int) -> list[list[int]]:
        """Indices of attempts judged together: all, or the first part and the new attempts of each other part."""
        if len(self.attempts) <= max_group:
            return [list(range(len(self.attempts)))]
        return split(len(self.attempts), max_group=max_group, seed=self.seed)

    def parts_by_example(self, max_group: int) -> list[list[int]]:
        """Returns the same parts with arbitrary anchors, to estimate call sizes beforehand."""
        first, *others = self.parts(max_group)
        return [first, *([*first[: num_anchors(max_group)], *part] for part in others)]


def read_group(group: Sequence[Trajectory], config: RulerJudgeConfig) -> JudgedGroup:
    """Prepares a group. The result is independent of trajectory order and ids."""
    assert group, "an empty group is never judged"
    found: dict[str, tuple[Attempt, list[str]]] = {}
    for trajectory in group:
        attempt = read_attempt(trajectory)
        found.setdefault(digest(attempt), (attempt, []))[1].append(trajectory.id)
    names = sorted(found)
    tools = {make_key(tool=tool): tool for trajectory in group for tool in trajectory.tools}
    return JudgedGroup(
        group[0].group_id,
        shorten([found[name][0] for name in names], config.max_tokens_per_attempt),
        [found[name][1] for name in names],
        [tools[key] for key in sorted(tools)],
        make_key(seed=config.seed, attempts=names),
    )


# --- shortening -------------------------------------------------------------------------------------------------------


def shorten(attempts: Sequence[Attempt], max_tokens: int) -> list[Attempt]:
    """Returns the attempts with texts cut to fit `max_tokens` per attempt."""
    if all(_surely_fits(attempt, max_tokens) for attempt in attempts):
        return list(attempts)
    trimmed = [each if _surely_fits(each, max_tokens) else _drop_middle(each, max_tokens) for each in attempts]
    limits: dict[Message, int] = {}
    for attempt in trimmed:
        messages = [message for part in attempt_tree.build([attempt]).parts() for message in part.messages]
        for message, limit in _limits(messages, max_tokens).items():
            limits[message] = max(limit, limits.get(message, 0))
    return [
        Attempt(_cut(attempt.main, limits), tuple(_cut(side, limits) for side in attempt.sides)) for attempt in trimmed
    ]


def _surely_fits(attempt: Attempt, max_tokens: int) -> bool:
    """Returns whether the attempt fits even without sharing messages between conversations."""
    total = 0
    for conversation in attempt.conversations:
        for message in conversation:
            total += MARK_TOKENS + sum(MARK_TOKENS + count_tokens(segment.text) for segment in message.segments)
    return total <= max_tokens


def _drop_middle(attempt: Attempt, max_tokens: int) -> Attempt:
    """Drops the middle of conversations if their marks alone exceed half the budget."""
    most = max(4, max_tokens // (4 * MARK_TOKENS * len(attempt.conversations)))  # at least two marks per message

    def drop(conversation: Conversation) -> Conversation:
        omitted = len(conversation) - most
        if omitted <= 0:
            return conversation
        head = most // 2
        return (*conversation[:head], Message("cut", (), omitted=omitted), *conversation[head + omitted :])

    return Attempt(drop(attempt.main), tuple(map(drop, attempt.sides)))


def _limits(messages: Sequence[Message], max_tokens: int) -> dict[Message, int]:
    """Returns a token limit per text for each message, such that all messages fit together."""
    sizes = [
        (message.role == "tool", count_tokens(segment.text)) for message in messages for segment in message.segments
    ]
    room = max_tokens - MARK_TOKENS * (len(messages) + len(sizes))
    tools = [size for is_tool, size in sizes if is_tool]
    others = [size for is_tool, size in sizes if not is_tool]
    tool_limit = _level(tools, room - sum(others))
    limit = max_tokens
    if tool_limit < TOOL_FLOOR and others:
        limit = _level([*(min(size, TOOL_FLOOR) for size in tools), *others], room)
        tool_limit = min(limit, TOOL_FLOOR)
    return {message: tool_limit if message.role == "tool" else limit for message in messages}


def _level(sizes: Sequence[int], room: int) -> int:
    """Returns the largest L with sum(min(size, L)) <= room: 0 without room, larger than every size if all fit."""
    for index, size in enumerate(sorted(sizes)):
        share = room // (len(sizes) - index)
        if share < size:
            return max(share, 0)
        room -= size
    return max(sizes, default=0) + max(room, 0)


def _cut(conversation: Conversation, limits: dict[Message, int]) -> Conversation:
    return tuple(
        message._replace(segments=tuple(cut_segment(segment, limits[message]) for segment in message.segments))
        for message in conversation
    )


def cut_segment(segment: Segment, max_tokens: int) -> Segment:
    """Returns the segment cut to `max_tokens`: head, tail and the number of omitted characters."""
    if count_tokens(segment.text) <= max_tokens:
        return segment
    size = len(segment.text) if segment.text.isascii() else len(segment.text.encode())
    # Characters: the text's average bytes per character decide how many fit.
    kept = int(len(segment.text) * max_tokens * BYTES_PER_TOKEN / size)
    head = round(kept * _HEAD_SHARE)
    tail = kept - head
    return Segment(
        segment.kind,
        segment.text[:head],
        omitted=len(segment.text) - kept,
        tail=segment.text[len(segment.text) - tail :],
    )
