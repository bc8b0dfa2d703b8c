"""A run's report as text for a terminal, and the summary that `art train` prints at the end.

The report has a line per subject and small character plots. The summary lists evaluations, the checkpoint to serve, and
further commands. Input is the report as plain data (`art report --json`); output is text.
"""

import shlex
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from art_cli.config.sections.engine_config import HOSTED

Report = Mapping[str, Any]

MAX_METRICS = 4  # number of metrics, in addition to the reward, that fit in the table
BARS = "▁▂▃▄▅▆▇█"
WIDTH = 40  # characters of a plot
MAX_ROWS = 12  # number of listed evaluations
NAMES = {
    "reward": "reward",
    "no_signal_share": "groups without signal",
    "entropy": "entropy (nats)",
    "clip_fraction": "clipped tokens",
    "logprob_change": "logprob change (nats)",
    "logprob_gap": "logprob gap (nats)",
    "grad_norm": "gradient norm",
    "kl": "KL to the reference",
    "tokens_per_rollout": "tokens of a rollout",
    "turns_per_rollout": "turns of a rollout",
    "failed_share": "failed rollouts",
    "limited_share": "rollouts at a limit",
}
KINDS = {
    "all_failed": "every attempt failed",
    "no_calls": "no model call",
    "nothing_learned": "nothing learned",
    "evaluation_fell": "evaluation fell",
    "training_fell": "training reward fell",
    "no_signal": "no signal",
    "entropy_collapse": "entropy collapsed",
    "hardly_moves": "the policy hardly moves",
    "stuck": "nothing is learned",
    "frozen": "frozen",
    "settled": "settled for a part of the reward",
    "failures": "failures",
    "parted": "reward and anchor parted",
    "judge_changed": "another judge",
    "failing_pays": "failing may pay",
    "cascade_drifted": "the cascade's judges part",
}
INDENT = 13


def closing_text(report: Report) -> str:
    """Returns the whole text. The run's texts are included unchanged, so print it with `printable_lines`."""
    run = shlex.quote(str(report["run"]))
    lines = [f"  {line}" for line in evaluation_table(report)]
    if report["fault"]:
        lines += [f"nothing to serve: {report['fault']}"]
    elif report["offered"]:
        lines += [f"to serve:   {path}" for path in _offered_path(report)]
        is_hosted = report["made_with"].get("engine") in HOSTED  # art serve asks before using a key
        lines += [f"            {report['offered']}", f"serve it:   art serve {run}{' --trust' if is_hosted else ''}"]
    lines += [f"look at it: art view {run}", f"            art report {run}"]
    return "".join(f"{line}\n" for line in lines)


def _offered_path(report: Report) -> list[str]:
    """Returns the checkpoint directory for `art serve RUN`, if known."""
    kept = [report[name] for name in ("best", "last") if report[name] is not None]
    return [each["checkpoint"] for each in kept if report["offered"].startswith(f"step {each['step']},")][:1]


def evaluation_table(report: Report) -> list[str]:
    """Returns the initial, best and last evaluation with the reward's interval and other metrics."""
    done: Sequence[Mapping[str, Any]] = report["evaluations"]
    if not done:
        return []
    rewarded = [each for each in done if each["reward"] is not None]
    best = max(rewarded, key=lambda each: (each["reward"]["mean"], each["step"]), default=None)
    chosen: dict[int, list[str]] = {}
    for name, each in (("first", done[0]), ("best", best), ("last", done[-1])):
        if each is not None:
            chosen.setdefault(each["step"], []).append(name)
    metrics = [name for name in done[-1]["metrics"] if not name.startswith("num_")][:MAX_METRICS]
    rows = [["evaluation", "step", report["reward_names"]["eval"], "95 % interval", *metrics]]
    by_step = {each["step"]: each for each in done}
    for step in sorted(chosen):
        found = [by_step[step]["metrics"].get(name) for name in metrics]
        others = ["" if value is None else f"{value:.3f}" for value in found]
        rows.append([" and ".join(chosen[step]), str(step), *_reward(by_step[step]["reward"]), *others])
    return columns(rows)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns a table's lines, with every column as wide as its widest cell."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _reward(point: Mapping[str, Any] | None) -> tuple[str, str]:
    if point is None:
        return "none", ""
    interval = "" if point["low"] is None else f"{point['low']:.3f} to {point['high']:.3f}"
    return f"{point['mean']:.3f}", interval


def report_text(report: Report) -> str:
    """Returns the whole text. The run's texts are included unchanged, so print it with `printable_lines`."""
    return "".join(f"{line}\n" for line in _lines(report))


def _lines(report: Report) -> list[str]:
    lines = [f"{report['run']}: {state(report)}"]
    lines += [f"{name:{INDENT}s}{value}".rstrip() for name, value in facts(report)]
    if rows := evaluation_rows(report):
        lines += ["", f"evaluations: {report['reward_names']['eval']} with its 95 % interval over scenarios"]
        lines += [f"  step {step:>5s}  {reward}  {note}".rstrip() for step, reward, note in rows]
    if promised := promised_rows(report):
        lines += ["", "what art plan promised, and what happened"]
        lines += [f"  {line}" for line in columns(promised)]
    if windows := judge_rows(report):
        lines += ["", "the judge by steps, from a few scored files of each window"]
        lines += [f"  {line}" for line in columns(windows)]
    plots = [
        (report["reward_names"]["train"] if name == "reward" else NAMES.get(name, name), points)
        for name, points in report["series"].items()
        if points and (name == "reward" or any(value for _, value in points))  # no plots of zeros
    ]
    if plots:
        lines += ["", "training: first value, every step, last value"]
        lines += [f"  {name:22s} {_spark(points)}" for name, points in plots]
    head = "what went wrong, and what to try" if report["findings"] else "nothing went wrong that the numbers show"
    lines += ["", head]
    for finding in report["findings"]:
        lines += [f"  step {span(finding)}: {KINDS[finding['kind']]}: {finding['text']}"]
        lines += [f"    next to it: {reason['text']}" for reason in finding["reasons"]]
        lines += [f"    try: {cure}" for cure in cures(finding)]
    return lines


# --- shared by text and page ------------------------------------------------------------------------------------------


def state(report: Report) -> str:
    """Example: "step 24 of 24, finished; last written 2026-11-22 12:01 UTC"."""
    wanted, done = report["wanted_steps"], report["num_steps"]
    text = f"step {done}" if wanted is None else f"step {done} of {wanted}"
    if wanted is not None and done >= wanted:
        text += ", finished"
    try:
        when = datetime.fromtimestamp(report["updated"] or 0, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError, OSError):  # outside of the calendar's range
        when = "at no known time"
    return f"{text}; last written {when}" if report["updated"] else f"{text}; nothing measured yet"


def facts(report: Report) -> list[tuple[str, str]]:
    """Returns (name, value) lines: configuration, best and last checkpoint, rollouts, time, cost, gain."""
    lines = [("made with", ", ".join(f"{name} {value}" for name, value in report["made_with"].items()))]
    if report["warm_up"]:
        shown = list(report["warm_up"].items())[:6]
        lines.append(("warm-up", ", ".join(f"{name} {value:.4g}" for name, value in shown)))
    names = report["reward_names"]
    lines += [("best", _kept(report["best"], names)), ("last", _kept(report["last"], names))]
    lines += [("offers", report["offered"]), ("gained", _gain(report["gain"], names))]
    lines += [("rollouts", _rollouts(report["rollouts"])), ("weights", _proofs(report["proofs"]))]
    lines += [("time", _time(report["seconds"])), ("judge", _judge(report["judge"]))]
    return [(name, value) for name, value in lines if value]


def _kept(kept: Mapping[str, Any] | None, names: Mapping[str, str]) -> str:
    if kept is None:
        return ""
    reward = "not evaluated" if kept["reward"] is None else f"{names['eval']} {kept['reward']:.3f}"
    return f"step {kept['step']}, {reward}, {kept['checkpoint'] or 'checkpoint not kept'}"


def _rollouts(rollouts: Mapping[str, Any]) -> str:
    num = rollouts["num"]
    if not num:
        return ""
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in list(rollouts["failed"].items())[:5])
    failed = f"{rollouts['num_failed']:,} failed ({rollouts['num_failed'] / num:.1%}{': ' if kinds else ''}{kinds})"
    return (
        f"{num:,} in training, {failed}, {rollouts['num_limited']:,} at a limit ({rollouts['num_limited'] / num:.1%})"
    )


def _proofs(proofs: Mapping[str, int]) -> str:
    if not (undecided := proofs.get("undecided", 0)):
        return ""
    steps = f"{undecided} of {proofs['proven'] + undecided} steps"
    return f"in {steps} the change of the engine's adapter was below rounding, so the proof decided nothing"


def _time(seconds: Mapping[str, float]) -> str:
    total = sum(seconds.values())
    shares = ", ".join(f"{name} {value / total:.0%}" for name, value in seconds.items()) if total else ""
    return f"{duration(total)}: {shares}" if total else ""


def _judge(judge: Mapping[str, Any] | None) -> str:
    if judge is None:
        return ""
    cost = "price unknown" if judge["usd"] is None else f"${judge['usd']:.4f}"
    return f"{judge['calls']:,} calls, {judge['tokens']:,} tokens, {cost}"


def _gain(gain: Mapping[str, Any] | None, names: Mapping[str, str]) -> str:
    """Example: "+0.447 evaluation reward from step 0 to step 18 in 2 min, 4,608 rollouts: 0.20 a minute, ..."."""
    if gain is None:
        return ""
    first, best = gain["first"]["step"], gain["best"]["step"]
    spent = f"{duration(gain['minutes'] * 60)} and {gain['rollouts']:,} rollouts"
    rates = [("per_minute", "a minute"), ("per_1000_rollouts", "per 1,000 rollouts"), ("per_usd", "a dollar")]
    shown = ", ".join(f"{gain[rate]:.3g} {name}" for rate, name in rates if gain[rate] is not None)
    name = names["eval" if gain["of"] == "evaluation" else "train"]
    text = f"{gain['points']:+.3f} {gain['of']} {name} from step {first} to {best} in {spent}"
    return f"{text}: {shown}" if shown else text


def duration(seconds: float) -> str:
    """Example: "2 min 54 s"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours:,} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.3g} s"


def evaluation_rows(report: Report, *, limit: int = MAX_ROWS) -> list[tuple[str, str, str]]:
    """Returns up to `limit` rows (step, reward, note): both ends, the best, and others at equal distances."""
    done = report["evaluations"]
    best = report["best"]["step"] if report["best"] else None
    evenly = {round(index * (len(done) - 1) / max(limit - 2, 1)) for index in range(limit - 1)}
    rows = []
    for index, each in enumerate(done):
        if index in evenly or each["step"] == best:
            num = f"{each['num_scenarios']:,} scenarios" if each["num_scenarios"] else ""
            note = " ".join(filter(None, [num, "best" * (each["step"] == best)]))
            rows.append((str(each["step"]), _interval(each["reward"]), note))
    return rows


def _interval(point: Mapping[str, Any] | None) -> str:
    if point is None:
        return "no reward"
    return f"{point['mean']:.3f}" + ("" if point["low"] is None else f" [{point['low']:.3f}, {point['high']:.3f}]")


def judge_rows(report: Report) -> Sequence[Sequence[str]]:
    """Returns a header and a row per window and judge; [] without figures."""
    rows = [["steps", "judge", "spread of a vote", "order bias", "reliability", "of one vote"]]
    for each in report["judge_windows"]:
        judge, sure = each["judge"], each["judge"]["reliability"] or {"all_votes": None, "one_vote": None}
        measures = map(_measure, (judge["order_bias"], sure["all_votes"], sure["one_vote"]))
        spread = "" if judge["spread"] is None else f"{judge['spread']:.3f}"
        name = f"{judge['judge']} {judge['model'] or ''}".rstrip()
        rows.append([f"{each['first']} to {each['last']}", name, spread, *measures])
    return rows if len(rows) > 1 else []


def promised_rows(report: Report) -> Sequence[Sequence[str]]:
    """Returns a header and a row per promised number; [] without a promise, or before the end of the run."""
    rows = [["", "promised", "80 % interval", "happened", ""]]
    for each in report["promised"]:
        name, kept = each["name"], "inside" if each["is_inside"] else "outside"
        rows.append([name, *promised_cells(name, each["promised"]), _of_promise(name)(each["happened"]), kept])
    return rows if len(rows) > 1 else []


def promised_cells(name: str, expected: Mapping[str, float]) -> list[str]:
    """Returns a promised number and its interval. Example: ["2 min 54 s", "2 min 1 s to 4 min 2 s"]"""
    low, value, high = (_of_promise(name)(expected[end]) for end in ("low", "value", "high"))
    return [value, f"{low} to {high}"]


def _of_promise(name: str) -> Callable[[float], str]:
    return {"tokens": "{:,.0f}".format, "usd": "${:.4f}".format}.get(name, duration)


def _measure(each: Mapping[str, Any] | None) -> str:
    return "" if each is None else f"{each['value']:.3f} [{each['low']:.3f}, {each['high']:.3f}]"


def span(finding: Mapping[str, Any]) -> str:
    """Example: "20 to 24"."""
    return str(finding["step"]) if finding["step"] == finding["until"] else f"{finding['step']} to {finding['until']}"


def cures(finding: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys([reason["cure"] for reason in finding["reasons"]] or [finding["cure"]]))


def _spark(points: Sequence[Sequence[float]]) -> str:
    """Example: " 0.31 ▁▃▅▇█ 0.7"; each character is the mean of neighboring steps."""
    values = [value for _, value in points]
    return f"{values[0]:9.3g} {spark(values, WIDTH):{WIDTH}s} {values[-1]:9.3g}"


def spark(values: Sequence[float], width: int, *, bars: str = BARS) -> str:
    """Returns the values as at most `width` characters, each the mean of neighboring values."""
    num = min(width, len(values))
    parts = [values[len(values) * i // num : len(values) * (i + 1) // num] for i in range(num)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means, default=0.0), max(means, default=0.0)
    scale = (len(bars) - 1) / (high - low) if high > low else 0.0
    return "".join(bars[round((mean - low) * scale)] for mean in means)
