"""One question, one reply: a call of the function that fits, or "none" if no function does.

SmolLM2's chat template has no tools, so a call is one JSON object in the model's text.
"""

import json
from typing import Any

from checker import is_right, is_right_argument
from questions import describe

from art_cli import Outcome, Policy

SYSTEM = (
    "Answer with one JSON object that calls the function for the question. "
    "Leave optional arguments (?) out unless the question has them. If no function fits, answer none."
)
REFUSAL = "none"
EXAMPLES = [  # functions and question, reply
    "get_recipe(dish: string, servings?: integer): Finds a recipe for a dish.\n\nWhich wine goes well with fish?",
    REFUSAL,
    "area_of_square(side: integer, unit?: string): Area of a square.\n\nHow large is a square with sides of 7 m?",
    '{"name": "area_of_square", "arguments": {"side": 7, "unit": "m"}}',
    "play_song(title: string): Plays a song.\n\nWho was the first man on the moon?",
    REFUSAL,
    "tea.order(kinds: array of string, milk?: boolean): Orders tea.\n"
    "tea.price(kind: string): Price of a tea.\n\nI would like a green and a black tea.",
    '{"name": "tea.order", "arguments": {"kinds": ["green", "black"]}}',
]


async def rollout(policy: Policy, scenario: dict[str, Any]) -> Outcome:
    reply = await policy.client.chat.completions.create(model=policy.model, messages=ask(scenario))
    reward = score(reply.choices[0].message.content or "", scenario)
    right = reward == 1.0
    return Outcome(reward=reward, metrics={"right": right, f"right_{scenario['category']}": right})


def ask(scenario: dict[str, Any]) -> list[Any]:
    """Returns the messages: what to do, the examples, the functions and the question."""
    texts = [*EXAMPLES, f"{describe(scenario['functions'])}\n\n{scenario['question']}"]
    roles = ["user", "assistant"] * len(texts)
    return [{"role": "system", "content": SYSTEM}] + [
        {"role": role, "content": text} for role, text in zip(roles, texts, strict=False)
    ]


def score(reply: str, scenario: dict[str, Any]) -> float:
    """Returns 1 if the reply is right; else 0.1 for a call, 0.3 for the right name, up to 0.7 with right arguments.

    Where no function fits, only the refusal is worth something.
    """
    answer, call = scenario["answer"], read_call(reply)
    if answer is None:
        return float(reply.strip(" .\n").lower() == REFUSAL)
    if call is None:
        return 0.0
    name, arguments = call
    if name != answer["name"]:
        return 0.1
    schema = next(each["parameters"] for each in scenario["functions"] if each["name"] == name)
    if is_right(arguments, schema, answer["arguments"]):
        return 1.0
    needed = {key for key, values in answer["arguments"].items() if "" not in values}
    counted = needed | set(arguments)
    right = [key for key in arguments if is_right_argument(key, arguments[key], schema, answer["arguments"])]
    return 0.3 + 0.4 * len(right) / max(len(counted), 1)


def read_call(reply: str) -> tuple[str, dict[str, Any]] | None:
    """Returns the name and the arguments of a reply that is one JSON object with these two, else None."""
    try:
        call = json.loads(reply)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or call.keys() != {"name", "arguments"}:
        return None
    is_call = isinstance(call["name"], str) and isinstance(call["arguments"], dict)
    return (call["name"], call["arguments"]) if is_call else None
