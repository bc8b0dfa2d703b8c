"""The alternative to training weights: the same run as a prompt search (`learner: {name: prompt}`), and its cost.

Playing and judging cost the same as in the plan. The additional cost is one reflection per step, measured once with the
real learner on the plan's groups.
"""

from art_cli.config.checks import keys_of_weights
from art_cli.config.compose import LoadedConfig, load_config
from art_cli.learners.prompt.prompt_learner import PromptLearner
from art_cli.loop.owed_groups import first_groups, group
from art_cli.runs.promise import Reflected
from art_cli.runs.run_dir import RunDir
from art_cli.runtime import threads
from art_cli.runtime.errors import ConfigError, UsageError

WITH_MODEL = "'{name: prompt, model: MODEL}'"


def as_prompt(loaded: LoadedConfig, learner: str) -> LoadedConfig:
    """Returns the configuration of the prompt search; its `overrides` reproduce it from the same file.

    `learner` is the key's value. Raises UsageError if a prompt search is impossible.
    """
    dropped = ["name", "learner", *keys_of_weights(loaded.config)]
    kept = [each for each in loaded.overrides if not _is_of(each.lstrip("+~").partition("=")[0], dropped)]
    try:
        file = load_config(loaded.path, kept)  # keys set in the file itself
        removed = [f"~{key}" for key in keys_of_weights(file.config)]
        changed = [f"learner={learner}", f"name={loaded.config.name}-prompt"]
        found = load_config(loaded.path, [*kept, *removed, *changed])
    except ConfigError as error:
        cure = f": --compare {WITH_MODEL}" if error.problems[0].key == "learner.model" else ""
        raise UsageError(f"--compare {learner}: {error.problems[0]}{cure}") from error
    if found.config.learner.trains_weights:
        raise UsageError(f"--compare {learner}: expected prompt, or {WITH_MODEL}")
    return found


def _is_of(key: str, sections: list[str]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)


async def reflect(learner: PromptLearner, files: RunDir, num_groups: int) -> Reflected:
    """Measures the cost of a search step apart from its attempts. Raises LearnerError if the model is unreachable."""
    groups = list(group(first_groups(files.scored(0), num_groups)).values())
    metrics = await threads.call_in_thread(learner.step, groups)
    usage = learner.payer.usage
    return Reflected(learner.payer.title, usage.calls, metrics.train_s, usage.tokens, usage.cost_usd)
