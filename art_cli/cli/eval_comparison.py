"""Comparison for `art eval`: plays the evaluation scenarios with several policies.

A policy is a checkpoint (weights or prompt), a run, the base model ("base" or RUN/base), or a model at an
OpenAI-compatible endpoint. A directory of runs means every run. All policies play the same scenarios, so differences to
the first policy are paired.
"""

import logging
import math
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec

from art_cli.config.checks import ranks
from art_cli.config.compose import LoadedConfig
from art_cli.config.schema import JudgeModelConfig, ModelConfig, OpenAIEngineConfig
from art_cli.config.sections.engine_config import HOSTED
from art_cli.engines import engine_traits, own_model
from art_cli.judges.costs import Price, find_price
from art_cli.judges.source_judges import make_judges, require_all_keys
from art_cli.loop import evaluate
from art_cli.loop.decide import decide_engine
from art_cli.loop.interrupts import Interrupts
from art_cli.loop.policy_sampler import SharedEngines, open_sampler
from art_cli.loop.stage_policy import PolicySource, dtype_of, find_policy, open_policy
from art_cli.runs.durable import read_object, write_file
from art_cli.runs.history import count_failures, find_fault
from art_cli.runs.run_checkpoints import Which, run_config, run_of
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import Json, Trajectory
from art_cli.runtime import threads
from art_cli.runtime.errors import DataError, UsageError, printable
from art_cli.runtime.log import is_verbose
from art_cli.runtime.scratch import make_directory
from art_cli.serving.served_policies import engine_config

log = logging.getLogger(__name__)

SCHEMA = 1  # version of the output of `art eval --json`
SETTINGS = "settings.json"
# keys of `rollout`
DECIDING = {"entry", "command", "environment", "max_turns", "limit_reward", "failures", "sampling"}
CHECKPOINT, ENDPOINT = "--checkpoint", "--endpoint"
Values = dict[str, dict[str, float]]  # metric -> scenario id -> value
FIRST = ("reward", "failed")  # listed before other metrics
DETAILS = frozenset((*evaluate.COUNTS, "num_prompt", "num_completion"))  # metrics for --verbose
SUMMARY_FROM = 3  # smallest number of policies with a summary
NAME_WIDTH = 40  # characters per policy name; longer names are cut at the start


class Player(NamedTuple):
    loaded: LoadedConfig
    source: PolicySource

    @property
    def price(self) -> Price | None:
        """Token price of the endpoint. None if sampling is free, or the price is unknown."""
        engine = self.loaded.config.engine
        return find_price(JudgeModelConfig(model=engine.paid_model)) if engine.paid_model else None

    @property
    def address(self) -> str:
        """Digest of the endpoint's address; "" if the engine loads checkpoints."""
        return own_model(self.loaded.config.engine, self.loaded.directory)


class MetricRow(NamedTuple):
    policy: str
    metric: str
    value: evaluate.Estimate
    difference: evaluate.Estimate | None  # to the first policy

    def as_json(self) -> dict[str, object]:
        difference = self.difference and self.difference._asdict()
        return {"policy": self.policy, "metric": self.metric, **self.value._asdict(), "difference": difference}


def find_players(
    loaded: LoadedConfig,
    checkpoints: Sequence[Path],
    endpoints: Sequence[str],
    *,
    which: Which = "offered",
    is_trusted: bool = False,
    order: Sequence[str] = (),
) -> dict[str, Player]:
    """Returns the players by policy name. Endpoints have the form MODEL@URL. Raises UsageError.

    `order`: the option names, for example ["--endpoint", "--checkpoint"]. By default, endpoints are last.
    `is_trusted`: allows calls with the user's key to the endpoint in a prompt's run.
    """
    is_foreign = not engine_traits(loaded.config.engine, loaded.directory).can_train
    expanded = [_expand(named) for named in checkpoints]
    wanted = [path for paths in expanded for path in paths] if checkpoints or endpoints else [None]

    def trained(loaded: LoadedConfig, path: Path | None) -> LoadedConfig:
        loaded = loaded if path in checkpoints or path is None else _as_trained(loaded, path)
        return loaded if path is None or is_foreign else _as_searched(loaded, path, is_trusted=is_trusted)

    sources = [find_policy(trained(loaded, path), path, which=which) for path in wanted]
    pairs = [] if is_foreign else [*zip(wanted, sources, strict=True)]
    dtypes = [dtype_of(trained(loaded, path), source) for path, source in pairs]
    loaded = decide_engine(loaded, trained_in=dtypes) if wanted else loaded
    players = dict[str, Player]()
    for path, source in zip(wanted, sources, strict=True):
        name = str(path or source.checkpoint or ("endpoint" if is_foreign else "start"))
        if name in players:
            raise UsageError(f"--checkpoint: {name} is named twice; leave one of them out")
        players[name] = Player(trained(loaded, path), source)
    for endpoint in endpoints:
        model, separator, url = endpoint.partition("@")
        if not separator or not model or not url:
            raise UsageError(f"--endpoint {endpoint!r}: expected MODEL@URL, for example gpt-6.1-sol@https://host/v1")
        engine = OpenAIEngineConfig(name="openai", base_url=url, model=model)
        config = loaded.config.model_copy(update={"engine": engine})
        name = endpoint if model in players else model  # the same model name at another address
        if name in players:
            raise UsageError(f"--endpoint: {name} is named twice; leave one of them out")
        players[name] = Player(replace(loaded, config=config), PolicySource(None, 0))
    numbers = {CHECKPOINT: [len(paths) for paths in expanded], ENDPOINT: [1] * len(endpoints)}
    return {name: players[name] for name in _in_order(list(players), numbers, order)}


def _in_order(names: Sequence[str], numbers: Mapping[str, Sequence[int]], order: Sequence[str]) -> list[str]:
    """Sorts the names (checkpoints, then endpoints) into the order of the options."""
    first = {CHECKPOINT: 0, ENDPOINT: sum(numbers[CHECKPOINT])}
    left, found = {option: list(its) for option, its in numbers.items()}, list[str]()
    for option in order:
        num = left[option].pop(0)
        found += names[first[option] : first[option] + num]
        first[option] += num
    return list(dict.fromkeys([*found, *names]))


def _expand(path: Path) -> list[Path | None]:
    """Expands a directory of runs, or a pattern such as 'runs/sweep-*'."""
    if path.is_dir():
        is_one = RunDir(path).checkpoints.is_dir() or (path / "manifest.json").exists()
        paths = [] if is_one else sorted(path.iterdir())
    else:
        paths = sorted(Path().glob(str(path))) if any(c in str(path) for c in "*?[") and not path.is_absolute() else []
    return [each for each in paths if RunDir(each).checkpoints.is_dir()] or [path]


def _as_trained(loaded: LoadedConfig, run: Path) -> LoadedConfig:
    """Returns the configuration with the run's model section, because adapter ranks may differ."""
    trained = run_config(RunDir(run)).get("model")
    if trained is None:
        return loaded
    model = ModelConfig.model_validate(trained)
    return replace(loaded, config=loaded.config.model_copy(update={"model": model}))


def _as_searched(loaded: LoadedConfig, policy: Path, *, is_trusted: bool) -> LoadedConfig:
    """For a prompt, returns the configuration with the run's endpoint. Raises UsageError if the run is not trusted."""
    run = run_of(policy) if (policy / "manifest.json").exists() else RunDir(policy)
    engine = run_config(run).get("engine")
    if not isinstance(engine, dict) or engine.get("name") not in HOSTED:
        return loaded
    if not is_trusted:
        where = printable(str(engine.get("base_url")), limit=200)
        cure = "add --trust if this run is yours"
        raise UsageError(f"{policy}: its prompt is for {where}, which would get every request and your key; {cure}")
    hosted = engine_config(str(engine["name"]), {}, engine, has_prompts=True, is_trusted=True)
    return replace(loaded, config=loaded.config.model_copy(update={"engine": hosted}))


# --- playing ----------------------------------------------------------------------------------------------------------


class Watch:
    """Observes attempts, and ends an evaluation that cannot be judged or gated."""

    def __init__(self, loaded: LoadedConfig, gates: Sequence[evaluate.Gate], *, num_policies: int) -> None:
        self._loaded, self._names = loaded, evaluate.NameWatch(gates)
        self._may_judge = num_policies > 1

    def see(self, trajectory: Trajectory) -> None:
        """Raises UsageError if a gate names an unknown metric, or the judge's key is not set."""
        self._names.see(trajectory)
        if self._may_judge and evaluate.contests(self._loaded.config, [trajectory]):
            self._may_judge = False  # one check is enough
            require_all_keys(self._loaded.config, self._loaded.directory)


def claim_directory(directory: Path, loaded: LoadedConfig) -> None:
    """Records a hash of settings and rollout code. Raises UsageError if the directory's attempts have another hash."""
    assert loaded.config.eval is not None, "no eval section"
    rollouts = [part.config.rollout for part in loaded.by_source.values()]
    settings = [each.model_dump(mode="json", include=DECIDING) for each in rollouts]
    parts = [settings, loaded.config.eval.temperature, evaluate.code_of(loaded, rollouts)]
    digest, path = sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest(), directory / SETTINGS
    if not os.path.lexists(path):
        make_directory(directory)
        write_file(path, msgspec.json.encode({"played_with": digest}) + b"\n")
        return
    cure = "name another directory with -o"
    try:
        is_same = read_object(path).get("played_with") == digest
    except DataError as error:
        raise UsageError(f"{error}; {cure}") from error
    if not is_same:
        raise UsageError(f"{directory}: its attempts were played with other settings or code; {cure}")


def file_names(addresses: Mapping[str, str]) -> dict[str, str]:
    """Returns trajectory file names by policy. Ambiguous names, such as runs/a and runs_a, are quoted. An endpoint's
    file name contains the address digest."""
    plain = {name: name.strip("/").replace("/", "_") for name in addresses}
    num = Counter(plain.values())
    files = {name: short if num[short] == 1 else quote(name, safe="") for name, short in plain.items()}
    ends = {name: f"-{address}" if address else "" for name, address in addresses.items()}
    return {name: f"{file}{ends[name]}.jsonl" for name, file in files.items()}


async def play(
    players: Mapping[str, Player],
    scenarios: Mapping[str, Sequence[Json]],
    paths: Mapping[str, Path],
    watch: Watch,
    interrupts: Interrupts,
) -> dict[str, list[Trajectory]]:
    """Returns each player's attempts, played one player after another."""
    played = dict[str, list[Trajectory]]()
    async with SharedEngines() as engines:
        for name, (loaded, source) in players.items():
            section, path = loaded.config.eval, paths[name]
            assert section is not None, "no eval section"
            with open_policy(loaded, source) as policy, interrupts.handled():
                async with open_sampler(
                    loaded,
                    policy,
                    checkpoint=source.checkpoint,
                    step=source.step,
                    logs=path.parent,
                    engines=engines if len(players) > 1 else None,
                ) as sampler:
                    played[name] = await evaluate.play_evaluation(
                        sampler, section, scenarios, step=source.step, path=path, title=name, watch=watch.see
                    )
    return played


def judge(loaded: LoadedConfig, played: dict[str, list[Trajectory]], results: dict[str, Values]) -> None:
    """Adds the judge's rewards if rollouts returned none. For a comparing judge, the reward is the share of wins
    against the first policy."""
    silent = [name for name, done in played.items() if evaluate.contests(loaded.config, done)]
    first, names = next(iter(played)), ", ".join(sorted({part.judge.name for part in loaded.config.by_source.values()}))
    if first not in silent:
        return
    judges = [loaded.config.by_source[name].judge for name in evaluate.contests(loaded.config, played[first])]
    if len(played) == 1 and all(map(ranks, judges)):
        log.warning(
            "no reward: the rollout returns none, and judge=%s compares attempts; name what to compare with first, "
            "for example --checkpoint base --checkpoint %s",
            names,
            first,
        )
        return

    async def judge() -> None:
        judge = make_judges(loaded.config, loaded.directory)
        try:
            for name in silent:
                found = await evaluate.judged_rewards(
                    loaded.config, judge, played[name], lambda: played[first] if len(played) > 1 else []
                )
                results[name]["reward"] = results[name].get("reward", {}) | found.by_scenario
        finally:
            await judge.close()
        won = f"the share of comparisons won against {first}" if found.is_contest else "the mean"
        log.info("reward: %s, by judge=%s", won, names)
        if (usage := judge.usage).calls:
            cost = "price unknown" if usage.cost_usd is None else f"${usage.cost_usd:.4f}"
            log.info("judge: %d calls, %s tokens, %s", usage.calls, f"{usage.tokens:,}", cost)

    threads.run(judge())


def find_failures(played: dict[str, list[Trajectory]]) -> dict[str, str]:
    """Returns faults by policy: all attempts failed, or none called the model. Warns about other failures."""
    faults = {}
    for name, done in played.items():
        failures = count_failures(done)
        if (fault := find_fault(failures, is_called=not all(each.is_silent for each in done))) is not None:
            faults[name] = str(fault)
        elif failures.num:
            log.warning("%s: %s", name, failures)
    return faults


def digests(played: Mapping[str, Sequence[Trajectory]]) -> dict[str, str]:
    """Returns weight digests by policy; "" without a proof."""
    sampled = {name: {turn.policy for each in done for turn in each.turns} for name, done in played.items()}
    return {name: digest.pop() if len(digest) == 1 else "" for name, digest in sampled.items()}


# --- comparing --------------------------------------------------------------------------------------------------------


def compare(results: dict[str, Values]) -> list[MetricRow]:
    """Returns a row per policy and metric: reward, own metrics by name, failed, costs, counts."""
    first = next(iter(results.values()))
    rows = []
    for name, metrics in results.items():
        for metric in sorted(metrics, key=_place):
            by_scenario = metrics[metric]
            is_first = metrics is first
            difference = None if is_first else evaluate.paired_difference(by_scenario, first.get(metric, {}))
            rows.append(MetricRow(name, metric, evaluate.estimate(list(by_scenario.values())), difference))
    return rows


def _place(metric: str) -> tuple[int, str]:
    groups = ("reward",), ("failed",), evaluate.SPENT, DETAILS  # the agent's own metrics come after the reward
    return next((2 * place for place, group in enumerate(groups) if metric in group), 1), metric


def as_object(
    rows: Sequence[MetricRow],
    verdicts: Sequence[evaluate.GateVerdict],
    *,
    digests: Mapping[str, str],
    faults: Mapping[str, str],
) -> dict[str, Any]:
    gates = [
        {"gate": str(gate), "holds": error is None, "value": value and value._asdict(), "error": str(error or "")}
        for gate, value, error in verdicts
    ]
    return {
        "schema_version": SCHEMA,
        "policies": [{"name": name, "digest": each, "fault": faults.get(name, "")} for name, each in digests.items()],
        "metrics": [row.as_json() for row in rows],
        "gates": gates,
    }


def as_text(rows: Sequence[MetricRow], *, gates: Sequence[evaluate.Gate] = ()) -> str:
    """Returns a line per policy and metric, after a summary for many policies. --verbose shows counts above 0."""
    is_many = len({row.policy for row in rows}) >= SUMMARY_FROM
    unseen = hidden(gates, rows)
    table = _as_table([row for row in rows if row.metric not in unseen])
    return (_as_summary(rows) + "\n" if is_many else "") + table


def hidden(gates: Sequence[evaluate.Gate], rows: Sequence[MetricRow]) -> Collection[str]:
    shown = {row.metric for row in rows if row.value.mean and is_verbose()}
    return DETAILS - shown - {evaluate.split_end(gate.metric, ())[0] for gate in gates}


def _as_summary(rows: Sequence[MetricRow]) -> str:
    by_policy: dict[str, dict[str, MetricRow]] = {}
    for row in rows:
        by_policy.setdefault(row.policy, {})[row.metric] = row
    columns = [*FIRST, *(metric for metric in evaluate.SPENT if any(metric in named for named in by_policy.values()))]
    lines = [f"{'policy':{NAME_WIDTH}s} " + " ".join(f"{column:>10s}" for column in columns)]
    means = {name: each["reward"].value.mean if "reward" in each else -math.inf for name, each in by_policy.items()}
    for name, named in sorted(by_policy.items(), key=lambda item: -means[item[0]]):
        cells = (f"{named[c].value.mean:10.4g}" if c in named else f"{'-':>10s}" for c in columns)
        lines.append(f"{_short(name):{NAME_WIDTH}s} " + " ".join(cells))
    return "\n".join(lines) + "\n"


def _as_table(rows: Sequence[MetricRow]) -> str:
    head = f"{'policy':{NAME_WIDTH}s} {'metric':16s} {'mean':>8s}  {'95 % interval':17s} {'n':>5s}"
    lines = [f"{head}  difference to the first"]
    for row in rows:
        value, other = row.value, row.difference
        paired = f"{other.mean:+.3f} {other.interval}" if other else ""
        name = f"{_short(row.policy):{NAME_WIDTH}s}"
        lines.append(
            f"{name} {row.metric:16s} {value.mean:8.3f}  {value.interval:17s} {value.num:5d}  {paired}".rstrip()
        )
    return "\n".join(lines) + "\n"


def _short(name: str) -> str:
    return name if len(name) <= NAME_WIDTH else "..." + name[3 - NAME_WIDTH :]
