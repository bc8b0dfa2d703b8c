"""Leaves out what is too long for the judge, by rule: head and tail stay, and how much went is kept beside them.

An attempt has a budget of tokens. Texts are cut to a common length, the largest at which the attempt fits, so that
short ones stay whole: first tool outputs only, down to a floor, then every text. A message that several attempts share
is cut as for the one that leaves most of it, so that it stays shared. Conversations of very many messages lose their
middle.
"""

from collections.abc import Sequence

from art_cli.judges import tree
from art_cli.judges.transcript import Attempt, Conversation, Message, Piece

BYTES_PER_TOKEN = 4  # of English and code in the tokenizers of 2023 and later; other scripts need fewer bytes a token
MARK_TOKENS = 8  # what a mark line takes
TOOL_FLOOR = 100  # tokens of a tool output below which the other texts are cut too
_HEAD_SHARE = 2 / 3  # of what stays of a cut text: what it is stands in front, how it ended at the end


def count_tokens(text: str) -> int:
    """An estimate, rounded up."""
    size = len(text) if text.isascii() else len(text.encode())
    return -(-size // BYTES_PER_TOKEN)


def shorten(attempts: Sequence[Attempt], max_tokens: int) -> list[Attempt]:
    """The attempts with every text cut to what `max_tokens` for each attempt allows."""
    if all(_surely_fits(attempt, max_tokens) for attempt in attempts):
        return list(attempts)
    trimmed = [each if _surely_fits(each, max_tokens) else _drop_middle(each, max_tokens) for each in attempts]
    limits: dict[Message, int] = {}
    for attempt in trimmed:
        messages = [message for part in tree.build([attempt]).parts() for message in part.messages]
        for message, limit in _limits(messages, max_tokens).items():
            limits[message] = max(limit, limits.get(message, 0))
    return [
        Attempt(_cut(attempt.main, limits), tuple(_cut(side, limits) for side in attempt.sides)) for attempt in trimmed
    ]


def _surely_fits(attempt: Attempt, max_tokens: int) -> bool:
    """Whether the attempt fits even if its conversations share nothing: then there is nothing to work out."""
    total = 0
    for conversation in attempt.conversations:
        for message in conversation:
            total += MARK_TOKENS + sum(MARK_TOKENS + count_tokens(piece.text) for piece in message.pieces)
    return total <= max_tokens


def _drop_middle(attempt: Attempt, max_tokens: int) -> Attempt:
    """Conversations of so many messages that their marks alone would take half the budget keep both ends."""
    most = max(4, max_tokens // (4 * MARK_TOKENS * len(attempt.conversations)))  # a message has two marks or more

    def drop(conversation: Conversation) -> Conversation:
        omitted = len(conversation) - most
        if omitted <= 0:
            return conversation
        head = most // 2
        return (*conversation[:head], Message("cut", (), omitted=omitted), *conversation[head + omitted :])

    return Attempt(drop(attempt.main), tuple(map(drop, attempt.sides)))


def _limits(messages: Sequence[Message], max_tokens: int) -> dict[Message, int]:
    """The most tokens a text of each message may keep so that all of them, as often as they stand, fit together."""
    sizes = [(message.role == "tool", count_tokens(piece.text)) for message in messages for piece in message.pieces]
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
    """The largest L with sum(min(size, L)) <= room; 0 where there is no room. All sizes where they fit."""
    for place, size in enumerate(sorted(sizes)):
        share = room // (len(sizes) - place)
        if share < size:
            return max(share, 0)
        room -= size
    return max(sizes, default=0) + max(room, 0)


def _cut(conversation: Conversation, limits: dict[Message, int]) -> Conversation:
    return tuple(
        message._replace(pieces=tuple(cut_piece(piece, limits[message]) for piece in message.pieces))
        for message in conversation
    )


def cut_piece(piece: Piece, max_tokens: int) -> Piece:
    """The piece with at most `max_tokens` of its text: both ends, and the number of characters between them."""
    if count_tokens(piece.text) <= max_tokens:
        return piece
    size = len(piece.text) if piece.text.isascii() else len(piece.text.encode())
    kept = int(len(piece.text) * max_tokens * BYTES_PER_TOKEN / size)  # characters, at this text's bytes a character
    head = round(kept * _HEAD_SHARE)
    tail = kept - head
    return Piece(
        piece.kind,
        piece.text[:head],
        omitted=len(piece.text) - kept,
        tail=piece.text[len(piece.text) - tail :],
    )
