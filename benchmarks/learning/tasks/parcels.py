"""A parcel desk of three turns, for SmolLM2-135M-Instruct: a cheap path earns a quarter, and a longer one earns all.

    close                                         the cheap path: a polite end that helps nobody    0.25
    look NUMBER -> send NUMBER or refund NUMBER   half of the work                                  0.5
    look NUMBER -> send or refund -> close        all of it                                         1.0

A policy that learns the cheap path first sees groups of equal rewards, and nothing teaches it the longer path.
"""

import random
import re
from typing import Any

from art_cli import Outcome, Policy

SYSTEM = "You work at a parcel desk. Answer with one command: look NUMBER, send NUMBER, refund NUMBER, or close."
EXAMPLES = (
    ("Parcel 318 has not come.", "look 318"),
    ("Desk: parcel 318 is lost.", "refund 318"),
    ("Desk: done. Anything else?", "close"),
    ("My parcel is here now.", "close"),
    ("I miss parcel 941.", "look 941"),
    ("Desk: parcel 941 lies in the hall.", "send 941"),
)
COMPLAINTS = (
    "Where is parcel {number}?",
    "I am still waiting for parcel {number}.",
    "Parcel {number} was due on Monday. Please help!",
    "Nobody knows about {number}, my parcel.",
)
FOUND = {
    "refund": (
        "Desk: parcel {number} is lost.",
        "Desk: parcel {number} burned.",
        "Desk: nobody has seen parcel {number}.",
    ),
    "send": ("Desk: parcel {number} waits in the hall.", "Desk: parcel {number} is on the shelf."),
}


def train() -> list[dict[str, Any]]:
    return _scenarios(512, seed=1)


def evaluation() -> list[dict[str, Any]]:
    return _scenarios(64, seed=2)


def _scenarios(num: int, seed: int) -> list[dict[str, Any]]:
    draw, made = random.Random(seed), []
    for place in range(num):
        number, due = str(draw.randrange(100, 1000)), draw.choice(sorted(FOUND))
        complaint, found = (draw.choice(texts).format(number=number) for texts in (COMPLAINTS, FOUND[due]))
        made.append({"id": f"parcel-{seed}-{place}", "number": number, "due": due, "ask": complaint, "found": found})
    return made


async def rollout(policy: Policy, scenario: dict[str, Any]) -> Outcome:
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    for text, command in EXAMPLES:
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": command}]
    number, due = scenario["number"], scenario["due"]
    first = await say(policy, messages, scenario["ask"])
    if first != f"look {number}":
        return _outcome(0.25 if first == "close" else 0.0)
    second = await say(policy, messages, scenario["found"])
    if second != f"{due} {number}":
        return _outcome(0.25 if second == "close" else 0.0)
    third = await say(policy, messages, "Desk: done. Anything else?")
    return _outcome(1.0 if third == "close" else 0.5)


def _outcome(reward: float) -> Outcome:
    return Outcome(reward=reward, metrics={"right": reward == 1.0, "cheap": reward == 0.25})


async def say(policy: Policy, messages: list[Any], text: str) -> str:
    """Returns the command in the policy's reply."""
    messages.append({"role": "user", "content": text})
    reply = await policy.client.chat.completions.create(model=policy.model, messages=messages)
    said = reply.choices[0].message.content or ""
    messages.append({"role": "assistant", "content": said})
    return re.sub(r"[^a-z0-9 ]", "", said.strip().lower())
