"""`art view`: shows runs and trajectories in a local web page or an HTML file."""

import contextlib
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from art_cli.cli import Port, records
from art_cli.runtime.errors import UsageError

if TYPE_CHECKING:
    from art_cli.view.page_answers import Answers

log = logging.getLogger(__name__)

PORT = 7860


def run(
    paths: Annotated[
        list[Path], Argument(metavar="PATH...", parser=records, help="Runs, or JSONL files.", show_default=False)
    ],
    port: Port = PORT,
    host: Annotated[str, Option("--host", help="At another address, others can read everything.")] = "127.0.0.1",
    html: Annotated[Path | None, Option("--html", metavar="FILE", help="Write one HTML file and exit.")] = None,
    max_mb: Annotated[float, Option("--max-mb", min=0.1, help="Size limit for the HTML file.")] = 64.0,
    endpoint: Annotated[str | None, Option("--endpoint", metavar="URL", help="A model to chat with.")] = None,
    model: Annotated[str | None, Option("--model", metavar="NAME", help="The endpoint's model.")] = None,
    drawing: Annotated[Path | None, Option("--drawing", metavar="FILE", help="State drawing; docs/view.md.")] = None,
    is_open: Annotated[bool, Option("--open/--no-open", help="Open a browser.")] = True,
) -> None:
    """Show curves, attempts and conversations in a page.

    \b
    art view runs/mine                      follows the run while it trains; Ctrl-C exits
    art view runs/a runs/b                  common curves, and differences of configurations
    art view runs                           every run in the directory
    art view s3://bucket/prefix/mine        the current state in the store
    art view trajectories.jsonl             any file of trajectories: ours, OpenPipe ART's, {"messages": [...]} lines
    art view runs/mine --html mine.html     one file that needs no network
    ART_API_KEY=... art view runs/mine --endpoint http://127.0.0.1:8000/v1
                                            with a chat next to every trajectory (see art serve)

    Uploads nothing. Writes only the --html file and your labels (docs/trust.md).
    """
    from art_cli.chat.api_keys import is_loopback
    from art_cli.view.page_answers import Answers
    from art_cli.view.sources import Sources

    if model is not None and endpoint is None:
        raise UsageError("--model: name its --endpoint too")
    if html is not None and endpoint is not None:
        raise UsageError("--endpoint: a page in a file cannot ask it; leave it out, or leave out --html")
    if endpoint is not None and not is_loopback(host):
        raise UsageError(f"--endpoint: everyone who reaches {host} could spend your key; leave out --host")
    if drawing is not None and not drawing.is_file():
        raise UsageError(f"--drawing {drawing}: no such file")
    answers = Answers(Sources(paths), has_chat=endpoint is not None and html is None, drawing=drawing)
    if html is not None:
        from art_cli.view.page_file import write_page

        written = write_page(answers, html, max_bytes=int(max_mb * 1e6))
        sys.stdout.write(f"{written}\n")
        return
    from art_cli.runtime import threads

    if not is_loopback(host):
        log.warning("--host %s: everyone who reaches this address can read these files without a key", host)
    with contextlib.suppress(KeyboardInterrupt):
        threads.run(_serve(answers, host, port, endpoint, model, is_open=is_open))


async def _serve(
    answers: "Answers", host: str, port: int, endpoint: str | None, model: str | None, *, is_open: bool
) -> None:
    import asyncio

    from art_cli.chat.http_server import serve
    from art_cli.view.view_app import build_app

    relay = None
    if endpoint is not None:
        from art_cli.view.chat import ChatRelay, find_key, find_model

        key = find_key()
        relay = ChatRelay(endpoint, model or await find_model(endpoint, key), key)
    answers.start()
    try:
        async with serve(build_app(answers, host=host, chat=relay), host, port, grace_s=1) as root:
            sys.stdout.write(f"{root}/\n")
            sys.stdout.flush()
            has_screen = sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
            if is_open and has_screen and sys.stdout.isatty():
                import webbrowser

                with contextlib.suppress(webbrowser.Error):
                    webbrowser.open(f"{root}/")
            await asyncio.Event().wait()
    finally:
        answers.close()
        if relay is not None:
            await relay.close()
