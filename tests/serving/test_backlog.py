"""Backlog: pieces that wait for a slow reader are put together, and what they say stays the same."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from itertools import chain, zip_longest
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from art_cli.chat.chat_errors import ChatError
from art_cli.chat.replies import Choice, Chunk, ReplyBuilder
from art_cli.chat.requests import Request, Sampling
from art_cli.serving.backlog import Backlog, join, read_ahead
from tests.support.standins.scripted import ScriptedBackend, tool_call

USER = {"role": "user", "content": "hi"}
CALLS = {"role": "assistant", "content": None, "tool_calls": [tool_call(n, a=1)["tool_calls"][0] for n in ("f", "g")]}


def request(n: int = 1) -> Request:
    return Request(model="policy", messages=[USER], sampling=Sampling(n=n), wants_logprobs=True, top_logprobs=1)


def built(chunks: list[Chunk], n: int) -> Any:
    builder = ReplyBuilder(request(n))
    for chunk in chunks:
        builder.add(chunk)
    assert builder.is_complete
    return builder.reply()


def text(letter: str) -> Chunk:
    choice = Choice(index=0, message={"content": letter}, text=letter, token_ids=[1], logprobs=[-0.5])
    return Chunk(id="x", created=1, model="policy", choice=choice)


@settings(max_examples=60)
@given(
    st.text(max_size=8) | st.just(tool_call("add", a=1)), st.integers(1, 3), st.lists(st.integers(0, 30), max_size=6)
)
async def test_joined_chunks_say_what_the_chunks_say(answer: Any, n: int, cuts: list[int]) -> None:
    """Property: for any answer, any order of choices, and any moments at which the reader takes the waiting chunks."""
    chunks = [chunk async for chunk in ScriptedBackend(lambda _: answer).stream(request(n))]
    of_choice = [[chunk for chunk in chunks if chunk.choice.index == index] for index in range(n)]
    for pieces in of_choice:
        pieces[0].choice.is_masked, pieces[-1].choice.stop_string = True, "#"
    mixed = [chunk for chunk in chain(*zip_longest(*of_choice)) if chunk is not None]
    places = sorted({0, len(mixed), *(min(cut, len(mixed)) for cut in cuts)})
    taken = [chunk for start, end in zip(places, places[1:], strict=False) for chunk in join(mixed[start:end])]
    assert built(taken, n) == built(mixed, n)
    if isinstance(answer, str):
        assert len(join(mixed)) == n


def test_two_calls_are_never_in_one_delta() -> None:
    """Clients that get a call's two pieces in one list take them for two calls."""
    piece = Chunk(id="x", created=1, model="policy", choice=Choice(index=0, message={"tool_calls": [{"index": 0}]}))
    assert join([text("a"), text("b"), piece, piece, text("c")]) == [
        *join([text("a"), text("b")]),
        piece,
        piece,
        text("c"),
    ]


def test_the_end_of_an_answer_is_not_lost_in_the_counts_behind_it() -> None:
    last = Chunk(id="x", created=1, model="m", choice=Choice(index=0, text="a", finish_reason="length"), is_last=True)
    counts = Chunk(id="x", created=1, model="m", choice=Choice(index=0), usage=(3, 1))
    assert [chunk.is_last for chunk in join([last, counts])] == [True, False]


@pytest.mark.slow
async def test_what_waits_takes_little_room() -> None:
    """100,000 chunks that no client takes wait as a few, and come out as one."""
    backlog = Backlog()
    for number in range(100_000):
        backlog.add(text(str(number % 10)))
        assert len(backlog._chunks) <= 66
    (chunk,) = await backlog.take()
    assert chunk.choice.text == "0123456789" * 10_000
    assert len(chunk.choice.token_ids) == len(chunk.choice.logprobs) == 100_000


class Source:
    """Gives `letters` without waiting, then fails, or waits for ever."""

    def __init__(self, letters: str, failure: Exception | None = None) -> None:
        self.letters, self.failure = letters, failure
        self.is_closed = False

    async def __aiter__(self) -> AsyncGenerator[Chunk]:
        try:
            for letter in self.letters:
                yield text(letter)
            if self.failure is not None:
                raise self.failure
            await asyncio.Event().wait()
        finally:
            self.is_closed = True


async def test_a_failure_comes_after_what_came_before_it() -> None:
    seen = ""
    with pytest.raises(ChatError, match="broken"):
        async for chunk in read_ahead(aiter(Source("abc", ChatError(500, "broken")))):
            seen += chunk.choice.text
    assert seen == "abc"


async def test_who_leaves_early_ends_the_stream() -> None:
    source = Source("abc")
    async with aclosing(read_ahead(aiter(source))) as chunks:
        assert (await anext(chunks)).choice.text == "abc"
        assert not source.is_closed
    assert source.is_closed
