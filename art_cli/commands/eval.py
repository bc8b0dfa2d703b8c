"""`art eval`: plays the evaluation scenarios with each policy and compares them.

A policy is a checkpoint, a run (its newest checkpoint), or a model at any OpenAI-compatible endpoint. Each plays
the same scenarios, so differences are paired; the first policy is what the others are compared with.
"""

import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from art_cli import threads
from art_cli.config.compose import LoadedConfig, load_config
from art_cli.config.references import check_ready
from art_cli.config.schema import OpenAIEngineConfig
from art_cli.errors import GateError, UsageError, printable_lines
from art_cli.loop.choice import settle
from art_cli.loop.evaluate import Estimate, Gate, estimate, paired_difference, parse_gate, play_evaluation
from art_cli.loop.evaluate import values_by_scenario as values
from art_cli.loop.policy import PolicySource, find_policy, open_policy
from art_cli.loop.sampler import open_sampler
from art_cli.scratch import scratch

Values = dict[str, dict[str, float]]  # metric -> scenario id -> value


class Row(NamedTuple):
    """One metric of one policy."""

    policy: str
    metric: str
    value: Estimate
    difference: Estimate | None  # against the first policy; None for the first itself


def run(
    *,
    config: Path,
    overrides: Sequence[str],
    checkpoints: Sequence[Path],
    endpoints: Sequence[str],
    gates: Sequence[str],
    output: Path | None,
    as_json: bool,
) -> None:
    """Prints the comparison. Raises GateError when the last policy misses a gate."""
    loaded = load_config(config, overrides)
    if loaded.config.eval is None:
        raise UsageError(f"{config}: no eval section; add `eval: {{scenarios: FILE}}`")
    if loaded.config.engine.name == "openai" and checkpoints:
        raise UsageError(f"--checkpoint {checkpoints[0]}: engine 'openai' samples from its own model; use --endpoint")
    check_ready(loaded, ("model", "rollout", "gateway", "engine", "eval"))
    parsed = [parse_gate(gate) for gate in gates]
    policies = _policies(loaded, checkpoints, endpoints)
    with contextlib.ExitStack() as stack:
        place = output or stack.enter_context(scratch("eval"))
        results = {name: _play(policy, source, place, name) for name, (policy, source) in policies.items()}
    rows = compare(results)
    text = json.dumps([_as_dict(row) for row in rows]) + "\n" if as_json else printable_lines(_as_table(rows))
    sys.stdout.write(text)
    _check(parsed, rows, list(results)[-1])


def _policies(
    loaded: LoadedConfig, checkpoints: Sequence[Path], endpoints: Sequence[str]
) -> dict[str, tuple[LoadedConfig, PolicySource]]:
    """Name -> (config to play it with, source). Endpoints are written MODEL@URL."""
    is_foreign = loaded.config.engine.name == "openai"
    wanted: list[Path | None] = list(checkpoints) if checkpoints or endpoints else [None]
    sources = [PolicySource(None, 0) if is_foreign else find_policy(loaded, path) for path in wanted]
    policies = {}
    if wanted:
        loaded = settle(loaded, "engine")
    for path, source in zip(wanted, sources, strict=True):
        name = str(path or source.checkpoint or ("endpoint" if is_foreign else "start"))
        policies[name] = (loaded, source)
    for endpoint in endpoints:
        model, separator, url = endpoint.partition("@")
        if not separator or not model or not url:
            raise UsageError(f"--endpoint {endpoint!r}: expected MODEL@URL, for example gpt-5@https://host/v1")
        engine = OpenAIEngineConfig(name="openai", url=url, model=model)
        config = loaded.config.model_copy(update={"engine": engine})
        policies[model] = (replace(loaded, config=config), PolicySource(None, 0))
    return policies


def _play(loaded: LoadedConfig, source: PolicySource, place: Path, name: str) -> Values:
    async def play() -> Values:
        async with open_sampler(loaded, weights, checkpoint=source.checkpoint, step=source.step, logs=place) as sampler:
            path = place / f"{name.strip('/').replace('/', '_')}.jsonl"
            return values(await play_evaluation(sampler, loaded, step=source.step, path=path, title=name))

    with contextlib.ExitStack() as stack:
        is_foreign = loaded.config.engine.name == "openai"
        weights = None if is_foreign else stack.enter_context(open_policy(loaded, source))
        return threads.run(play())


def compare(results: dict[str, Values]) -> list[Row]:
    """A row per policy and metric; metrics in the order reward, failed, then by name."""
    first = next(iter(results.values()))
    rows = []
    for name, metrics in results.items():
        for metric in sorted(metrics, key=lambda m: (m != "reward", m != "failed", m)):
            by_scenario = metrics[metric]
            is_first = metrics is first
            difference = None if is_first else paired_difference(by_scenario, first.get(metric, {}))
            rows.append(Row(name, metric, estimate(list(by_scenario.values())), difference))
    return rows


def _as_dict(row: Row) -> dict[str, object]:
    return {
        "policy": row.policy,
        "metric": row.metric,
        **row.value._asdict(),
        "difference": row.difference and row.difference._asdict(),
    }


def _as_table(rows: Sequence[Row]) -> str:
    lines = [f"{'policy':40s} {'metric':16s} {'mean':>8s}  {'95 % interval':17s} {'n':>5s}  difference to the first"]
    for row in rows:
        value, other = row.value, row.difference
        paired = f"{other.mean:+.3f} [{other.low:+.3f}, {other.high:+.3f}]" if other else ""
        name = row.policy if len(row.policy) <= 40 else "..." + row.policy[-37:]
        interval = f"[{value.low:.3f}, {value.high:.3f}]"
        lines.append(f"{name:40s} {row.metric:16s} {value.mean:8.3f}  {interval:17s} {value.num:5d}  {paired}".rstrip())
    return "\n".join(lines) + "\n"


def _check(gates: Sequence[Gate], rows: Sequence[Row], policy: str) -> None:
    means = {row.metric: row.value.mean for row in rows if row.policy == policy}
    for gate in gates:
        if gate.metric not in means:
            raise UsageError(f"--gate: no metric {gate.metric!r}; there are {', '.join(sorted(means))}")
        if not gate.holds(means[gate.metric]):
            raise GateError(
                f"gate missed: {policy}: {gate.metric} is {means[gate.metric]:.4f}, not {gate.operator} {gate.bound}"
            )
