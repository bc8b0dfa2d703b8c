"""What attempts of recipes/email-search were worth, told from their conversations alone: the rule of a judge server.

    python -m tests.support.judges.judge_server --group-rule tests/support/judges/email_search_rule.py:scores

An answer is right if an e-mail says so that one of the attempts has read: one of the person and about the project of
the question. So an answer that is right by luck counts, as for the reward, unless no attempt has read that e-mail.
"""

import json
import re

Conversation = list[tuple[str, str]]  # (role, text)

FACTS = {"Where": r"\bin (\w+)", "When": r"\bon (\w+)", "Whom": r"\bwith (\w+)", "What": r"costs (\w+) euros"}
ASIDE = {"in", "on", "with", "euros"}


def scores(attempts: list[list[Conversation]]) -> list[float]:
    """1 for an answer that the right e-mail gives, else 0. All attempts are at the same question."""
    conversations = [attempt[-1] for attempt in attempts]
    facts = {fact for conversation in conversations for fact in _facts(conversation)}
    return [float(_answer(conversation) in facts) for conversation in conversations]


def _facts(conversation: Conversation) -> list[str]:
    """What the right e-mail says, if it was read."""
    [question] = [text for role, text in conversation if role == "user"]
    asked = re.fullmatch(r"(\w+) does (\w+) (?:meet about|pay for) the (\w+)\?", question)
    assert asked, question
    head = f"From: {asked[2]}\nSubject: {asked[3]}\n"
    read = [text[len(head) :] for _, text in conversation if text.startswith(head)]
    return [fact.lower() for text in read for fact in re.findall(FACTS[asked[1]], text)]


def _answer(conversation: Conversation) -> str:
    """The answer without the words around it; "" where there is none."""
    role, said = conversation[-1]
    answer = re.fullmatch(r"answer\((.*)\)", said, re.DOTALL)
    if role != "assistant" or not answer:
        return ""
    words = re.sub(r"[\W_]", " ", str(json.loads(answer[1])["text"])).lower().split()
    return " ".join(word for word in words if word not in ASIDE)


def words(attempts: list[list[Conversation]]) -> list[str]:
    """What a judge would say of each attempt."""
    conversations = [attempt[-1] for attempt in attempts]
    facts = {fact for conversation in conversations for fact in _facts(conversation)}
    return [_words(conversation, facts) for conversation in conversations]


def _words(conversation: Conversation, facts: set[str]) -> str:
    answer, has_read = _answer(conversation), bool(_facts(conversation))
    if not answer:
        return "It ends without an answer."
    if answer in facts:
        how = "the right e-mail was read and says so" if has_read else "a guess, for the right e-mail was not read"
        return f"Right: {answer}; {how}."
    why = "the right e-mail was read, but does not say so" if has_read else "another e-mail was read"
    return f"Wrong: {answer}; {why}."
