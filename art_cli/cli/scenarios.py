"""`art scenarios`: a language model writes tasks for the tools of an MCP server."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from art_cli.cli import Json, Overrides
from art_cli.runtime.errors import JudgeError


def run(
    kind: Annotated[str, typer.Argument(metavar="mcp", help="What the tasks are for: mcp.", show_default=False)],
    place: Annotated[
        str, typer.Argument(metavar="COMMAND_OR_URL", help="As behind mcp/ in rollout.environment.", show_default=False)
    ],
    overrides: Overrides = None,
    output: Annotated[Path, typer.Option("-o", "--output", "--out", metavar="FILE", help="Where they go.")] = Path(
        "scenarios.jsonl"
    ),
    num: Annotated[int, typer.Option("--num", min=1, max=5000, help="How many tasks the file has in the end.")] = 50,
    model: Annotated[str | None, typer.Option("--model", metavar="NAME", help="Who writes: as judge.model.")] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="CONFIG", help="Use its judge's model and its environment's args."),
    ] = None,
    is_more: Annotated[bool, typer.Option("--append", help="Keep the tasks of the file, and add to them.")] = False,
    as_json: Json = False,
) -> None:
    """Have a model write tasks for an MCP server.

    Each task has an id, the tools that it needs and a difficulty from 1 to 5. They are spread over the tools and the
    difficulties, and a task that nearly repeats another is left out. The file is what rollout.scenarios
    names, with a judge such as RULER, because the tasks have no answer. The model is called as judges are, so judge.*
    sets its address, its budget and its patience.

    \b
    art scenarios mcp "python server.py" -o tasks.jsonl --num 100 judge.budget_usd=2
    art scenarios mcp https://host/mcp -o tasks.jsonl --num 200 --append
    """
    from art_cli.cli.scenario_writing import as_text, write

    written = write(
        kind, place, output, num=num, model=model, config=config, overrides=overrides or [], is_more=is_more
    )
    sys.stdout.write(json.dumps(written.as_dict()) + "\n" if as_json else as_text(written))
    if written.problem:
        raise JudgeError(f"fewer than {num} tasks: {written.problem}")
