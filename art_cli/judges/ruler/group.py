"""JudgedGroup: a group as a judge model is shown it: each different attempt once, cut to what it may take.

Pure. The order of the attempts depends on their content alone. Texts are cut by rule. An attempt has a budget of
tokens, and its texts are cut to a common length, the largest at which the attempt fits, so that short ones stay whole:
first tool outputs only, down to a floor, then every text. The head and the tail of a text stay, with the number of
characters left out between them. A message that several attempts share keeps as much as the one that leaves most of
it, so that it stays shared. Conversations of very many messages lose their middle.
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
TOOL_FLOOR = 100  # tokens of a tool output below which the other texts are cut too
_HEAD_SHARE = 2 / 3  # the head's share of what stays: a text begins with what it is, and its tail is how it ended


@dataclass(frozen=True)
class JudgedGroup:
    """The A different attempts of G trajectories.

    Example: of trajectories a, b, c, a and c are the same word for word: members [["b"], ["a", "c"]].
    """

    group_id: str
    attempts: list[Attempt]  # [A] shortened
    members: list[list[str]]  # [A] ids of the trajectories that are this attempt
    tools: list[Json]  # each definition once
    seed: str

    @property
    def num_trajectories(self) -> int:
        return sum(map(len, self.members))

    def parts(self, max_group: int) -> list[list[int]]:
        """Indices of the attempts judged together: all, or the first part and the newcomers of each further part."""
        if len(self.attempts) <= max_group:
            return [list(range(len(self.attempts)))]
        return split(len(self.attempts), max_group=max_group, seed=self.seed)

    def parts_by_example(self, max_group: int) -> list[list[int]]:
        """Returns the same parts, each with arbitrary anchors: as large as the calls will be, known before any is
        made."""
        first, *others = self.parts(max_group)
        return [first, *([*first[: num_anchors(max_group)], *part] for part in others)]


def read_group(group: Sequence[Trajectory], config: RulerJudgeConfig) -> JudgedGroup:
    """Returns the group to judge. The same trajectories in another order or with other ids give the same questions."""
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
    """Returns the attempts with every text cut to what `max_tokens` for each attempt allows."""
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
    """Returns whether the attempt fits even if its conversations share no message; then nothing is cut."""
    total = 0
    for conversation in attempt.conversations:
        for message in conversation:
            total += MARK_TOKENS + sum(MARK_TOKENS + count_tokens(segment.text) for segment in message.segments)
    return total <= max_tokens


def _drop_middle(attempt: Attempt, max_tokens: int) -> Attempt:
    """Returns the attempt without the middle of conversations whose marks alone would take half the budget."""
    most = max(4, max_tokens // (4 * MARK_TOKENS * len(attempt.conversations)))  # each message takes two marks or more

    def drop(conversation: Conversation) -> Conversation:
        omitted = len(conversation) - most
        if omitted <= 0:
            return conversation
        head = most // 2
        return (*conversation[:head], Message("cut", (), omitted=omitted), *conversation[head + omitted :])

    return Attempt(drop(attempt.main), tuple(map(drop, attempt.sides)))


def _limits(messages: Sequence[Message], max_tokens: int) -> dict[Message, int]:
    """Message -> the most tokens that each of its texts may keep, so that all messages fit together."""
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
    """Returns the largest L with sum(min(size, L)) <= room; 0 without room, more than every size when all fit."""
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
    """Returns the segment with at most `max_tokens` of its text: both ends, and the number of characters between."""
    if count_tokens(segment.text) <= max_tokens:
        return segment
    size = len(segment.text) if segment.text.isascii() else len(segment.text.encode())
    kept = int(
        len(segment.text) * max_tokens * BYTES_PER_TOKEN / size
    )  # characters, at this text's own bytes per character
    head = round(kept * _HEAD_SHARE)
    tail = kept - head
    return Segment(
        segment.kind,
        segment.text[:head],
        omitted=len(segment.text) - kept,
        tail=segment.text[len(segment.text) - tail :],
    )
