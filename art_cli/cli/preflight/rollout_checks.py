"""Rollout checks: scenarios, code, two attempts, tools."""

import json
import logging
import math
import re
from collections.abc import Sequence
from typing import Any

from art_cli.chat.requests import text_of
from art_cli.cli import Finding
from art_cli.cli.preflight.opened import Opened, SourcePart
from art_cli.judges import trial
from art_cli.learners.sft.examples import load_examples
from art_cli.loop.owed_groups import plan_groups
from art_cli.loop.policy_sampler import open_sampler
from art_cli.models.tokenizer import template_cure
from art_cli.reports.pages.conversation_text import last_reply
from art_cli.rollouts.rollout_gateway import OWN_CLIENT
from art_cli.rollouts.rollout_runner import process_rollout
from art_cli.rollouts.scenario_files import RunScenarios, find_overlap, pools_of
from art_cli.runs.intervals import share_interval
from art_cli.runs.trajectory import Json, Trajectory
from art_cli.runtime import plugins, threads
from art_cli.runtime.errors import printable

log = logging.getLogger(__name__)

MAX_SHOWN = 200  # number of characters of the first scenario in a finding
SURE = 0.5  # the model is sure of equal attempts above this probability
UNLIKELY = 1e-3  # something fixed the random numbers of equal attempts below this probability
NO_REWARD = "see the model's replies with --show, and docs/scenarios.md; art plan measures the base over many scenarios"
JSON_TYPES = ("string", "number", "integer", "boolean", "array", "object", "null")


def check_scenarios(opened: Opened, part: SourcePart) -> Finding:
    """Reads all scenarios and demonstrations, and counts them."""
    config = part.loaded.config
    scenarios = RunScenarios(config, part.loaded.directory)
    part.scenarios, note = scenarios.training, ""
    counts = [f"{len(part.scenarios)} to train on"]
    if config.rollout.pool is not None:
        counts[0] += f" in {len(set(pools_of(part.scenarios, config.rollout.pool)))} pools"
    if config.eval:
        counts.append(f"{len(scenarios.evaluation)} to evaluate on")
        note = str(find_overlap(part.scenarios, scenarios.evaluation))
        if config.eval.held_out is not None and not note:
            counts[-1] += ", held out: none of them is trained on"
    if config.sft:
        examples = load_examples(config.sft, part.loaded.directory)
        counts.append(f"{len(examples.trained)} sft examples")
        if examples.evaluated:
            counts[-1] += f" and {len(examples.evaluated)} to evaluate them on"
    counts.append(f"the first is {printable(json.dumps(part.scenarios[0], ensure_ascii=False), limit=MAX_SHOWN)}")
    return Finding("scenarios", True, ", ".join(counts), note)


def check_entries(opened: Opened, part: SourcePart) -> Finding:
    """Imports the rollout and the judge, and looks for the judge's API keys."""
    config = part.loaded.config
    part.judge = trial.make_trial_judge(config.judge, part.loaded.directory)
    for name, model in trial.missing_keys(config.judge, part.loaded.directory).items():
        cure = f"set it in the environment, or in a file .env in {part.loaded.directory}"
        return Finding("judge", False, f"{name} is not set, and {model} needs it", cure)
    if config.rollout.command:
        program = config.rollout.command[0]
        gets = f"it gets {', '.join(config.rollout.env) or 'none'} of your variables and keys (rollout.env)"
        return Finding("entries", True, f"rollout.command {program}, judge {config.judge.name}; {gets}")
    entry, environment, python = config.rollout.entry, config.rollout.environment, config.rollout.python
    where = ""
    if config.rollout.cluster is not None:
        where = " on the cluster's nodes"  # imports may be available only there
    elif environment is not None or python is not None:
        version = threads.run(_load_elsewhere(part))
        where = "" if python is None else f" in Python {version} at {python}"
    elif entry is not None:
        plugins.resolve(entry, base=part.loaded.directory)
    rollout = entry if environment is None else environment.name
    return Finding("entries", True, f"rollout {rollout}{where}, judge {config.judge.name}")


async def _load_elsewhere(part: SourcePart) -> str:
    """Loads the rollout in its own Python and returns the Python's version. Raises UsageError or RolloutError."""
    process = process_rollout(part.loaded.config.rollout, part.loaded.directory)
    await process.open()
    await process.close()
    return process.version


def check_rollout(opened: Opened, part: SourcePart) -> Finding:
    """Plays two concurrent attempts at the first scenario, as training does."""
    rollout = part.loaded.config.rollout
    log.info(
        "rollout: two attempts at once, each with at most %d turns, %d tokens a turn and %g s (rollout.timeout_s)",
        rollout.max_turns,
        rollout.sampling.max_tokens,
        rollout.timeout_s,
    )
    part.played = threads.run(_play_pair(opened, part))
    for trajectory in part.played:
        if problem := _rollout_problem(opened, part, trajectory):
            return problem
    first = part.played[0]
    reward = "no reward (a judge gives it)" if first.returned_reward is None else f"reward {first.returned_reward:g}"
    num_tokens = first.num_sampled or first.metrics.get("num_completion", 0)
    message = f"{first.metrics['num_turns']:.0f} turns, {num_tokens:.0f} sampled tokens, {reward}"
    message += f'; the last reply is "{last_reply(first)}"{_base_success(part.played)}'
    is_unrewarded = all(each.returned_reward is not None and each.returned_reward <= 0 for each in part.played)
    cures = [part.slowness, _sampling_note(part.played), NO_REWARD if is_unrewarded else ""]
    return Finding("rollout", True, message, "; ".join(filter(None, cures)))


def _rollout_problem(opened: Opened, part: SourcePart, trajectory: Trajectory) -> Finding | None:
    if error := trajectory.error or trajectory.failure:
        mend = "await the call" if "'coroutine' object" in error else "mend the rollout"
        first = printable(str(part.scenarios[0]["id"]), limit=MAX_SHOWN)
        return Finding("rollout", False, error, f"{mend}; it failed on the first scenario, {first}")
    if trajectory.returned_reward is None and part.judge is not None and part.judge.needs_reward:
        message = "it returned no reward, and judge is 'rollout'"
        return Finding("rollout", False, message, "return one, or choose a judge")
    if _made_no_call(opened, trajectory):
        return _silence_problem(opened, part)
    is_greedy = bool(trajectory.turns) and all(turn.temperature == 0.0 for turn in trajectory.turns)
    if is_greedy and part.loaded.config.learner.trains_weights:
        message = "it samples at temperature 0: all attempts of a group are equal, so nothing can be learned"
        cure = "leave temperature out of the agent's call, or set rollout.sampling.force=true"
        return Finding("rollout", False, message, f"{cure} (and rollout.sampling.temperature above 0)")
    return None


def _made_no_call(opened: Opened, trajectory: Trajectory) -> bool:
    return not trajectory.turns if opened.policy is not None else trajectory.is_silent


def _silence_problem(opened: Opened, part: SourcePart) -> Finding:
    if part.loaded.config.rollout.environment is not None:
        message = "the game was over before the policy's seat had a move"
        return Finding("rollout", False, message, "begin with another seed: rollout.environment.seed=1")
    if all(_made_no_call(opened, each) for each in part.played):
        cure = "use policy.client, or policy.base_url and api_key; or a `try` of the agent hides why its call failed"
        return Finding("rollout", False, "it made no model call", cure)
    message = "of two attempts at once one made no model call: they may have gone into the other's trajectory"
    return Finding("rollout", False, message, OWN_CLIENT)


async def _play_pair(opened: Opened, part: SourcePart) -> list[Trajectory]:
    played: list[Trajectory] = []
    plans = plan_groups(part.scenarios[:1], step=0, group_size=2)
    policy = opened.weights or opened.policy
    async with open_sampler(part.loaded, policy, checkpoint=None, step=0, logs=opened.scratch) as sampler:
        await sampler.play_shown(plans, played.append, title="check")
        part.slowness = await sampler.runner.explain_slowness()
    return sorted(played, key=lambda trajectory: trajectory.index)


def check_tools(opened: Opened, part: SourcePart) -> Finding | None:
    """Checks that the chat template shows the agent's tools to the model, unless the template is a server's."""
    if opened.policy is None:
        return None
    with_tools = next((trajectory for trajectory in part.played if trajectory.tools), None)
    if with_tools is None:
        return None
    names = ", ".join(str(_name(tool)) for tool in with_tools.tools[:5])
    if _shows_tools(opened.tokenizer, with_tools):
        odd = ", ".join(printable(str(_name(tool)), limit=64) for tool in with_tools.tools if _is_odd(tool))
        cure = f"OpenAI's API would refuse {odd}: mend its name or the types of its parameters" if odd else ""
        return Finding("tools", True, f"the chat template shows {names}", cure)
    cure = f"{template_cure(opened.tokenizer)} in model.chat_template, or choose a model whose template shows tools"
    return Finding("tools", False, f"the chat template leaves out the tools: the model never sees {names}", cure)


def _base_success(played: Sequence[Trajectory]) -> str:
    """Returns the share of attempts with a reward above 0 and its interval; "" if a judge gives the rewards."""
    rewards = [each.returned_reward for each in played if each.returned_reward is not None]
    if len(rewards) < len(played):
        return ""
    num = sum(reward > 0 for reward in rewards)
    low, high = share_interval(num / len(rewards), len(rewards))
    return f"; {num} of {len(rewards)} attempts got more than 0 (95 % interval {low:.0%} to {high:.0%})"


def _sampling_note(played: Sequence[Trajectory]) -> str:
    """Returns the reason why the attempts sampled the same tokens; "" if they differ."""
    turns = [turn for trajectory in played for turn in trajectory.turns]
    if not turns:
        return ""
    if any(turn.temperature == 0.0 for turn in turns):
        return "some calls set temperature 0, so every attempt gets the same reply; rollout.sampling.force=true"
    first, *others = ([turn.sampled_ids for turn in trajectory.turns] for trajectory in played)
    if not others or any(other != first for other in others):
        return ""
    whole = played[0].turns
    likelihood = math.exp(sum(sum(turn.logprobs) for turn in whole))
    raw = math.exp(sum(sum(turn.logprobs if turn.raw_logprobs is None else turn.raw_logprobs) for turn in whole))
    if likelihood > SURE and raw <= SURE and any(turn.top_p < 1 or turn.top_k for turn in whole):
        return "both attempts sampled the same tokens: top_p or top_k leaves no others; rollout.sampling.force=true"
    if likelihood > SURE:
        return (
            f"both attempts sampled the same tokens, which the model does with probability {likelihood:.2f}: it is too "
            "sure to learn from; raise rollout.sampling.temperature, or choose another scenario or model"
        )
    if likelihood < UNLIKELY:
        return (
            "both attempts sampled the same tokens, not by chance: does the agent set a `seed`, or a format that "
            "leaves one answer? rollout.sampling.force=true"
        )
    return ""


def _name(tool: Json) -> object:
    return tool.get("function", {}).get("name")


def _is_odd(tool: Json) -> bool:
    """Returns True if OpenAI's API would refuse the tool's name or its parameter types."""
    schema = tool.get("function", {}).get("parameters") or {}
    properties = schema.get("properties", {}) if isinstance(schema, dict) else None
    if not isinstance(properties, dict) or not re.fullmatch(r"[\w-]{1,64}", str(_name(tool) or ""), re.ASCII):
        return True
    kinds = [each.get("type") if isinstance(each, dict) else "" for each in properties.values()]
    return any(isinstance(kind, str) and kind not in JSON_TYPES for kind in kinds)


def _shows_tools(tokenizer: Any, trajectory: Trajectory) -> bool:
    """Returns True if the rendered prompt depends on the tools."""
    asked = []
    for message in trajectory.messages:
        if message["role"] == "assistant":
            break
        role = "system" if message["role"] == "developer" else message["role"]
        asked.append({"role": role, "content": text_of(message.get("content"))})
    asked = asked or [{"role": "user", "content": "hi"}]
    try:
        rendered = [
            tokenizer.apply_chat_template(asked, tools=tools, tokenize=False, add_generation_prompt=True)
            for tools in (trajectory.tools, None)
        ]
    except Exception:  # a template may fail in any way here; the rollout's calls succeeded
        return True
    return bool(rendered[0] != rendered[1])
