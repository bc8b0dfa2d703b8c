"""textarena: text games for one or more players (github.com/LeonGuertler/TextArena).

The scenario's seed is the game's seed. The policy plays all seats, each in a separate conversation in which the texts
of the game and of other players are user messages. Training uses one seat, `seed % number of seats`, and its reward.
The same policy answers the other seats' calls, but these calls are not recorded, because a trajectory has one reward
and opponents' moves would count with the wrong sign.

Games that download data (nltk word lists), call a model API, or fail to import are refused with the reason. Games use
Python's global random generator, so each game gets a separate generator state and only one game runs at a time.
"""

import contextlib
import inspect
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from art_cli.rollouts.environments import (
    EnvironmentFault,
    Json,
    Listing,
    Settings,
    check_args,
    finite,
    plain_defaults,
    refused,
    seed_of,
    unknown,
    with_tuples,
)
from art_cli.runs.outcome import Outcome
from art_cli.runtime.errors import describe, first_sentence, one_line
from art_cli.runtime.worker_pool import Crowded, Overran, WorkerPool

if TYPE_CHECKING:
    from art_cli.rollouts.policy import Policy

CALL_S = 30.0  # longest time for a game to begin, or to answer a move; PublicGoodsGame can loop for ever
WAIT_S = 600.0  # longest wait for the thread in which games run
MAX_PLAYERS = 15
MAX_ACTION = 4000  # maximum characters of an action; longer replies lose their beginning
INVALID_REWARD = -1.0  # textarena's own for an invalid move
OTHER_VERSIONS = ("-raw", "-train")  # suffixes of ids that vary a game's observations


class TextArena:
    """The library; its names are textarena's ids, such as "TicTacToe-v0"."""

    package, extra = "textarena", "textarena"
    takes_one_turn, makes_scenarios = False, True
    about = "text games for one player or several; the policy plays all seats and is trained on one"

    def listed(self) -> Iterator[Listing]:
        """Returns one for each game, tried out; its other ids are other settings of the same game."""
        games: dict[str, list[str]] = {}
        for name, spec in _registry().items():
            games.setdefault(str(spec.entry_point), []).append(name)
        return (_listed(names) for names in games.values())

    def defaults(self, name: str) -> Json:
        spec = _spec(name)
        try:
            parameters = inspect.signature(_game_class(spec)).parameters.values()
        except Exception as error:  # the boundary to the library: invalid files or missing packages
            raise refused(Settings(f"textarena/{name}"), error) from error
        own = {each.name: None if each.default is each.empty else each.default for each in parameters} | spec.kwargs
        return plain_defaults(own) | {"num_players": None}

    def open(self, name: str, settings: Settings) -> "TextGame":
        check_args(settings, self.defaults(name))
        return TextGame(name, settings)


def _listed(names: list[str]) -> Listing:
    game, also = names[0], f"; also {', '.join(names[1:])}" if names[1:] else ""
    spec = _spec(game)
    try:
        num_players = TextGame(game, Settings(game)).num_players
        about = first_sentence(vars(_game_class(spec)).get("__doc__") or "")  # empty for a placeholder
    except Exception as error:  # the boundary to the library
        python = ".".join(map(str, sys.version_info[:2]))
        words = f"does not parse in Python {python}: " if isinstance(error, SyntaxError) else ""
        return Listing(game, f"a game{also}", words + one_line(error))
    about = f", {about.rstrip('.')}" if about else ""
    return Listing(game, f"{num_players} player{'s' if num_players > 1 else ''}{about}{also}")


def _registry() -> dict[str, Any]:
    """Id -> specification, in the library's order."""
    from textarena.envs.registration import ENV_REGISTRY

    return {name: spec for name, spec in ENV_REGISTRY.items() if not name.endswith(OTHER_VERSIONS)}


def _spec(name: str) -> Any:
    if name not in (known := _registry()):
        raise unknown("rollout.environment.name", f"textarena/{name}", [f"textarena/{each}" for each in known])
    return known[name]


def _game_class(spec: Any) -> Any:
    if not isinstance(spec.entry_point, str):
        return spec.entry_point
    import nltk

    nltk.download = _find_data  # games call it on import
    module, _, name = spec.entry_point.partition(":")
    return getattr(import_module(module), name)


def _find_data(names: str | list[str], **_: Any) -> bool:
    """Raises LookupError if nltk's data is not installed."""
    import nltk

    for name in [names] if isinstance(names, str) else names:
        places = [f"{kind}/{name}{ending}" for kind in ("corpora", "taggers", "tokenizers") for ending in ("", ".zip")]
        if not any(_is_found(nltk.data.find, place) for place in places):
            raise LookupError(f"needs nltk's data {name!r}: python -m nltk.downloader {name}")
    return True


def _is_found(find: Callable[[str], Any], place: str) -> bool:
    with contextlib.suppress(LookupError):
        find(place)
        return True
    return False


class _View(NamedTuple):
    """The next move: its seat and observation. `is_done` means that the game is over."""

    is_done: bool
    seat: int
    said: str


class _Ending(NamedTuple):
    rewards: dict[int, float]
    reason: str
    was_invalid: bool  # the trained seat ended the game by an invalid move


class TextGame:
    """A game with its arguments. It can be played many times."""

    def __init__(self, name: str, settings: Settings) -> None:
        spec = _spec(name)
        args = dict(settings.args)
        wanted = args.pop("num_players", None)
        self._name, self._system = name, settings.system or ""
        self._make = partial(_make, spec, with_tuples(args, spec.kwargs))
        self._begin, self.num_players = _try_players(self._make, wanted)
        self._workers = WorkerPool(size=1, wait_s=WAIT_S, run_s=CALL_S)

    async def play(self, policy: "Policy", scenario: Json) -> Outcome:
        seed = seed_of(scenario)
        own, talks = seed % self.num_players, _Talks(policy, self._system)
        match = await self._call(_Match, self._make, self._begin, seed)
        view = await self._call(match.look)
        while not view.is_done:
            action = await talks.reply(view.seat, view.said, is_recorded=view.seat == own)
            view = await self._call(match.move, action)
        ending = await self._call(match.end, own)
        reward = ending.rewards[own]
        is_won = reward >= 1 if len(ending.rewards) == 1 else reward > min(ending.rewards.values())
        is_won = is_won and reward == max(ending.rewards.values())
        return Outcome(
            reward=reward,
            metrics={"won": is_won, "invalid_move": ending.was_invalid, "moves": talks.num_replies(own)},
            metadata={"seat": own, "rewards": list(ending.rewards.values()), "reason": ending.reason},
        )

    async def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return await self._workers.call(function, *arguments)
        except (Overran, Crowded) as error:
            raise EnvironmentFault(f"textarena/{self._name}: it did not answer within {CALL_S:.0f} s") from error
        except Exception as error:  # the boundary to the game
            raise EnvironmentFault(f"textarena/{self._name}: it raised {describe(error)}") from error


class _Talks:
    """Each seat's conversation with the policy."""

    def __init__(self, policy: "Policy", system: str) -> None:
        self._policy = policy
        self._first = [{"role": "system", "content": system}] if system else []
        self._messages: dict[int, list[Json]] = {}

    async def reply(self, seat: int, said: str, *, is_recorded: bool) -> str:
        """Returns the seat's next action, without the policy's thoughts."""
        messages: Any = self._messages.setdefault(seat, list(self._first))
        messages.append({"role": "user", "content": said})
        answered = await self._policy.client.chat.completions.create(
            model=self._policy.model,
            messages=messages,
            extra_headers={} if is_recorded else self._policy.unrecorded,
        )
        text = answered.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": text})
        return text.rpartition("</think>")[2].strip()[-MAX_ACTION:]

    def num_replies(self, seat: int) -> int:
        return sum(message["role"] == "assistant" for message in self._messages.get(seat, []))


class _Match:
    """One game being played. Its methods run in the pool's thread, one at a time."""

    def __init__(self, make: Callable[[], Any], num_players: int, seed: int) -> None:
        self._state = random.Random(seed).getstate()
        self._numbers = None if (numpy := sys.modules.get("numpy")) is None else numpy.random.RandomState(seed % 2**32)
        with self._own_numbers():
            self._env = make()
            self._env.reset(num_players=num_players, seed=seed)
        # some games ignore the requested number
        self.num_seats = int(getattr(self._env.state, "num_players", num_players))
        self.is_for_one = type(self._env.state).__name__ == "SinglePlayerState"

    @contextlib.contextmanager
    def _own_numbers(self) -> Iterator[None]:
        """Puts this game's states into the global generators meanwhile."""
        outside, random_state = random.getstate(), self._state
        random.setstate(random_state)
        numpy = sys.modules.get("numpy") if self._numbers is not None else None
        numbers = numpy.random.get_state() if numpy is not None else None
        if numpy is not None and self._numbers is not None:
            numpy.random.set_state(self._numbers.get_state())
        try:
            yield
        finally:
            self._state = random.getstate()
            random.setstate(outside)
            if numpy is not None and self._numbers is not None:
                self._numbers.set_state(numpy.random.get_state())
                numpy.random.set_state(numbers)

    def look(self) -> _View:
        with self._own_numbers():
            return self._look()

    def _look(self) -> _View:
        seat, heard = self._env.get_observation()
        return _View(False, seat, self._told(seat, heard) or "It is your turn.")

    def _told(self, seat: int, heard: Any) -> str:
        """Returns the observation as text, without the seat's own actions, which are already in its conversation."""
        if isinstance(heard, str):
            return heard
        from textarena.core import GAME_ID, ObservationType

        names = getattr(self._env.state, "role_mapping", {})
        parts = []
        for sender, message, kind in heard or []:
            if sender == seat and kind == ObservationType.PLAYER_ACTION:
                continue
            is_game = sender == GAME_ID or kind != ObservationType.PLAYER_ACTION
            parts.append(str(message) if is_game else f"[{names.get(sender, f'Player {sender}')}] {message}")
        return "\n".join(parts).strip()

    def move(self, action: str) -> _View:
        with self._own_numbers():
            is_done, _ = self._env.step(action)
            return _View(True, 0, "") if is_done else self._look()

    def end(self, own: int) -> _Ending:
        with self._own_numbers():
            rewards, infos = self._env.close()
        info = (infos or {}).get(own) or {}
        numbers = {seat: _reward(value) for seat, value in sorted((rewards or {}).items())}
        if own not in numbers:
            raise ValueError(f"the game ended without a reward for seat {own}")
        return _Ending(numbers, str(info.get("reason", ""))[:1000], bool(info.get("invalid_move")))


def _reward(value: Any) -> float:
    """Returns a seat's reward. For an invalid move some games return the reason instead."""
    return finite(INVALID_REWARD if isinstance(value, str) else float(value), "the reward")


def _make(spec: Any, kwargs: Json) -> Any:
    """Returns the game with the wrappers of actions. Wrappers of observations would repeat the whole conversation."""
    from textarena.core import ActionWrapper

    env = _game_class(spec)(**spec.kwargs | kwargs)
    for wrapper in spec.default_wrappers or []:
        if issubclass(wrapper, ActionWrapper):
            env = wrapper(env)
    return env


def _try_players(make: Callable[[], Any], wanted: int | None) -> tuple[int, int]:
    """Returns the number of players to start the game with, and the number of seats.

    The default is the game's own default, or the smallest valid number. Some multiplayer games also accept one player,
    who plays alone. If the game rejects every number, raises the game's error for one player.
    """
    refusals = []
    default = wanted or getattr(make(), "default_num_players", None)
    for count in range(1, MAX_PLAYERS + 1) if default is None else [int(default)]:
        try:
            match = _Match(make, count, seed=0)
            match.look()
            if count == default or match.num_seats > 1 or match.is_for_one:
                return count, match.num_seats
        except Exception as error:  # the boundary to the library
            refusals.append(error)
    raise refusals[-1] if wanted is not None else refusals[0]
