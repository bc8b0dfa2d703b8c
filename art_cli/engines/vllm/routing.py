"""Router: which of several servers answers a call. Calls whose prompts begin alike go to the same one.

A server computes a prompt's beginning once and keeps it in its prefix cache. So the attempts of a group stay together,
and so do the calls of a conversation that no group is known of, as those to `art serve`.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping

import msgspec

from art_cli.chat.requests import Request

MAX_HOMES = 10_000  # number of groups and conversations remembered; the one that called longest ago is forgotten first
NUM_TOKENS = 256  # number of tokens, or four times as many characters, that count as a plain prompt's beginning
SPILL_CALLS, SPILL_FACTOR = 8, 2  # see `Router.choose`


class Router:
    """Servers are numbered from 0. Each group or conversation has a home, the server that answered it last."""

    def __init__(self, num_servers: int) -> None:
        self._homes: OrderedDict[str, int] = OrderedDict()
        self._num_homes = [0] * num_servers

    def choose(self, request: Request, in_flight: Mapping[int, int]) -> int:
        """The server for the request. `in_flight` has the number of calls of each server that can answer now.

        That is the request's home. Without one it is the server with the fewest calls, which becomes the home. Calls
        without a group may all begin alike, so one of them goes elsewhere when its home has SPILL_CALLS more calls
        than SPILL_FACTOR times the fewest.
        """
        key = key_of(request)
        home = self._homes.get(key)
        least = min(in_flight, key=lambda server: (in_flight[server], self._num_homes[server]))
        if home is not None and home in in_flight:
            self._homes.move_to_end(key)
            is_crowded = in_flight[home] >= SPILL_CALLS + SPILL_FACTOR * in_flight[least]
            return least if is_crowded and request.group is None else home
        self._forget(key)
        self._homes[key] = least
        self._num_homes[least] += 1
        if len(self._homes) > MAX_HOMES:
            self._forget(next(iter(self._homes)))
        return least

    def _forget(self, key: str) -> None:
        if (home := self._homes.pop(key, None)) is not None:
            self._num_homes[home] -= 1


def key_of(request: Request) -> str:
    """The group or conversation of a request, else a digest of how its prompt begins: up to the first user message."""
    if request.group is not None:
        return f"group {request.group}"
    if request.conversation is not None:
        return f"conversation {request.conversation}"
    begin = hashlib.blake2b(msgspec.json.encode([_beginning(request), request.tools]), digest_size=16)
    return begin.hexdigest()


def _beginning(request: Request) -> object:
    if isinstance(request.prompt, str):
        return request.prompt[: 4 * NUM_TOKENS]
    if request.messages is None:
        return (request.prompt or [])[:NUM_TOKENS]
    first = next((n for n, message in enumerate(request.messages) if message.get("role") == "user"), 0)
    return request.messages[: first + 1]
