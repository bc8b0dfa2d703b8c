"""ModelCall: one call of a rollout, with the messages around it, the tools that it called and the turn with its tokens.

A trajectory keeps conversations and turns apart. A reply belongs to a turn where their numbers leave no doubt: in one
conversation the last replies are those of the turns, in order. With several conversations each must have a path of
turns of that length. Where there is a doubt, the call has no turn, rather than another call's tokens.

A trajectory has one time and one duration. The calls share it by their sampled tokens, so that their order is right and
their lengths are an estimate.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from art_cli.chat.requests import text_of
from art_cli.runs.trajectory import Json, Trajectory, Turn


class ToolUse(NamedTuple):
    """One tool call of a reply. Example: ToolUse("call_1", "search", '{"query": "x"}', "2 mails")"""

    id: str
    name: str
    arguments: str  # the model wrote them, so they need not be JSON
    result: str | None  # if the conversation has an answer to it


class ModelCall(NamedTuple):
    """The reply at `place` of a conversation."""

    conversation: Sequence[Json]
    place: int
    turn: Turn | None  # with its tokens, if it is known which turn has them
    number: int | None  # index of the turn in the trajectory
    begin: float  # seconds since the epoch, estimated
    end: float

    @property
    def reply(self) -> Json:
        return self.conversation[self.place]

    @property
    def num_prompt(self) -> int | None:
        """Tokens of the whole prompt, or None if that is unknown."""
        return None if self.turn is None else self.turn.kept + len(self.turn.prompt_ids)

    @property
    def tools(self) -> list[ToolUse]:
        results: dict[str, str] = {}
        for message in _until_reply(self.conversation, self.place + 1):
            if message.get("role") == "tool":
                results.setdefault(str(message.get("tool_call_id")), text_of(message.get("content")))
        return [tool._replace(result=results.get(tool.id)) for tool in tool_uses(self.reply)]


def tool_uses(message: Json) -> list[ToolUse]:
    """Returns the tool calls of a message, without their results."""
    found = []
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            arguments = function.get("arguments")
            text = arguments if isinstance(arguments, str) else ""
            found.append(ToolUse(str(call.get("id")), str(function.get("name")), text, None))
    return found


def calls_of(trajectory: Trajectory) -> list[ModelCall]:
    """Returns every model call, in the order of time as far as it is known; empty without messages."""
    conversations = [*trajectory.branches, trajectory.messages]
    replies = [_replies(conversation) for conversation in conversations]
    found: list[tuple[int, int, int | None]] = []  # (conversation, place, index of the turn)
    seen: set[int] = set()
    for number, turns in enumerate(_turns(trajectory, [len(places) for places in replies])):
        places = replies[number]
        if turns is not None:  # replies before the first turn's are examples in the prompt
            places = places[len(places) - len(turns) :]
        prefixes = _prefixes(conversations[number])
        for position, place in enumerate(places):
            if prefixes[place] not in seen:  # otherwise another conversation begins with the same call
                seen.add(prefixes[place])
                found.append((number, place, None if turns is None else turns[position]))
    if all(index is not None for _, _, index in found):
        found.sort(key=lambda each: each[2] or 0)
    return _timed(trajectory, conversations, found)


def _timed(
    trajectory: Trajectory, conversations: Sequence[Sequence[Json]], found: Sequence[tuple[int, int, int | None]]
) -> list[ModelCall]:
    weights = [1 + (0 if index is None else len(trajectory.turns[index].sampled_ids)) for _, _, index in found]
    share = max(0.0, trajectory.duration_s) / max(1, sum(weights))
    calls, begin = [], trajectory.started_at
    for (number, place, index), weight in zip(found, weights, strict=True):
        turn = None if index is None else trajectory.turns[index]
        calls.append(ModelCall(conversations[number], place, turn, index, begin, begin + share * weight))
        begin = calls[-1].end
    return calls


def _turns(trajectory: Trajectory, num_replies: Sequence[int]) -> list[list[int] | None]:
    """Returns the indexes of the turns of each conversation's last replies, or None if that is not known."""
    seen = [index for index, turn in enumerate(trajectory.turns) if not turn.is_abandoned]
    if len(num_replies) == 1:
        return [seen if seen and len(seen) <= num_replies[0] else None]
    paths = {len(path): path for path in _paths(trajectory.turns, seen)}
    lengths = [num for num in num_replies if num in paths]
    if not len(paths) == len(lengths) == len(set(lengths)) == len(num_replies):
        return [None] * len(num_replies)
    return [paths[num] for num in num_replies]


def _paths(turns: Sequence[Turn], seen: Sequence[int]) -> Iterator[list[int]]:
    """Yields the turns from a first one to each last one that no other turn goes on from."""
    inner = {turns[index].parent for index in seen}
    for leaf in seen:
        if leaf not in inner:
            path: list[int] = [leaf]
            while (parent := turns[path[-1]].parent) is not None:
                path.append(parent)
            yield path[::-1]


def _replies(conversation: Sequence[Json]) -> list[int]:
    return [place for place, message in enumerate(conversation) if message.get("role") == "assistant"]


def _prefixes(conversation: Sequence[Json]) -> list[int]:
    """Returns a hash of the conversation up to each message, that message included."""
    hashes, before = [], 0
    for message in conversation:
        before = hash((before, repr(message)))
        hashes.append(before)
    return hashes


def _until_reply(conversation: Sequence[Json], start: int) -> Iterator[Json]:
    for place in range(start, len(conversation)):
        if conversation[place].get("role") == "assistant":
            return
        yield conversation[place]
