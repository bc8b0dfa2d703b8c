"""Reflection: a language model reads attempts with their rewards, and writes a new text for one prompt part.

The method is GEPA (Agrawal et al. 2025, arXiv:2507.19457). The question's wording, the parsing of the answer, and the
parent selection on the Pareto front are pure functions from the package `gepa`. Its engine is not used, because it runs
the loop itself and pickles its state; prompt_learner.py replaces it.

The model's answer is untrusted text: it is bounded, and refused if empty, too long, or tried before.
"""

import asyncio
import logging
import os
import random
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from art_cli.config.schema import JudgeModelConfig
from art_cli.judges.costs import Budget, Spent, Usage, find_price
from art_cli.judges.judge_text import clean
from art_cli.judges.providers.caller import Caller, make_provider
from art_cli.judges.providers.http import missing_key, openai_base
from art_cli.judges.ruler.attempt_tree import Message, read_conversation
from art_cli.runs.system_prompt import MAX_PART
from art_cli.runs.trajectory import ScoredTrajectory
from art_cli.runtime import threads
from art_cli.runtime.errors import JudgeError, JudgeStopped, LearnerError, UsageError
from art_cli.runtime.secrets import find_secrets, load_environment

log = logging.getLogger(__name__)

TIMEOUT_S = 300.0  # longest time for one call, as in `judge.timeout_s`
TRIES = 3  # maximum questions per round; each shows different attempts
RETRIES = 6  # retries after a rate limit, server error or timeout, as in `judge.retries`
NUM_SHOWN = 6  # attempts per question: GEPA shows 3, all random
NUM_BEST = 1  # of those, the number of best attempts, so the model also sees good examples
MAX_SHOWN = 4_000  # characters shown of an attempt's task, answer and feedback each
MISSING = "it needs the package gepa: pip install 'art-cli[prompt]'"


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt as shown to the model.

    Example: Example(task="[user] 2+2?", answer="[assistant] 5", reward=0.0, feedback="reward 0; the sum is wrong")
    """

    task: str
    answer: str
    reward: float
    feedback: str


def read_example(attempt: ScoredTrajectory, reward: float) -> Example:
    """Returns the attempt's task (messages before any reply), the conversation from there on, and the feedback."""
    messages = read_conversation(attempt.messages)
    first = next((index for index, message in enumerate(messages) if message.role == "assistant"), len(messages))
    words = [f"reward {reward:.3g}"]
    words += [f"it failed: {attempt.error}"] if attempt.error is not None else []
    words += [f"it was ended by {attempt.ended_by}"] if attempt.ended_by is not None else []
    words += [score.explanation for score in attempt.scores if score.explanation]
    said = attempt.metadata.get("feedback")
    words += [said] if isinstance(said, str) and said else []
    return Example(
        task=_cut("\n\n".join(map(_shown, messages[:first]))),
        answer=_cut("\n\n".join(map(_shown, messages[first:]))) or "(nothing)",
        reward=reward,
        feedback=_cut("; ".join(words)),
    )


def _shown(message: Message) -> str:
    return "\n".join([f"[{message.role}]", *(segment.text for segment in message.segments)])


def _cut(text: str) -> str:
    """Cleans text for sending, and cuts the middle out of long text."""
    text, half = clean(text), MAX_SHOWN // 2
    return text if len(text) <= MAX_SHOWN else f"{text[:half]}\n[...]\n{text[-half:]}"


def choose_examples(examples: Sequence[Example], draw: random.Random) -> list[Example]:
    """Returns the examples to show: the worst (ties broken randomly) and the best."""
    shuffled = draw.sample(examples, len(examples))
    ordered = sorted(shuffled, key=lambda example: example.reward)
    return ordered if len(ordered) <= NUM_SHOWN else [*ordered[: NUM_SHOWN - NUM_BEST], *ordered[-NUM_BEST:]]


def choose_parent(scores: Sequence[Mapping[str, float]], draw: random.Random) -> int:
    """Returns the index of the prompt to change next; `scores` maps scenarios to rewards for each prompt.

    A prompt is drawn in proportion to the number of scenarios where it scores best, after removing prompts covered by
    others (algorithm 2 in the paper).
    """
    from gepa.gepa_utils import select_program_candidate_from_pareto_front

    best = {name: max(each[name] for each in scores) for name in scores[0]}
    front = {name: {index for index, each in enumerate(scores) if each[name] == best[name]} for name in best}
    totals = [sum(each.values()) for each in scores]
    chosen: int = select_program_candidate_from_pareto_front(front, totals, draw)
    return chosen


class Reflection:
    """Asks the model. `usage` counts this process's calls."""

    spent_usd = 0.0  # earlier processes' cost is in the run's metrics

    def __init__(self, member: JudgeModelConfig, directory: Path) -> None:
        """Raises UsageError if the model's key, the package gepa, or a package needed by the model is missing."""
        try:
            import gepa.strategies.instruction_proposal  # noqa: F401
        except ImportError as error:
            raise UsageError(f"learner 'prompt': {MISSING}") from error
        load_environment(directory)
        if (name := missing_key(member)) is not None:
            raise UsageError(f"learner: {name} is not set, and {member.model} needs it; set it, or put it into .env")
        self.member, self.title = member, member.model
        self.is_priced = find_price(member) is not None
        self.usage = Usage()
        urls, params = [member.base_url or openai_base()], [member.params]
        self._secrets = find_secrets(os.environ, names=[member.api_key_env or ""], urls=urls, params=params)
        make_provider(member, self._secrets)  # connects to nothing, but fails if litellm is missing

    def propose(
        self, text: str, examples: Sequence[Example], draw: random.Random, *, tried: Collection[str]
    ) -> str | None:
        """Returns a new text for a prompt part, if the model gave one. Raises LearnerError for a bad key or quota."""
        for _ in range(TRIES):
            question = _question(text, choose_examples(examples, draw))
            try:
                new = self._read(threads.run(self._ask(question)))
            except JudgeStopped as error:
                raise LearnerError(f"learner.model: {error}") from error
            except JudgeError as error:
                problem = str(error)
                continue
            if new and new not in tried:
                return new
            problem = "its text was tried before" if new else f"its text is empty, or above {MAX_PART} characters"
        log.warning("no new prompt after %d tries: %s: %s", TRIES, self.title, problem)
        return None

    async def _ask(self, question: str) -> str:
        caller = Caller(
            self.member,
            make_provider(self.member, self._secrets),
            slots=asyncio.Semaphore(1),
            budget=Budget(None, None, Spent(0.0, 0)),
            timeout_s=TIMEOUT_S,
            retries=RETRIES,
        )
        try:
            answer = await caller.ask([{"role": "user", "content": question}], {}, num_attempts=1)
        finally:
            await caller.close()
        self.usage += answer.usage
        return answer.text

    def _read(self, answer: str) -> str:
        """Returns the text between the answer's fences; "" for an unusable text."""
        from gepa.strategies.instruction_proposal import InstructionProposalSignature

        found = InstructionProposalSignature.output_extractor(answer)["new_instruction"].strip()
        return found if len(found) <= MAX_PART else ""


def _question(text: str, examples: Sequence[Example]) -> str:
    from gepa.strategies.instruction_proposal import InstructionProposalSignature

    records: list[dict[str, Any]] = [
        {"Inputs": each.task, "Generated Outputs": each.answer, "Feedback": each.feedback} for each in examples
    ]
    asked = {"current_instruction_doc": text or "(none so far)", "dataset_with_feedback": records}
    return str(InstructionProposalSignature.prompt_renderer(asked))
