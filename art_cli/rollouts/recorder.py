"""One rollout's calls as a prefix tree of turns and a tree of messages, in memory; and the call that a retry replaces.

Tokens are recorded as the engine was given them and as it sampled them, never rendered again from text. The parent of
a turn is the earlier turn whose sequence shares the most tokens with its prompt:

    the prompt continues the whole sequence        kept = its length; the conversation goes on
    the prompt differs from it at some token       kept = the tokens before that one; a branch
    the prompt shares no token with any            parent None; a new tree

An SDK that gives up on a call sends it again, and counts in a header how many times it has (`Request.num_retries`). The
first call may have been answered all the same, with a reply that the rollout never saw. Where several calls are equal,
such as the samples of a best-of-n, each retry replaces the likeliest one:

    one that failed or whose client left         the SDK gave up for that reason
    else the oldest that is still in flight      it is the first to time out
    else the one that was answered last          its answer came too late
"""

from array import array
from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from art_cli.chat.replies import Choice, Reply, are_same
from art_cli.chat.requests import Request, Sampling, text_of
from art_cli.runs.trajectory import Json, Turn

_WIDTH = array("I").itemsize  # bytes per token id in a packed sequence


class _Conversation(msgspec.Struct):
    """Messages as the client sent them, the last reply included."""

    messages: list[Json]
    identity: list[tuple[object, ...]]  # per message: the fields that a client keeps when it sends the message back
    text: str | None = None  # plain completions: the last prompt and what was sampled after it
    is_abandoned: bool = False  # the rollout never saw the last reply


class Recorded(NamedTuple):
    """The turns of one call, and the conversations that end in its replies."""

    turns: range
    conversations: list[_Conversation]


class Recorder:
    """Example: two calls, the second with the first one's reply in its prompt.

    turns     [Turn(parent=None, kept=0, ...), Turn(parent=0, kept=<all of turn 0>, ...)]
    messages  the second call's messages and its reply; branches is empty
    """

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.spans: list[tuple[float, float]] = []  # of each turn, when its call came and was answered (monotonic)
        self.tools: list[Json] = []  # every tool that a call offered, once
        self.num_calls = 0  # calls that were answered, and calls that the rollout left before their end
        self.num_cancelled = 0  # calls that the rollout left before their end
        self.num_abandoned = 0  # answered calls that the rollout had given up on and made again
        self.usage: tuple[int, int] | None = None  # (prompt, completion) tokens that an endpoint counted without ids
        self.limit: str | None = None  # turn_limit or context_length_exceeded, where the latest call was refused for it
        self.used_foreign_key = False  # its program made a call with the key of another rollout
        self.upstream_error: str | None = None  # why the engine failed to answer the latest call
        self._arguments: dict[str, str] = {}  # id of a tool call in a reply -> its arguments as they were sampled
        self._texts: dict[str, str] = {}  # id of a reply's first tool call -> the reply's text
        self._sequences: list[bytes] = []  # [turn] packed token ids, prompt and sampled
        self._conversations: list[_Conversation] = []  # the last one is the current one

    @property
    def messages(self) -> list[Json]:
        """The conversation that the last call belongs to."""
        current = self._current()
        return current.messages if current else []

    @property
    def branches(self) -> list[list[Json]]:
        """The other conversations, each whole, without those that end in a reply that the rollout never saw."""
        current = self._current()
        return [c.messages for c in self._conversations if c is not current and not c.is_abandoned]

    def _current(self) -> _Conversation | None:
        seen = [conversation for conversation in self._conversations if not conversation.is_abandoned]
        candidates = seen or self._conversations
        return candidates[-1] if candidates else None

    def as_sampled(self, request: Request) -> Request:
        """Returns the request with earlier replies that call tools written as they were sampled.

        A client that parses arguments and writes them again changes spaces and the order of keys. Another drops a text
        that is only white space, or white space around the text. Its prompt would not continue the sampled tokens,
        although the client sends the same.
        """
        if not self._arguments or not request.messages:
            return request
        return msgspec.structs.replace(request, messages=[self._message_as_sampled(sent) for sent in request.messages])

    def _message_as_sampled(self, message: Json) -> Json:
        calls = message.get("tool_calls") or []
        if not calls:
            return message
        text = text_of(message.get("content"))
        sampled = self._texts.get(calls[0].get("id") or "", text)
        has_lost_space = sampled != text and sampled.strip() == text.strip()
        changed = {"content": sampled} if has_lost_space else {}
        return {**message, **changed, "tool_calls": [self._call_as_sampled(call) for call in calls]}

    def _call_as_sampled(self, call: Json) -> Json:
        function = call["function"]
        sampled = self._arguments.get(call.get("id") or "")
        if sampled is None or sampled == function["arguments"] or not are_same(sampled, function["arguments"]):
            return call
        return {**call, "function": {**function, "arguments": sampled}}

    def record(self, request: Request, reply: Reply) -> Recorded:
        """Adds one answered call: a turn and a conversation per choice.

        A reply without token ids or logprobs, as foreign endpoints give it, adds messages and no turn.
        """
        self.num_calls += 1
        self.upstream_error = None
        if reply.usage is not None and not reply.prompt_ids:
            before = self.usage or (0, 0)
            self.usage = before[0] + reply.usage[0], before[1] + reply.usage[1]
        self.tools += [tool for tool in request.tools if tool not in self.tools]
        num_before = len(self.turns)
        for choice in reply.choices:
            self._keep_calls(choice.message or {})
            if reply.prompt_ids and choice.token_ids and len(choice.logprobs) == len(choice.token_ids):
                self._add_turn(request, reply, choice)
        # reversed, because most clients go on with the first choice, and the last conversation is the current one
        conversations = [self._add_conversation(request, choice) for choice in reversed(reply.choices)]
        return Recorded(range(num_before, len(self.turns)), conversations)

    def _keep_calls(self, message: Json) -> None:
        """Keeps how a reply with calls was sampled. An endpoint may give calls without an id or of another kind."""
        calls = message.get("tool_calls") or []
        for call in calls:
            if isinstance(id := call.get("id"), str) and (function := call.get("function")):
                self._arguments[id] = function.get("arguments") or ""
        if calls and isinstance(first := calls[0].get("id"), str):
            self._texts[first] = text_of(message.get("content"))

    def leave(self, request: Request, reply: Reply | None) -> Recorded | None:
        """Adds a call that the rollout left before its end. `reply` is the streamed part; None where nothing was."""
        self.num_cancelled += 1
        if reply is None:
            self.num_calls += 1
            return None
        return self.record(request, reply)

    def abandon(self, recorded: Recorded) -> None:
        """Marks a call that the rollout gave up on. It still counts where a later prompt continues it."""
        self.num_abandoned += 1
        for index in recorded.turns:
            self.turns[index] = msgspec.structs.replace(self.turns[index], is_abandoned=True)
        for conversation in recorded.conversations:
            conversation.is_abandoned = True

    def fail(self, error: str) -> None:
        """Notes that the engine failed to answer a call."""
        self.upstream_error = error

    def metrics(self) -> dict[str, float]:
        """Counts of the rollout: calls, calls that it left, calls that it gave up on, branches, sampled tokens.

        Where an endpoint gave no token ids, its own counts of tokens are added.

        num_branches is the number of leaves of the token tree, less one. It is 0 where every prompt continued the turn
        before. Abandoned leaves are not counted.
        """
        continued = {
            turn.parent
            for turn in self.turns
            if turn.parent is not None and turn.kept * _WIDTH == len(self._sequences[turn.parent])
        }
        abandoned = {index for index, turn in enumerate(self.turns) if turn.is_abandoned} - continued
        counted = {} if self.usage is None else dict(zip(("num_prompt", "num_completion"), self.usage, strict=True))
        return {
            "num_turns": self.num_calls,
            "num_cancelled": self.num_cancelled,
            "num_abandoned": self.num_abandoned,
            "num_branches": max(0, len(self.turns) - len(continued) - len(abandoned) - 1),
            "num_sampled": sum(len(turn.sampled_ids) for turn in self.turns),
            **counted,
        }

    # --- tokens -------------------------------------------------------------------------------------------------------

    def _add_turn(self, request: Request, reply: Reply, choice: Choice) -> None:
        sampling: Sampling = reply.sampling or request.sampling
        prompt = array("I", reply.prompt_ids).tobytes()
        parent, kept = self._find_parent(prompt)
        self.turns.append(
            Turn(
                parent=parent,
                kept=kept,
                prompt_ids=reply.prompt_ids[kept:],
                sampled_ids=choice.token_ids,
                logprobs=choice.logprobs,
                raw_logprobs=choice.raw_logprobs,
                step=reply.step,
                policy=reply.policy,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                finish_reason=choice.finish_reason,
                is_masked=choice.is_masked or bool(sampling.reshaping),
                asked=request.overridden or None,
                state=request.state,
            )
        )
        self._sequences.append(prompt + array("I", choice.token_ids).tobytes())

    def _find_parent(self, prompt: bytes) -> tuple[int | None, int]:
        """Returns the latest turn that shares the most tokens with `prompt`, and their number, or (None, 0)."""
        parent, kept = None, 0
        for index in reversed(range(len(self._sequences))):
            if len(self._sequences[index]) > kept * _WIDTH:
                common = common_prefix(prompt, self._sequences[index])
                if common > kept:
                    parent, kept = index, common
        return parent, kept

    # --- messages -----------------------------------------------------------------------------------------------------

    def _add_conversation(self, request: Request, choice: Choice) -> _Conversation:
        """Adds the call's conversation, which replaces the longest one that it continues."""
        if request.messages is None:
            return self._add_text(request.prompt, choice.text)
        message = choice.message or {"role": "assistant", "content": choice.text}
        identity = [identity_of(sent) for sent in request.messages]
        extended = [c for c in self._conversations if c.text is None and _begins_with(identity, c.identity)]
        return self._replace(extended, _Conversation([*request.messages, message], [*identity, identity_of(message)]))

    def _add_text(self, prompt: str | list[int] | None, sampled: str) -> _Conversation:
        """Adds a plain completion as a conversation. New text of the prompt is the user's; token ids have no text."""
        text = prompt if isinstance(prompt, str) else ""
        extended = [c for c in self._conversations if c.text and text.startswith(c.text)]
        before = max(extended, key=lambda c: len(c.messages), default=_Conversation([], [], ""))
        added = [{"role": "user", "content": text.removeprefix(before.text or "")}] if text != before.text else []
        messages = [*before.messages, *added, {"role": "assistant", "content": sampled}]
        return self._replace(extended, _Conversation(messages, [], text + sampled))

    def _replace(self, extended: Sequence[_Conversation], new: _Conversation) -> _Conversation:
        if extended:  # where a lost reply and the retry's are equal, it goes on from the retry's
            longest = max(extended, key=lambda c: (len(c.messages), not c.is_abandoned))
            self._conversations = [c for c in self._conversations if c is not longest]
            longest.messages, longest.identity = [], []  # its call is remembered, and would keep another whole history
        self._conversations.append(new)
        return new


def identity_of(message: Json) -> tuple[object, ...]:
    """Returns the fields in which two messages are compared."""
    functions = [call.get("function") or {} for call in message.get("tool_calls") or []]
    calls = tuple((function.get("name"), function.get("arguments")) for function in functions)
    return message.get("role"), text_of(message.get("content")), message.get("tool_call_id"), calls


def _begins_with(whole: list[tuple[object, ...]], start: list[tuple[object, ...]]) -> bool:
    return len(start) <= len(whole) and whole[: len(start)] == start


def common_prefix(first: bytes, second: bytes) -> int:
    """Returns the number of tokens that two packed sequences share at their beginning, by bisection."""
    low, high = 0, min(len(first), len(second)) // _WIDTH
    if first[: high * _WIDTH] == second[: high * _WIDTH]:
        return high
    while high - low > 1:  # the first `low` tokens agree, the first `high` do not
        middle = (low + high) // 2
        part = slice(low * _WIDTH, middle * _WIDTH)
        low, high = (middle, high) if first[part] == second[part] else (low, middle)
    return low


MAX_CALLS = 1000  # number of different calls remembered for a rollout; an SDK retries within seconds
MAX_EQUAL = 128  # number of equal calls remembered, as many as one call may have choices

State = Literal["in flight", "lost", "answered"]


class Attempted:
    """One call and what came of it so far."""

    def __init__(self) -> None:
        self.state: State = "in flight"
        self.recorded: Recorded | None = None  # its turns and conversations, once they are recorded
        self.is_counted = False  # whether it has ended and counts in `num_calls`
        self.is_abandoned = False

    def end(self) -> None:
        """Records the end of a call. Without an answer it is lost."""
        if self.state == "in flight":
            self.state = "lost"


class Retries:
    """The calls of one rollout that a retry may replace."""

    def __init__(self) -> None:
        self._calls: dict[
            tuple[bytes, int], deque[Attempted]
        ] = {}  # digest and number of retries -> equal calls, oldest first

    def add(self, request: Request) -> Attempted:
        attempted = Attempted()
        if request.digest:
            equal = self._calls.setdefault((request.digest, request.num_retries), deque(maxlen=MAX_EQUAL))
            equal.append(attempted)
            if len(self._calls) > MAX_CALLS:
                del self._calls[next(iter(self._calls))]
        return attempted

    def replaced(self, request: Request) -> Attempted | None:
        """Returns the call that this one replaces, or None if it is no retry of a known one. It is replaced once."""
        equal = self._calls.get((request.digest, request.num_retries - 1))
        if not equal:
            return None
        lost = [call for call in equal if call.state == "lost"]
        waiting = [call for call in equal if call.state == "in flight"]
        replaced = (lost or waiting or [equal[-1]])[0]
        equal.remove(replaced)
        return replaced
