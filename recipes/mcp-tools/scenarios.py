"""The questions: those about 20 customers are for evaluation, and nothing of theirs is trained on."""

from typing import Any

from desk import Desk, customers, questions

NUM_HELD_OUT = 20


def train() -> list[dict[str, Any]]:
    return questions(Desk(), customers()[:-NUM_HELD_OUT])


def unanswered() -> list[dict[str, Any]]:
    """The same without their answers, so that a judge has to tell good attempts from bad ones."""
    return [{"id": each["id"], "task": each["task"]} for each in train()]


def evaluation() -> list[dict[str, Any]]:
    return questions(Desk(), customers()[-NUM_HELD_OUT:])
