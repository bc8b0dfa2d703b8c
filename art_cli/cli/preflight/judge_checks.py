"""Judge checks: model retirement, API keys, one call."""

import logging

from art_cli.cli import Finding
from art_cli.cli.preflight.opened import Opened, SourcePart
from art_cli.config.sections.judge_config import DEFAULT_JUDGE
from art_cli.judges import Judge, trial
from art_cli.judges.costs import CostEstimate
from art_cli.judges.retirement import find_retiring, hosted_models, retirement_day
from art_cli.judges.shadow_judges import ShadowJudges
from art_cli.runtime import threads

log = logging.getLogger(__name__)


def check_retirement(opened: Opened, part: SourcePart) -> Finding | None:
    """Looks up the days on which providers retire the models that the run uses."""
    models = list(dict.fromkeys(hosted_models(part.loaded.config)))
    retiring = find_retiring(models)
    if retiring:
        cure = f"name another model (the default is {DEFAULT_JUDGE}), and measure it: art judge FILE --probe"
        return Finding("retirement", not retiring[0].is_over, "; ".join(map(str, retiring)), cure)
    known = [f"{model} {retirement_day(model) or 'has no day in the table of litellm'}" for model in models]
    return Finding("retirement", True, ", ".join(known)) if models else None


def check_shadow(opened: Opened, part: SourcePart) -> Finding | None:
    """Loads the shadow judges and looks for their API keys, without a call."""
    shadow, directory = part.loaded.config.shadow, part.loaded.directory
    threads.run(ShadowJudges(shadow, directory).close())
    for name, each in shadow.items():
        for key, model in trial.missing_keys(each.judge, directory).items():
            cure = f"set it in the environment, or in a file .env in {directory}"
            return Finding("shadow", False, f"{name}: {key} is not set, and {model} needs it", cure)
    names = [f"{name} ({each.judge.name}, {each.share:.0%} of the groups)" for name, each in shadow.items()]
    return Finding("shadow", True, ", ".join(names)) if names else None


def check_judge(opened: Opened, part: SourcePart) -> Finding | None:
    """Asks the judge; rewards from the rollout need no check."""
    assert part.judge
    notes, cures = [], []
    for number, judge in enumerate(part.judge.parts):
        same = f"{number} {part.loaded.config.judge.model_dump_json()}"
        if same in opened.asked:
            notes.append(f"{judge.title}: the same judge as above")
        elif (expected := judge.estimate(trial.short_attempts())) is not None:
            note, cure = _ask_once(opened, judge, expected)
            opened.asked.add(same)
            notes.append(note)
            cures += [cure] if cure else []
        elif not judge.needs_reward:
            log.info("judge: %s scores the two attempts", judge.title)
            verdicts = threads.run(trial.judge_in_time(judge, part.played))
            rewards = [f"{verdicts[trajectory.id].reward:g}" for trajectory in part.played]
            notes.append(f"{judge.title} gave the two attempts {' and '.join(rewards)}")
    return Finding("judge", True, "; ".join(notes), "; ".join(cures)) if notes else None


def _ask_once(opened: Opened, judge: Judge, expected: CostEstimate) -> tuple[str, str]:
    """Asks a judge that costs money. Returns the finding's message and cure; the cure may be "". Raises JudgeError."""
    price = "at a price that is not known" if expected.usd is None else f"about ${expected.usd:.4f}"
    tokens = expected.prompt_tokens + expected.completion_tokens
    models, would = judge.title, f"{expected.calls} calls, about {tokens:,} tokens, {price}"
    if not opened.asks_judge:
        return f"{models}: not asked (--no-judge); asking once about two short attempts would take {would}", ""
    log.info("judge: asking %s once about two short attempts: %s", models, would)
    asked = threads.run(trial.run_trial(judge))
    cost = "price unknown" if asked.usage.cost_usd is None else f"${asked.usage.cost_usd:.4f}"
    took = f"{asked.usage.calls} calls, {asked.usage.tokens:,} tokens, {cost}"
    is_sound = asked.right > asked.wrong
    cure = "" if is_sound else "it prefers no right answer to two plus two; look at judge.model and judge.rubric"
    return f"{models} gave a right answer {asked.right:g} and a wrong one {asked.wrong:g}: {took}", cure
