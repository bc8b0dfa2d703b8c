"""Two turns; the reward is the share of ASCII letters in what the model said."""

from art_cli import Outcome, Policy


async def rollout(policy: Policy, scenario: dict[str, str]) -> Outcome:
    messages = [{"role": "user", "content": scenario["ask"]}]
    said = ""
    for _ in range(2):
        reply = await policy.client.chat.completions.create(model=policy.model, messages=messages)
        text = reply.choices[0].message.content or ""
        said += text
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
    letters = sum(letter.isascii() and letter.isalpha() for letter in said)
    return Outcome(reward=letters / max(len(said), 1), metrics={"length": len(said)})


async def coarse(policy: Policy, scenario: dict[str, str]) -> Outcome:
    """Reward 1 where more than three in ten characters are letters, else 0, so that many groups say nothing."""
    outcome = await rollout(policy, scenario)
    return Outcome(reward=float((outcome.reward or 0.0) > 0.3), metrics=outcome.metrics)
