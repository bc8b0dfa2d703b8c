"""Games that textworld makes from a seed and a size, compiled once and kept in a cache, and played by text."""

import os
import re
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import textworld
from textworld.generator import Grammar, compile_game, make_game

GAMES = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "art-textworld"
INFOS = textworld.EnvInfos(
    feedback=True, description=True, objective=True, admissible_commands=True, score=True, max_score=True, won=True
)
LONGEST = 190  # characters of a line, of which the interpreter keeps 198
USELESS = ("examine", "inventory", "look")  # commands that change nothing, and are not shown


class Size(NamedTuple):
    rooms: int
    objects: int  # at least; what the quest needs comes on top
    commands: int  # of the shortest way to win


class Game:
    """One game in play: its goal, the text that it said last, and the commands that it takes now."""

    def __init__(self, seed: int, size: Size, *, is_held_out: bool) -> None:
        self._env = textworld.start(str(game_file(seed, size, is_held_out=is_held_out)), request_infos=INFOS)
        state = self._env.reset()
        self.goal = tidy(state.objective).split("! ")[-1]
        self._take(state, state.description)

    def type(self, command: str) -> None:
        """Types a line. What the interpreter takes for a command to itself, or for several lines, is left out."""
        line = re.sub(r"[^ -~]|\\", " ", command)[:LONGEST]
        state, _, self.is_over = self._env.step(line)
        self._take(state, state.feedback)

    def close(self) -> None:
        self._env.close()

    def _take(self, state: Any, text: str) -> None:
        self.text = tidy(text)
        self.commands = [each for each in state.admissible_commands if not each.startswith(USELESS)]
        self.won, self.score = bool(state.won), (state.score or 0) / state.max_score


def game_file(seed: int, size: Size, *, is_held_out: bool) -> Path:
    """Returns the compiled game. If the cache does not have it, it is made, which takes about two seconds."""
    name = "-".join(map(str, ("held-out" if is_held_out else "train", *size, seed)))
    path = GAMES / f"{name}.z8"
    if not path.exists():
        options = game_options(seed, size, is_held_out=is_held_out)
        GAMES.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=GAMES) as scratch:
            options.path = f"{scratch}/{name}.z8"
            compile_game(make_game(options), options)
            for kind in (".json", ".z8"):  # the game is there when its last file is
                os.replace(f"{scratch}/{name}{kind}", GAMES / f"{name}{kind}")
    return path


def game_options(seed: int, size: Size, *, is_held_out: bool) -> textworld.GameOptions:
    options = textworld.GameOptions()
    options.seeds, options.nb_rooms, options.nb_objects = seed, size.rooms, size.objects
    options.chaining.min_depth, options.quest_length = 1, size.commands
    options.grammar.only_last_action = True  # the goal alone is told, not the way to it
    options.grammar.names_to_exclude = [noun for noun in nouns() if is_held_out_noun(noun) != is_held_out]
    return options


@cache
def nouns() -> tuple[str, ...]:
    """Returns what the generator calls food and objects other than keys, containers and furniture."""
    grammar = Grammar(textworld.GameOptions().grammar)
    tags = [tag for tag in grammar.grammar if "(o)_noun" in tag or "(f)_noun" in tag]
    return tuple(sorted({noun for tag in tags for noun in grammar.get_all_expansions_for_tag(tag) if noun}))


def is_held_out_noun(noun: str) -> bool:
    return sum(noun.encode()) % 3 == 0


def tidy(text: str) -> str:
    """Returns the text without its status line, headings and empty lines."""
    lines = [line.strip() for line in text.split("\n>")[0].splitlines()]
    return "\n".join(line for line in lines if line and not line.startswith(("-=", "***", "Would you like")))
