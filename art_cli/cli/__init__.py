"""Command names, shared options, and findings.

The command `art X` is the function `run` of `cli/X.py`; MODULES has the exceptions. Its parameters are the
arguments and options, and its docstring is the help text. To keep `--help` fast, modules import heavy packages inside
functions.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from typer import Argument, Option

from art_cli.runtime.errors import UsageError, printable_lines

if TYPE_CHECKING:
    from art_cli.runs.run_checkpoints import Which
    from art_cli.runs.storage.fetch import Wants

NAMES = (
    *("init", "check", "plan", "train", "join", "generate", "judge"),
    *("label", "reward", "step", "sft", "eval", "improve"),
    *("hunt", "prove", "report", "log", "view"),
    *("serve", "gateway", "backend", "export"),
    *("import", "checkpoints", "environments", "scenarios", "doctor"),
)

EXAMPLES = {  # overrides in the help, if a command has no use for train.steps
    **{"check": "model.base=builtin:tiny", "eval": "eval.scenarios=few.jsonl", "generate": "rollout.group_size=2"},
    **{"judge": "judge.votes=3", "scenarios": "judge.budget_usd=2", "hunt": "rollout.max_turns=4"},
    **{"sft": "sft.epochs=3", "reward": "reward.epochs=5", "gateway": "name=other"},
}

MODULES = {"import": "import_traces", "log": "export_log"}  # commands with other file names


def records(text: str) -> Path:
    """Parses a path. For an address (s3://bucket/mine), downloads everything except weights and returns the copy."""
    return _at_hand(text, "records")


def policy(text: str) -> Path:
    """Like `records`, with the selectable checkpoints and the base model."""
    return _at_hand(text, "policy")


def everything(text: str) -> Path:
    """Like `records`, with all checkpoints."""
    return _at_hand(text, "everything")


def named_policy(text: str) -> str:
    """Replaces the address in `[NAME=]CHECKPOINT` by the path of a local copy."""
    name, separator, target = text.partition("=") if "=" in text.partition("://")[0] else ("", "", text)
    return f"{name}{separator}{policy(target)}" if "://" in target else text


def _at_hand(text: str, wants: "Wants") -> Path:
    if "://" not in text:
        return Path(text)
    from art_cli.runs.storage.fetch import fetch

    return fetch(text, wants)


Config = Annotated[Path, Argument(metavar="CONFIG", help="A YAML file.", show_default=False)]
Overrides = Annotated[list[str] | None, Argument(metavar="KEY=VALUE", help="Overrides")]
Json = Annotated[bool, Option("--json", help="Print the result as JSON.")]
Junit = Annotated[Path | None, Option("--junit", metavar="FILE", help="Also write the verdicts as JUnit XML.")]
Markdown = Annotated[Path | None, Option("--markdown", metavar="FILE", help="Also write a summary for a pull request.")]
Link = Annotated[str | None, Option("--link", metavar="URL", help="A link for the summary.")]
Checkpoint = Annotated[
    Path | None,
    Option("--checkpoint", metavar="DIR", parser=policy, help="Checkpoint, RUN/step_4, run (its best), or base."),
]
NewCheckpoint = Annotated[Path, Option("-o", "--output", metavar="DIR", help="The new checkpoint.", show_default=False)]
Gates = Annotated[list[str] | None, Option("--gate", metavar="METRIC>=X", help="Exit 1 if missed (docs/eval.md).")]
Best = Annotated[bool, Option("--best", help="Use a run's best evaluated checkpoint; fail if none was evaluated.")]
Last = Annotated[bool, Option("--last", help="Use a run's newest checkpoint, not its best evaluated one.")]
Base = Annotated[str | None, Option("--base", metavar="MODEL", help="The base model's new location.")]
ApiKey = Annotated[
    str | None,
    Option("--api-key", metavar="KEY", envvar="ART_API_KEY", help="The key for clients.", show_envvar=True),
]
ClientKeyFile = Annotated[Path | None, Option("--api-key-file", metavar="FILE", help="One key per line and client.")]
Host = Annotated[str, Option("--host", help="A non-local address needs an API key.")]
Port = Annotated[int, Option("--port", min=0, max=65535, help="0: any free port.")]
Drain = Annotated[float, Option("--drain", metavar="SECONDS", min=0, help="Time for running requests to finish.")]
MaxBody = Annotated[float, Option("--max-body", metavar="MIB", min=0.001, help="Refuse larger requests with 413.")]


class Finding(NamedTuple):
    """The result of one check. Example: Finding("disk", False, "3.1 GB needed, 1.2 GB free", "free some, or ...")."""

    name: str
    is_good: bool
    message: str
    cure: str = ""
    is_missing: bool = False  # True for an optional package that is not installed

    @property
    def state(self) -> str:
        return "missing" if self.is_missing else "ok" if self.is_good else "broken"


def which_checkpoint(is_best: bool, is_last: bool) -> "Which":
    """Maps --best and --last to a checkpoint choice. Raises UsageError for both."""
    if is_best and is_last:
        raise UsageError("--best and --last: one at a time")
    return "best" if is_best else "newest" if is_last else "offered"


def write(text: str) -> None:
    """Writes lines to stdout immediately, without control characters."""
    sys.stdout.write(printable_lines(text.rstrip("\n")) + "\n")
    sys.stdout.flush()


def print_result(result: object, text: str, as_json: bool) -> None:
    """Prints a result as one line of JSON, or as text."""
    write(json.dumps(result) if as_json else text)


def print_findings(findings: Sequence[Finding], as_json: bool = False) -> None:
    """Prints findings and cures as lines ("!" marks a doubt), or as a JSON list."""
    if as_json:
        write(json.dumps([finding._asdict() | {"state": finding.state} for finding in findings]))
        return
    words = ["missing" if f.is_missing else "FAIL" if not f.is_good else "!" if f.cure else "ok" for f in findings]
    width = max(map(len, [*words, "FAIL"]))
    for finding, word in zip(findings, words, strict=True):
        cure = f"\n{'':{width}s} {'':10s} -> {finding.cure}" if finding.cure else ""
        write(f"{word:{width}s} {finding.name:10s} {finding.message}{cure}")
