"""`art import`: converts other tools' traces to grouped trajectories."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from art_cli.cli import Json, print_result
from art_cli.runtime.errors import UsageError, no_such_option

if TYPE_CHECKING:
    from art_cli.formats.importing import Imported


def run(
    sources: Annotated[list[Path], Argument(metavar="SOURCE...", help="JSON, JSON lines, or .eval files.")],
    output: Annotated[Path, Option("-o", "--out", "--output", metavar="FILE", help="A new file.", show_default=False)],
    form: Annotated[str | None, Option("--from", metavar="NAME", help="The format; default: guessed.")] = None,
    group_by: Annotated[str | None, Option("--group-by", metavar="KEY", help="Scenario key: metadata.task.")] = None,
    reward: Annotated[str | None, Option("--reward", metavar="METRIC", help="The score to use as reward.")] = None,
    min_reward: Annotated[float | None, Option("--min-reward", metavar="R", help="Lowest reward.")] = None,
    as_json: Json = False,
) -> None:
    """Read traces of other tools.

    Reads logs of OpenAI or Anthropic calls, OpenEnv's TrainingTrace, verifiers' traces.jsonl, inspect logs and Langfuse
    exports. Writes trajectories, grouped by scenario. Detects the format. Counts and reports unreadable records.

    \b
    art import traces.jsonl -o trajectories.jsonl
    art judge trajectories.jsonl -o scored.jsonl
    art step config.yaml scored.jsonl -o step_0001          # if traces have tokens and logprobs
    art import logs/*.eval -o t.jsonl --reward accuracy     # selects one of several scores
    art import calls.jsonl -o demos.jsonl --min-reward 1    # then: art sft config.yaml demos.jsonl -o warm
    """
    from art_cli.formats import READ
    from art_cli.formats.importing import import_files

    if form is not None and form not in READ:
        raise UsageError(f"--from: {no_such_option('format', form, READ)}")
    done = import_files(sources, output, form=form, group_by=group_by, reward=reward, min_reward=min_reward)
    unread = done.unread.counts
    read = {"records": done.num_records, "attempts": done.num_attempts, "groups": len(done.groups)}
    having = {"with_tokens": done.num_with_tokens, "with_reward": done.num_rewarded, "failed": done.num_failed}
    left = {"below_min_reward": done.num_below, "not_read": unread.total(), "reasons": dict(unread.most_common(20))}
    row = {"output": str(output), **read, "formats": dict(done.formats), **having, **left}
    print_result(row, "\n".join(_as_lines(output, done)), as_json)


def _as_lines(output: Path, done: "Imported") -> list[str]:
    attempts, tokens = done.num_attempts, done.num_with_tokens
    formats = " and ".join(done.formats)
    lines = [f"{output}: {attempts} attempts in {len(done.groups)} groups, of {done.num_records} records ({formats})"]
    if done.unread.counts:
        lines.append(f"{done.unread.counts.total()} of {done.num_records} records were not read: {done.unread}")
    if done.num_below:
        lines.append(f"{done.num_below} attempts below the lowest reward were skipped")
    if done.num_failed:
        lines.append(f"{done.num_failed} attempts have an error; they are counted and not trained on")
    if tokens == attempts:
        lines.append("tokens and logprobs: art step can train on them")
    elif tokens:
        lines.append(f"tokens and logprobs: {tokens} of {attempts} attempts have them; art step trains on these alone")
    else:
        lines.append("no tokens and logprobs: art step cannot train on them; art judge and art sft can use them")
    if done.num_other_temperatures:
        lines.append(
            f"{done.num_other_temperatures} attempts were sampled at another temperature than 1: their logprobs must "
            "belong to that temperature (vLLM: --logprobs-mode processed_logprobs)"
        )
    missing = attempts - done.num_rewarded - done.num_failed
    cure = f"art judge, or --reward with one of {', '.join(sorted(done.scores))}" if done.scores else "art judge"
    lines.append("rewards: every attempt has one" if missing <= 0 else f"rewards: {missing} attempts have none: {cure}")
    alone = sum(size == 1 for size in done.groups.values())
    if alone:
        lines.append(
            f"{alone} groups have one attempt, which nothing can be compared with; --group-by names another key"
        )
    return lines
