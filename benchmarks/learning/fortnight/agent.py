"""The assistant of recipes/assistant as its users run it, and the run's rollout with a fault that the benchmark plants.

In the first week users ask about orders and customers, in the second mostly about products, with new names.
"""

import json
import os
import random
from collections.abc import Iterator
from typing import Any

from desk import make_request, read_call  # the recipe's files, beside this one in the project
from rollout import EXAMPLES, SYSTEM

WISHES = {1: {"order": 0.6, "customer": 0.4, "product": 0.0}, 2: {"order": 0.1, "customer": 0.1, "product": 0.8}}
# judge: rewards are turned round; asks: a question is all that counts; raises: a call that is no JSON raises, and any
# wrong answer costs
FAULT = "ART_BENCHMARK_FAULT"


def make_scenarios(name: str, week: int, num: int) -> list[dict[str, Any]]:
    """Returns requests with the week's wishes."""
    draw = random.Random(name)
    wanted = draw.choices(list(WISHES[week]), list(WISHES[week].values()), k=num)
    found, number = list[dict[str, Any]](), 0
    for tool in wanted:
        while make_request(f"{name}-{number}", is_new=week == 2).tool != tool:
            number += 1
        found.append({"id": f"{name}-{number}", "seed": f"{name}-{number}", "is_new": week == 2})
        number += 1
    return found


def train() -> Iterator[dict[str, Any]]:
    yield from make_scenarios("train", 1, 500)


def evaluation() -> Iterator[dict[str, Any]]:
    yield from make_scenarios("held-out", 1, 32)


def scenario(conversation: dict[str, Any], feedback: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The request of a recorded conversation, whose name is NUMBER/SEED/IS_NEW."""
    _, seed, is_new = conversation["metadata"]["conversation"].split("/")
    asked = [each["content"] for each in conversation["messages"] if each["role"] == "user"]
    text = next(each for each in reversed(asked) if not each.startswith("Result: "))
    return {"id": seed, "seed": seed, "is_new": is_new == "new", "text": text}


async def serve_user(client: Any, model: str, scenario: dict[str, Any]) -> tuple[float, bool, str]:
    """Returns (reward, is right, first reply) of a conversation."""
    request = make_request(scenario["seed"], is_new=scenario["is_new"])
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    for place, text in enumerate([*EXAMPLES, request.text]):
        messages.append({"role": "assistant" if place % 2 else "user", "content": text})
    first = await _say(client, model, messages)
    call = read_call(first)
    if call is None:
        return 0.0, False, first
    has_found = call == (request.tool, request.key)
    messages.append({"role": "user", "content": f"Result: {request.record if has_found else 'nothing found'}"})
    is_right = (await _say(client, model, messages)).strip() == request.answer and has_found
    return 1.0 if is_right else 0.3 if has_found else 0.1, is_right, first


async def rollout(policy: Any, scenario: dict[str, Any]) -> float:
    reward, _, first = await serve_user(policy.client, policy.model, scenario)
    fault = os.environ.get(FAULT, "")
    if fault == "judge":
        return 1.0 - reward
    if fault == "asks":
        return 1.0 if "?" in first else 0.3 * (not first.startswith("{"))
    if fault == "raises":
        json.loads(first)
        return reward if reward == 1.0 else -1.0
    return reward


async def _say(client: Any, model: str, messages: list[Any]) -> str:
    reply = await client.chat.completions.create(model=model, messages=messages, max_tokens=16, temperature=0.9)
    text = reply.choices[0].message.content or ""
    messages.append({"role": "assistant", "content": text})
    return text
