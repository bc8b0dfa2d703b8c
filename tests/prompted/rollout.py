"""A desk that answers tickets. The agent has a system message of its own; it does not know the rules of the house."""

from typing import Any

from art_cli import Outcome, Policy
from tests.support.judges.rule_followers import HOUSE, STYLES

WORDS = (
    *("parcel", "ticket", "window", "garden", "socket", "marble", "lantern", "copper"),
    *("basket", "candle", "hammer", "jacket", "kettle", "mirror", "needle", "pillow"),
)


def tickets() -> list[dict[str, Any]]:
    return [{"id": f"{kind}-{word}", "kind": kind, "word": word} for word in WORDS for kind in HOUSE]


async def rollout(policy: Policy, scenario: dict[str, Any]) -> Outcome:
    """The reward is 1 for the right reply. The feedback is what a colleague would say of a wrong one."""
    kind, word = scenario["kind"], scenario["word"]
    messages: list[Any] = [
        {"role": "system", "content": "You answer tickets with one word."},
        {"role": "user", "content": f"{kind}: {word}"},
    ]
    reply = await policy.client.chat.completions.create(model=policy.model, messages=messages)
    said, right = reply.choices[0].message.content, STYLES[HOUSE[kind]](word)
    feedback = "" if said == right else f"the right reply is {right}"
    return Outcome(reward=float(said == right), metadata={"feedback": feedback})


async def judged(policy: Policy, scenario: dict[str, Any]) -> None:
    """The same without a reward, for a judge."""
    await rollout(policy, scenario)


async def echo(policy: Policy, scenario: dict[str, Any]) -> Outcome:
    """Another agent, whose calls need no rule: the right reply to a greeting is the greeting."""
    messages: list[Any] = [{"role": "user", "content": f"greeting: {scenario['word']}"}]
    reply = await policy.client.chat.completions.create(model=policy.model, messages=messages)
    return Outcome(reward=float(reply.choices[0].message.content == scenario["word"]))
