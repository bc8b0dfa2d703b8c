"""`art scenarios`: a language model writes tasks for the tools of an MCP server."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from art_cli.cli import Json, Overrides, print_result
from art_cli.runtime.errors import JudgeError


def run(
    kind: Annotated[str, Argument(metavar="mcp", help="The kind of tasks: mcp.", show_default=False)],
    place: Annotated[str, Argument(metavar="COMMAND_OR_URL", help="MCP server: command or URL.", show_default=False)],
    overrides: Overrides = None,
    output: Annotated[Path, Option("-o", "--output", "--out", metavar="FILE", help="The file of tasks.")] = Path(
        "scenarios.jsonl"
    ),
    num: Annotated[int, Option("--num", min=1, max=5000, help="Total number of tasks in the file.")] = 50,
    model: Annotated[str | None, Option("--model", metavar="NAME", help="The writing model, as judge.model.")] = None,
    config: Annotated[Path | None, Option("--config", metavar="CONFIG", help="Use its judge and environment.")] = None,
    is_more: Annotated[bool, Option("--append", help="Add tasks to an existing file.")] = False,
    as_json: Json = False,
) -> None:
    """Have a model write tasks for an MCP server.

    Tasks have an id, required tools, and a difficulty from 1 to 5, and cover all tools and difficulties without near
    duplicates. Use the file as rollout.scenarios. The tasks have no answers, so score them with a judge such as RULER.
    Settings under judge.* apply to the writing model: address, budget, timeouts.

    \b
    art scenarios mcp "python server.py" -o tasks.jsonl --num 100 judge.budget_usd=2
    art scenarios mcp https://host/mcp -o tasks.jsonl --num 200 --append
    """
    from art_cli.cli.scenario_writing import as_text, write

    written = write(
        kind, place, output, num=num, model=model, config=config, overrides=overrides or [], is_more=is_more
    )
    print_result(written.as_dict(), as_text(written), as_json)
    if written.problem:
        raise JudgeError(f"fewer than {num} tasks: {written.problem}")
