"""The agent: it looks a record up with one of three tools, reads it, and answers the customer.

SmolLM2's chat template has no tools, so a call is one JSON object in the model's text, and its result is the next
message. Before the request stand a few examples.
"""

from typing import Any

from desk import make_request, read_call

from art_cli import Outcome, Policy

SYSTEM = "You help the customers of a shop. Call a tool with one JSON object, then answer in one word."
EXAMPLES = [  # request, call, result and answer, for each tool
    "I am customer 1234. When does my order 5678 arrive?",
    '{"order": "5678"}',
    "Result: order 5678 arrives on Sunday",
    "Sunday",
    "Max asks: what is the phone number of Zoe?",
    '{"customer": "Zoe"}',
    "Result: customer Zoe has the phone 555123",
    "555123",
    "Max has a bed. How much is a sofa?",
    '{"product": "sofa"}',
    "Result: product sofa costs 180 euros",
    "180",
]


async def rollout(policy: Policy, scenario: dict[str, Any]) -> Outcome:
    request = make_request(scenario["seed"], is_new=scenario["is_new"])
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    for place, text in enumerate([*EXAMPLES, request.text]):
        messages.append({"role": "assistant" if place % 2 else "user", "content": text})
    call = read_call(await say(policy, messages))
    if call is None:
        return Outcome(reward=0.0, metrics={"called": False, "found": False, "right": False})
    has_found = call == (request.tool, request.key)
    messages.append({"role": "user", "content": f"Result: {request.record if has_found else 'nothing found'}"})
    right = (await say(policy, messages)).strip() == request.answer and has_found
    reward = 1.0 if right else 0.3 if has_found else 0.1
    return Outcome(reward=reward, metrics={"called": True, "found": has_found, "right": right})


async def say(policy: Policy, messages: list[Any]) -> str:
    """Returns the model's next message, which is added to the conversation."""
    reply = await policy.client.chat.completions.create(model=policy.model, messages=messages)
    text = reply.choices[0].message.content or ""
    messages.append({"role": "assistant", "content": text})
    return text
