"""`art log`: exports a run's attempts as inspect logs or OpenTelemetry traces."""

import logging
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from art_cli.cli import Json, print_result, records
from art_cli.runtime.errors import UsageError

if TYPE_CHECKING:
    from art_cli.formats.traces.saved import Saved
    from art_cli.formats.traces.spans import Span

log = logging.getLogger(__name__)


def run(
    run: Annotated[
        Path, Argument(metavar="RUN", parser=records, help="A run or a file of trajectories.", show_default=False)
    ],
    is_inspect: Annotated[bool, Option("--inspect", help="Write .eval files for inspect view.")] = False,
    output: Annotated[Path | None, Option("-o", "--output", metavar="DIR", help="Default: RUN/inspect.")] = None,
    otlp: Annotated[str | None, Option("--otlp", metavar="URL", help="Send OpenTelemetry traces.")] = None,
    step: Annotated[int | None, Option("--step", min=0, help="Only this step.")] = None,
    as_json: Json = False,
) -> None:
    """Export a run's attempts to other tools.

    Works for running, killed and finished runs. Running the command again rewrites the same files, and sends the same
    trace ids.

    --inspect writes .eval files, one for each step's training attempts and evaluation: a scenario is a sample, an
    attempt an epoch. They contain scores, explanations, calls, tokens, errors and limits.

    --otlp sends a trace per attempt, in OpenTelemetry's conventions for generative AI, to Langfuse, Phoenix, MLflow,
    Weave or another receiver. Set OTEL_EXPORTER_OTLP_HEADERS=name=value for a key.

    \b
    art log runs/mine --inspect && inspect view --log-dir runs/mine/inspect
    art log runs/mine --inspect -o logs && inspect view bundle --log-dir logs --output-dir page
    art log runs/mine --otlp http://localhost:4318                            an OpenTelemetry collector
    art log runs/mine --otlp http://localhost:6006 --step 40                  Phoenix
    """
    from art_cli.formats.traces.saved import saved_attempts

    if not is_inspect and otlp is None:
        raise UsageError("name what is wanted: --inspect writes files for inspect view, --otlp URL sends traces")
    if output is not None and not is_inspect:
        raise UsageError("-o goes with --inspect")
    saved = saved_attempts(run, step=step)
    result: dict[str, Any] = {}
    if is_inspect:
        result |= _write(saved, output or (run / "inspect" if run.is_dir() else run.with_name(f"{run.stem}-inspect")))
    if otlp is not None:
        result |= _send(saved, otlp)
    lines = []
    if is_inspect:
        num = f"{result['directory']}: {len(result['logs'])} logs, {result['attempts']} attempts"
        lines.append(f"{num}; look at them: inspect view --log-dir {shlex.quote(str(result['directory']))}")
    if otlp is not None:
        lines.append(f"{result['url']}: {result['traces']} traces, {result['spans']} spans")
    print_result(result, "\n".join(lines), as_json)


def _write(saved: "Saved", directory: Path) -> dict[str, Any]:
    from art_cli.formats.traces.inspect_log import log_path, write_log

    logs, num = [], 0
    for part in saved.parts:
        path = log_path(directory, saved, part)
        if written := write_log(path, saved, part):
            log.debug("%s: %d attempts", path, written)
            logs.append(str(path))
            num += written
    return {"directory": str(directory), "logs": logs, "attempts": num}


def _send(saved: "Saved", url: str) -> dict[str, Any]:
    import os

    from art_cli.formats.traces.otlp import OtlpSender, headers_from, traces_url
    from art_cli.formats.traces.saved import skipped
    from art_cli.formats.traces.spans import spans_of

    num = 0

    def spans() -> "Iterator[Span]":
        nonlocal num
        for part in saved.parts:
            for attempt in part.attempts():
                found: list[Span] = []
                with skipped(attempt, part):
                    found = list(spans_of(attempt, saved.source, split=part.split))
                    num += 1
                yield from found

    address = traces_url(url)
    sent = OtlpSender(address, headers_from(os.environ)).send(spans())
    return {"url": address, "traces": num, "spans": sent}
