"""Loads the modules of a recipe. Those of different recipes have the same names, such as rollout and scenarios."""

import importlib
import sys
from collections.abc import Callable
from types import SimpleNamespace

from tests.support.paths import ROOT

Message = dict[str, str]


def load(recipe: str) -> SimpleNamespace:
    """All modules in the recipe's directory, by their names. What other recipes have imported stays as it was."""
    directory = ROOT / "recipes" / recipe
    names = [path.stem for path in sorted(directory.glob("*.py"))]
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.path.insert(0, str(directory))
    try:
        return SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(directory))
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(before)


class ScriptedPolicy:
    """Answers with what a function makes of the conversation, in place of a model, and keeps what it was asked."""

    model = "scripted"

    def __init__(self, answer: Callable[[list[Message]], str]) -> None:
        self._answer = answer
        self.seen: list[list[Message]] = []  # the messages of each call
        self.said: list[str] = []
        self.states: list[str | None] = []
        self.client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=self._create)))

    def state(self, key: str | None) -> None:
        self.states.append(key)

    async def _create(self, *, model: str, messages: list[Message]) -> SimpleNamespace:
        self.seen.append(list(messages))
        self.said.append(self._answer(messages))
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=self.said[-1]))])
