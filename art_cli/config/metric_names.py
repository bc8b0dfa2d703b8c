"""Names of step metrics, and the settings that some metrics require."""

from collections.abc import Callable, Collection
from difflib import get_close_matches

from art_cli.config import schema
from art_cli.config.schema import RunConfig

SHADOW = "shadow/"  # prefix of the metrics of shadow judges: shadow/NAME, shadow/NAME.gap
EVAL = "eval."  # prefix of evaluation metrics in stop rules
JUDGED_BY = "judged_by."  # prefix of the number of scores per model, as named in the judge's replies
# prefixes of metric names that rollouts, scenarios, failures and judges define
FAMILIES = ("metrics.", "pool.", "failed.", JUDGED_BY, EVAL)
OF_SOURCES = ("reward", "no_signal_share", "num_groups", "num_failed")  # metrics per source: reward.NAME, ...
SHADOW_KINDS = ("reward", "gap", "std", "reward_std", "correlation", "num")
CLOSE = 0.8  # difflib ratio of a misspelling, as for gates

ALWAYS = frozenset(
    {
        # the learner reports these (learners.StepMetrics)
        *("reward_mean", "reward_std", "no_signal_share", "num_groups", "num_samples", "num_trajectories"),
        *("num_failed", "num_updates", "tokens_trained", "tokens_imitated", "tokens_flat", "tokens_computed"),
        *("packed", "loss", "entropy", "clip_fraction", "grad_norm", "grad_clip", "learning_rate"),
        *("logprob_gap", "logprob_gap_max", "peak_gb", "train_s"),
        # the rollouts give these (loop.batches)
        *("sample_s", "judge_s", "num_unscored", "tokens_sampled", "turns", "sample_tokens_per_s"),
        *("num_without_turns", "num_limited", "num_policy_failed", "failing_share", "truncated_share"),
        *("settled_share", "staleness", "staleness_max"),
        # the run itself gives these
        *("probe_gap", "probe_undecided", "probe_share", "probe_share_error", "run_s"),
    }
)


def judge_costs(config: RunConfig) -> bool:
    """Returns True if a judge or a prompt-writing model may make paid calls. A user's function may."""
    own = [part.judge for part in config.by_source.values()]
    judges = (*own, *(shadow.judge for shadow in config.shadow.values()))
    free = schema.RolloutJudgeConfig | schema.MetricJudgeConfig | schema.NoJudgeConfig | schema.RewardModelJudgeConfig
    return not config.learner.trains_weights or not all(isinstance(judge, free) for judge in judges)


def _knows_noise(config: RunConfig) -> bool:
    judges = [part.judge for part in config.by_source.values()]
    return any(not isinstance(judge, schema.NoJudgeConfig) and judge.noise is not None for judge in judges)


Need = tuple[str, Callable[[RunConfig], bool]]  # (required key, predicate: is it set?)

NEEDS: dict[str, Need] = {
    "logprob_change": (
        "train.epochs_per_step or train.updates_per_step above 1",
        lambda config: config.train.epochs_per_step * config.train.updates_per_step > 1,
    ),
    "cross_entropy": ("loss.echo", lambda config: config.learns_by.echo > 0 or config.algorithm is not None),
    "shared_states": ("loss=gigpo", lambda config: config.learns_by.compares_states),
    "kl": ("loss.kl above 0", lambda config: config.learns_by.kl > 0 or config.algorithm is not None),
    "off_policy_masked": ("loss.off_policy", lambda config: config.learns_by.off_policy is not None),
    **dict.fromkeys(("update_kl", "update_share"), ("train.max_kl", lambda config: config.train.kl_bound is not None)),
    **dict.fromkeys(
        ("value_loss", "value_mean", "explained_variance"),
        ("loss=ppo", lambda config: isinstance(config.learns_by, schema.PpoConfig) or config.algorithm is not None),
    ),
    **dict.fromkeys(
        ("teacher_kl", "taught_share"),
        (
            "loss=distill or loss=sdpo",
            lambda config: isinstance(config.learns_by, schema.TaughtLossConfig) or config.algorithm is not None,
        ),
    ),
    **dict.fromkeys(("reliability", "num_unreliable", "reward_corrected"), ("judge.noise", _knows_noise)),
    **dict.fromkeys(
        ("judge_calls", "judge_tokens", "judge_usd", "run_usd"), ("a judge that makes calls, as ruler", judge_costs)
    ),
    **dict.fromkeys(
        ("reward_parent", "reward_proposal", "is_accepted", "num_prompts", "reflection_tokens", "reflection_usd"),
        ("learner=prompt", lambda config: not config.learner.trains_weights),
    ),
    **dict.fromkeys(
        ("cascade_asked", "cascade_pairs", "cascade_agreement"),
        (
            "judge=cascade",
            lambda config: any(isinstance(each.judge, schema.CascadeJudgeConfig) for each in config.by_source.values()),
        ),
    ),
    "num_refilled": ("rollout.refill", lambda config: config.rollout.num_spare > 0),
    "rollouts_at_once": ("rollout.concurrency=auto", lambda config: config.rollout.concurrency == "auto"),
}


def _why_no_shadow(name: str, config: RunConfig) -> str:
    shadow, _, kind = name.removeprefix(SHADOW).partition(".")
    if shadow not in config.shadow:
        there = ", ".join(f"'{SHADOW}{each}'" for each in config.shadow)
        return f"unknown shadow judge {shadow!r}; known: {there}" if there else "needs a shadow section"
    if kind and kind not in SHADOW_KINDS:
        return f"no such number; there are: {', '.join(f'{SHADOW}{shadow}.{each}' for each in SHADOW_KINDS)}"
    return ""


def why_no_source(name: str, sources: Collection[str]) -> str:
    """Returns an error message if a per-source metric names an unknown source, else ""."""
    number, _, source = name.partition(".")
    if not source or source in sources or number not in (*OF_SOURCES, "failed"):
        return ""
    near = get_close_matches(source, sources, 1, 0.6)
    there = f"there are: {', '.join(sources)}" if sources else "needs rollout.sources"
    return f"no source {source!r}; {f'did you mean {number}.{near[0]}?' if near else there}"


def why_unknown(name: str, config: RunConfig) -> str:
    """Returns the reason why this run's steps cannot have the metric, else ""."""
    if name.startswith(EVAL):
        has_sources = bool(config.rollout.sources)
        wrong = why_no_source(name.removeprefix(EVAL), config.rollout.sources) if has_sources else ""
        return wrong if config.eval is not None else "needs an eval section"
    if name.startswith(SHADOW):
        return _why_no_shadow(name, config)
    if name.startswith(FAMILIES) or name in ALWAYS:
        return ""
    if name in NEEDS:
        need, is_set = NEEDS[name]
        is_there = any(map(is_set, (config, *config.by_source.values())))
        return "" if is_there else f"no step has it under this configuration; it needs {need}"
    if name.partition(".")[0] in OF_SOURCES and "." in name:
        return why_no_source(name, config.rollout.sources)
    near = get_close_matches(name, [*ALWAYS, *NEEDS, *FAMILIES], 3, 0.6)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "docs/metrics.md has all"
    if name in ("reward", "failed"):
        hint = f"of a step: {'reward_mean' if name == 'reward' else 'num_failed'}; of an evaluation: {EVAL}{name}"
    return f"no such metric; {hint} (one that rollouts report is metrics.NAME)"
