"""Records one attempt's calls in memory as a prefix tree of turns and a tree of messages; and matches retries to calls.

Tokens are recorded exactly as the engine received and sampled them, never re-rendered from text. A turn's parent is the
earlier turn whose sequence shares the most tokens with the turn's prompt:

    the prompt continues the whole sequence        kept = sequence length; continues the conversation
    the prompt differs at some token               kept = number of tokens before this token; a branch
    the prompt shares no token with any turn       parent None; a new tree

An SDK repeats a call after a timeout, and the rollout never sees the first call's reply. Of several equal calls, such
as the samples of a best-of-n, a retry (`Request.num_retries`) replaces the most likely one:

    a call that failed or whose client left      the SDK gave up for this reason
    else the oldest call in flight               it is the first to time out
    else the latest answered call                its answer came too late
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
MAX_CALLS = 1000  # number of different calls remembered for a rollout; an SDK retries within seconds
MAX_EQUAL = 128  # maximum number of equal calls to remember; equals the maximum number of choices per call
State = Literal["in flight", "lost", "answered"]


class _Conversation(msgspec.Struct):
    """Messages as the client sent them, the last reply included."""

    messages: list[Json]
    identity: list[tuple[object, ...]]  # per message: the fields that clients preserve when they send the message back
    text: str | None = None  # for plain completions: the last prompt and its completion
    is_abandoned: bool = False  # the rollout never saw the last reply


class Recorded(NamedTuple):
    """A call's turns, and the conversations that end in its replies."""

    turns: range
    conversations: list[_Conversation]


class Recorder:
    """Example: two calls. The second call's prompt contains the first call's reply.

    turns     [Turn(parent=None, kept=0, ...), Turn(parent=0, kept=<all of turn 0>, ...)]
    messages  the second call's messages and reply; branches is empty
    """

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.spans: list[tuple[float, float]] = []  # per turn: (call time, answer time), monotonic
        self.tools: list[Json] = []  # distinct tools offered by any call
        self.num_calls = 0  # answered calls, and calls whose client left early
        self.num_cancelled = 0  # calls that the rollout left before their end
        self.num_abandoned = 0  # answered calls that the rollout had given up on and made again
        # (prompt, completion) token counts from endpoints that return no token ids
        self.usage: tuple[int, int] | None = None
        # turn_limit or context_length_exceeded if the latest call was refused for this reason
        self.limit: str | None = None
        self.used_foreign_key = False  # the attempt's program made a call with another attempt's key
        self.upstream_error: str | None = None  # why the engine could not answer the latest call
        self._arguments: dict[str, str] = {}  # tool call id -> arguments as sampled
        self._texts: dict[str, str] = {}  # id of a reply's first tool call -> text of the reply
        self._sequences: list[bytes] = []  # [turn] packed token ids, prompt and sampled
        self._conversations: list[_Conversation] = []  # the current conversation is last

    @property
    def messages(self) -> list[Json]:
        """The conversation that the last call belongs to."""
        current = self._current()
        return current.messages if current else []

    @property
    def branches(self) -> list[list[Json]]:
        """All other conversations, except for conversations that end in a reply that the rollout never saw."""
        current = self._current()
        return [c.messages for c in self._conversations if c is not current and not c.is_abandoned]

    def _current(self) -> _Conversation | None:
        seen = [conversation for conversation in self._conversations if not conversation.is_abandoned]
        candidates = seen or self._conversations
        return candidates[-1] if candidates else None

    def as_sampled(self, request: Request) -> Request:
        """Restores the sampled form of earlier replies with tool calls.

        Some clients parse arguments and serialize them again, which changes spaces and key order. Others drop text that
        is only white space, or strip the text. Without this step the prompt would not continue the sampled tokens.
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
        """Records an answered call: a turn (if the reply has tokens) and a conversation per choice."""
        self.num_calls += 1
        self.upstream_error = None
        if reply.usage is not None and not reply.prompt_ids:
            before = self.usage or (0, 0)
            self.usage = before[0] + reply.usage[0], before[1] + reply.usage[1]
        self.tools += [tool for tool in request.tools if tool not in self.tools]
        num_before = len(self.turns)
        for choice in reply.choices:
            # Endpoints may omit ids or send other types of calls.
            message = choice.message or {}
            calls = message.get("tool_calls") or []
            for call in calls:
                if isinstance(id := call.get("id"), str) and (function := call.get("function")):
                    self._arguments[id] = function.get("arguments") or ""
            if calls and isinstance(first := calls[0].get("id"), str):
                self._texts[first] = text_of(message.get("content"))
            if reply.prompt_ids and choice.token_ids and len(choice.logprobs) == len(choice.token_ids):
                self._add_turn(request, reply, choice)
        # reversed because most clients continue with choice 0, and the current conversation is last
        conversations = [self._add_conversation(request, choice) for choice in reversed(reply.choices)]
        return Recorded(range(num_before, len(self.turns)), conversations)

    def leave(self, request: Request, reply: Reply | None) -> Recorded | None:
        """Records a call whose client left early. `reply` is the streamed part, if any."""
        self.num_cancelled += 1
        if reply is None:
            self.num_calls += 1
            return None
        return self.record(request, reply)

    def abandon(self, recorded: Recorded) -> None:
        """Marks a call that the rollout gave up on. The call still counts if a later prompt continues it."""
        self.num_abandoned += 1
        for index in recorded.turns:
            self.turns[index] = msgspec.structs.replace(self.turns[index], is_abandoned=True)
        for conversation in recorded.conversations:
            conversation.is_abandoned = True

    def metrics(self) -> dict[str, float]:
        """Returns counts for metrics: calls, calls left early, abandoned calls, branches, sampled tokens.

        Token counts reported by the endpoint are added if it returns no token ids. num_branches is the number of leaves
        in the token tree minus one, without abandoned leaves; 0 if every prompt continued the previous turn.
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
        whole = prompt + array("I", choice.token_ids).tobytes()
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
        self._sequences.append(whole)

    def _find_parent(self, prompt: bytes) -> tuple[int | None, int]:
        """Returns the latest turn with the longest prefix in common with `prompt`, and its length, or (None, 0)."""
        parent, kept = None, 0
        for index in reversed(range(len(self._sequences))):
            if self._sequences[index].startswith(prompt[: (kept + 1) * _WIDTH]):  # most differ in the first token
                common = common_prefix(prompt, self._sequences[index])
                if common > kept:
                    parent, kept = index, common
        return parent, kept

    # --- messages -----------------------------------------------------------------------------------------------------

    def _add_conversation(self, request: Request, choice: Choice) -> _Conversation:
        """Adds the call's conversation and drops the longest conversation that it extends."""
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
        if extended:  # if an abandoned reply equals the retry's reply, extend the retry's conversation
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
    return len(start) <= len(whole) and (not start or whole[0] == start[0]) and whole[: len(start)] == start


def common_prefix(first: bytes, second: bytes) -> int:
    """Returns the number of tokens that two packed sequences share at their beginning, by bisection."""
    low, high = 0, min(len(first), len(second)) // _WIDTH
    if first[: high * _WIDTH] == second[: high * _WIDTH]:
        return high
    while high - low > 1:  # invariant: the first `low` tokens agree, the first `high` tokens differ
        middle = (low + high) // 2
        part = slice(low * _WIDTH, middle * _WIDTH)
        low, high = (middle, high) if first[part] == second[part] else (low, middle)
    return low


class Attempted:
    def __init__(self) -> None:
        self.state: State = "in flight"
        self.recorded: Recorded | None = None  # its turns and conversations, once they are recorded
        self.is_counted = False  # whether the call is over and counts in `num_calls`
        self.is_abandoned = False

    def end(self) -> None:
        """Ends a call. A call without an answer is lost."""
        if self.state == "in flight":
            self.state = "lost"


class Retries:
    """An attempt's calls that a retry may replace."""

    def __init__(self) -> None:
        # (digest, number of retries) -> equal calls, oldest first
        self._calls: dict[tuple[bytes, int], deque[Attempted]] = {}

    def add(self, request: Request) -> Attempted:
        attempted = Attempted()
        if request.digest:
            equal = self._calls.setdefault((request.digest, request.num_retries), deque(maxlen=MAX_EQUAL))
            equal.append(attempted)
            if len(self._calls) > MAX_CALLS:
                del self._calls[next(iter(self._calls))]
        return attempted

    def replaced(self, request: Request) -> Attempted | None:
        """Returns and forgets the call that this request retries, if any."""
        equal = self._calls.get((request.digest, request.num_retries - 1))
        if not equal:
            return None
        lost = [call for call in equal if call.state == "lost"]
        waiting = [call for call in equal if call.state == "in flight"]
        replaced = (lost or waiting or [equal[-1]])[0]
        equal.remove(replaced)
        return replaced
