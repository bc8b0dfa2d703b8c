"""What an attempt of recipes/email-search was worth, told from its conversation alone: the rule of a judge server.

    python -m tests.support.judge_server --rule tests/support/email_search_rule.py:rule

An answer is right if an e-mail that was read says so: one of the person and about the project of the question. So an
answer that is right by luck, without that e-mail, is worth nothing here.
"""

import json
import re

FACTS = {"Where": r"\bin (\w+)", "When": r"\bon (\w+)", "Whom": r"\bwith (\w+)", "What": r"costs (\w+) euros"}
ASIDE = {"in", "on", "with", "euros"}


def rule(conversations: list[list[tuple[str, str]]]) -> float:
    """1 for an answer that the right e-mail gives, else 0."""
    conversation = conversations[-1]
    [question] = [text for role, text in conversation if role == "user"]
    role, said = conversation[-1]
    answer = re.fullmatch(r"answer\((.*)\)", said, re.DOTALL)
    if role != "assistant" or not answer:
        return 0.0
    asked = re.fullmatch(r"(\w+) does (\w+) (?:meet about|pay for) the (\w+)\?", question)
    assert asked, question
    head = f"From: {asked[2]}\nSubject: {asked[3]}\n"
    facts = [re.findall(FACTS[asked[1]], text[len(head) :]) for _, text in conversation if text.startswith(head)]
    said = re.sub(r"[\W_]", " ", str(json.loads(answer[1])["text"])).lower().split()
    return float(any([fact.lower()] == [word for word in said if word not in ASIDE] for fact in sum(facts, [])))
