"""Two models that follow rules, behind one server: one that does what its system message says, one that reflects.

The follower answers a ticket "KIND: word" with the word in the style that its system message names in a line
"- KIND: STYLE", and else with the word as it is. One reply in ten is garbled, by the call's seed alone.

The reflector reads the attempts that it is shown as GEPA writes them. It takes failed ones, looks which style makes the
right reply of the word, and adds a line for one kind. By a hash of the question some of its answers are bad: it forgets
a line, names a wrong style, writes nothing, or fails with a status.
"""

import hashlib
import re
from collections.abc import Callable
from typing import Any

from tests.support.servers.chat_server import ChatServer, Json

STYLES: dict[str, Callable[[str], str]] = {
    "plain": str,
    "upper": str.upper,
    "reversed": lambda word: word[::-1],
    "doubled": lambda word: word + word,
    "first": lambda word: word[0],
    "length": lambda word: str(len(word)),
}
HOUSE = {"refund": "upper", "shipping": "reversed", "invoice": "length", "password": "first", "complaint": "doubled"}
RULE = re.compile(r"^- (\w+): (\w+)$", re.MULTILINE)
EXAMPLE = re.compile(
    r"\[user\]\n(\w+): (\w+)\n.*?## Feedback\nreward (\S+?)(?:; the right reply is (\w+))?\n", re.DOTALL
)
CURRENT = re.compile(r"perform a task for me:\n```\n(.*?)\n```", re.DOTALL)
NOISE = 10  # one reply in so many is garbled


def chance(text: str, of: int) -> int:
    """A number below `of` that the text alone decides."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % of


def follow(body: Json) -> str:
    """The follower's reply."""
    system = "\n".join(str(each["content"]) for each in body["messages"] if each["role"] == "system")
    kind, _, word = str(body["messages"][-1]["content"]).partition(": ")
    if chance(f"{body.get('seed')}/{kind}/{word}", NOISE) == 0:
        return "..."
    rules = dict(RULE.findall(system))
    return STYLES[rules.get(kind, "plain")](word)


def reflect(body: Json) -> str | tuple[int, Any]:
    """The reflector's answer, or its failure."""
    question = body["messages"][-1]["content"]
    found = CURRENT.search(question)
    assert found is not None, question[:500]
    rules: dict[str, str] = dict(RULE.findall(found[1]))
    mood = chance(question, 8)
    if mood == 0:
        return 400, {"error": {"message": "too long for this model"}}
    if mood == 1:
        return "```\n\n```"
    failed = [(kind, word, right) for kind, word, _, right in EXAMPLE.findall(question) if right]
    if mood == 2 and rules:
        rules.pop(sorted(rules)[0])
    elif failed:
        kind, word, right = failed[chance(question, len(failed))]
        style = next((name for name, make in STYLES.items() if make(word) == right), "plain")
        rules[kind] = "plain" if mood == 3 else style
    lines = "\n".join(f"- {kind}: {style}" for kind, style in rules.items())
    return f"The desk got some tickets wrong.\n```\nRules of the house:\n{lines}\n```\nThat should do."


def rule_followers() -> ChatServer:
    """The server, to be used as `with chatting(rule_followers()) as server`."""
    return ChatServer(lambda body, _: follow(body) if body["model"] == "follower" else reflect(body))


def of_followers(server: ChatServer) -> list[str]:
    """The overrides that point tests/prompted/config.yaml at the server."""
    return [f"engine.base_url={server.api_base}", f"learner.base_url={server.api_base}"]
