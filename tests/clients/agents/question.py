"""What the agents are asked, and the reward: half for the right call of the tool, half for how close the answer is."""

import sys
from difflib import SequenceMatcher

from art_cli import Outcome

QUESTION, ANSWER = "What is 2 plus 3?", "The sum is 5."
INTEGER = {"type": "integer"}
PARAMETERS = {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}}


def outcome(called, text, **versions):
    is_right = called[:1] == [["add", {"a": 2, "b": 3}]]
    reward = is_right / 2 + SequenceMatcher(None, text, ANSWER).ratio() / 2
    told = {"called": called, "text": text, "python": sys.executable, "torch": "torch" in sys.modules, **versions}
    return Outcome(reward=reward, metrics={"right": is_right}, metadata=told)
