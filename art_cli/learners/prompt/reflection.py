"""Reflection: a language model reads attempts with their rewards, and writes a new text for one part of the prompt.

The method is GEPA's (Agrawal et al. 2025, arXiv:2507.19457), and so are the words of the question, how the new text is
read out of the answer, and the choice of a parent on the Pareto front: the package `gepa` has these as pure functions.
Its engine is not used, because it owns its loop and keeps its state as a pickle; ours is prompt_learner.py.

The model's answer is hostile text: bounded, and refused where it is empty, too long, or was tried before.
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

TIMEOUT_S = 300.0  # longest time for one call, as `judge.timeout_s`
TRIES = 3  # questions per round until one is answered with a usable text; each shows other attempts
RETRIES = 6  # after a rate limit, a server error or the deadline of a call, as `judge.retries`
NUM_SHOWN = 6  # attempts in one question: GEPA shows 3, all of them at random
NUM_BEST = 1  # number of those that are the best ones, so that the model sees what is right
MAX_SHOWN = 4_000  # characters of the task, of the answer and of the feedback of one attempt that are shown
MISSING = "it needs the package gepa: pip install 'art-cli[prompt]'"


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt as the model is shown it.

    Example: Example(task="[user] 2+2?", answer="[assistant] 5", reward=0.0, feedback="reward 0; the sum is wrong")
    """

    task: str
    answer: str
    reward: float
    feedback: str


def read_example(attempt: ScoredTrajectory, reward: float) -> Example:
    """Returns an attempt's conversation up to the first reply, what came after it, and what was said of it."""
    messages = read_conversation(attempt.messages)
    first = next((index for index, message in enumerate(messages) if message.role == "assistant"), len(messages))
    words = [f"reward {reward:.3g}"]
    words += [f"it failed: {attempt.error}"] if attempt.error is not None else []
    words += [f"it met a limit: {attempt.limit}"] if attempt.limit is not None else []
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
    """Returns text that can be sent, without its middle if it is long."""
    text, half = clean(text), MAX_SHOWN // 2
    return text if len(text) <= MAX_SHOWN else f"{text[:half]}\n[...]\n{text[-half:]}"


def choose_examples(examples: Sequence[Example], draw: random.Random) -> list[Example]:
    """Returns the examples to show: the worst ones, by chance among equals, and the best."""
    shuffled = draw.sample(examples, len(examples))
    ordered = sorted(shuffled, key=lambda example: example.reward)
    return ordered if len(ordered) <= NUM_SHOWN else [*ordered[: NUM_SHOWN - NUM_BEST], *ordered[-NUM_BEST:]]


def choose_parent(scores: Sequence[Mapping[str, float]], draw: random.Random) -> int:
    """Returns the index of the prompt to change next; `scores` has each prompt's reward by scenario, all of the same.

    A prompt is drawn by the number of scenarios at which none is better, without those that another one covers
    (algorithm 2 of the paper).
    """
    from gepa.gepa_utils import select_program_candidate_from_pareto_front

    best = {name: max(each[name] for each in scores) for name in scores[0]}
    front = {name: {index for index, each in enumerate(scores) if each[name] == best[name]} for name in best}
    totals = [sum(each.values()) for each in scores]
    chosen: int = select_program_candidate_from_pareto_front(front, totals, draw)
    return chosen


class Reflection:
    """Asks the model. `usage` counts what this process paid."""

    spent_usd = 0.0  # earlier processes' cost is in the run's metrics

    def __init__(self, member: JudgeModelConfig, directory: Path) -> None:
        """Raises UsageError: the model's key, the package gepa, or one that the model needs is missing."""
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
        make_provider(member, self._secrets)  # connects to nothing, and may lack litellm

    def propose(
        self, text: str, examples: Sequence[Example], draw: random.Random, *, tried: Collection[str]
    ) -> str | None:
        """Returns a new text for a part of the prompt, or None if the model gave none that can be used.

        Raises LearnerError: no call can succeed, because of the key or the quota.
        """
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
        """Returns the text between the answer's fences, or "" if it cannot be a part of a prompt."""
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
