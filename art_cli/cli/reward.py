"""`art reward`: trains a judge of one's own on scored attempts and labels."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from art_cli.cli import Gates, Json, Overrides, print_result
from art_cli.runtime.errors import DataError, UsageError

if TYPE_CHECKING:
    from art_cli.loop.reward_run import RewardResult

NAMES = {"agreement": "held out", "present": "present policy"}


def run(
    data: Annotated[Path, Argument(metavar="DATA...", help="Scored files, labels, or runs.", show_default=False)],
    output: Annotated[Path, Option("-o", "--output", metavar="DIR", help="The new judge.", show_default=False)],
    overrides: Overrides = None,
    base: Annotated[str | None, Option("--base", metavar="MODEL", help="Default: the base of the data's run.")] = None,
    present: Annotated[
        Path | None, Option("--present", metavar="FILE", help="Also measure on these scored attempts.")
    ] = None,
    num_next: Annotated[int, Option("--next", metavar="N", min=0, help="With --present: pairs to label next.")] = 0,
    gates: Gates = None,
    as_json: Json = False,
) -> None:
    """Train your own judge on rewards and labels.

    The judge learns the order of attempts within a group, from rewards (scored.jsonl) and labels (labels.jsonl of art
    label). It also learns rewards from 0 to 1 that rollouts or users gave. The command prints how often the judge
    orders pairs as its teacher does, ties left out: on held-out scenarios, and with --present on attempts of the
    present policy (agreement on the first says little about the second). Of a long conversation only the last tokens
    count. DIR is a model for `judge: {name: reward_model, model: DIR}`, and is written when training is complete. Keys:
    reward, model, learner.

    \b
    art reward runs/mine/step_000[0-3]/scored.jsonl labels.jsonl -o judge --base builtin:smollm2-135m
    art reward runs/mine -o judge reward.epochs=5 --gate 'agreement.low>=0.9'
    art reward scored.jsonl -o judge --present runs/mine/step_0010/scored.jsonl --gate 'present>=0.9' --next 20
    """
    from art_cli.cli.sft import files_and_settings
    from art_cli.config.compose import load_reward
    from art_cli.loop.evaluate import parse_gate
    from art_cli.loop.reward_run import base_settings, check_output, train_reward

    files, settings = files_and_settings(data, overrides or [])
    parsed = [parse_gate(gate) for gate in gates or []]
    known = [f"{name}{end}" for name in [*NAMES][: 1 + (present is not None)] for end in ("", ".low", ".high")]
    for gate in parsed:
        if gate.metric not in known:
            raise UsageError(f"--gate: no value {gate.metric!r}; there are {', '.join(known)}")
    if present is None and num_next:
        raise UsageError("--next chooses among the attempts of --present FILE")
    check_output(output)
    config = load_reward([*settings, *base_settings(files, base, settings)])
    result = train_reward(config, files, output, present=present, num_next=num_next)
    print_result({"judge": str(output), **result.facts, "next": result.closest}, _as_text(output, result), as_json)
    for gate in parsed:
        name, _, end = gate.metric.partition(".")
        if (found := result.measures[name].get("all")) is None:
            raise DataError(f"no pair that its teacher orders, so {gate} cannot be checked", present or data)
        gate.check(getattr(found, end or "value"))


def _as_text(output: Path, result: "RewardResult") -> str:
    groups, counts = result.facts["groups"], result.facts["counts"]
    kinds = [f"{num} {name}" for name, num in counts.items() if num]
    lines = [f"{output}: learned from {groups['trained']} groups ({', '.join(kinds)}), loss {result.facts['loss']:.3f}"]
    for name, parts in result.measures.items():
        lines.append(f"{name}: pairs in the teacher's order, ties apart, {groups[name]} groups {NAMES[name]}")
        lines += [f"  {part:22} {each.value:.3f} [{each.low:.3f}, {each.high:.3f}]" for part, each in parts.items()]
    if "present" not in result.measures:
        lines.append("present: unknown; attempts of the present policy differ from these: --present FILE measures it")
    scale = ", activation: sigmoid" if counts["values"] else ""
    lines.append(f"use: judge: {{name: reward_model, model: {output}{scale}}}")
    lines += [f"  next: {pair.unit}  {pair.better} or {pair.worse}" for pair in result.closest]
    return "\n".join(lines)
