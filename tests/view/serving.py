"""The page's server over files of a test: `asking(paths)` yields what asks it over HTTP."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from art_cli.chat.http_server import serve
from art_cli.view.chat import ChatRelay
from art_cli.view.page_answers import Answers
from art_cli.view.sources import Sources
from art_cli.view.view_app import build_app


class Asking:
    """Asks a server. `answers` are the same answers without HTTP."""

    def __init__(self, client: httpx.AsyncClient, answers: Answers) -> None:
        self.client, self.answers = client, answers

    async def get(self, *parts: object, **query: Any) -> Any:
        """The answer to the URL of these parts, each escaped. Whatever it is, it is JSON of status 200 or 4xx."""
        response = await self.client.get("/api/" + "/".join(quote(str(part), safe="") for part in parts), params=query)
        assert response.status_code == 200 or 400 <= response.status_code < 500, response.text
        return response.json()


@asynccontextmanager
async def asking(paths: Iterable[Path], *, chat: ChatRelay | None = None) -> AsyncIterator[Asking]:
    answers = Answers(Sources(list(paths)), has_chat=chat is not None)
    answers.read_all()
    async with (
        serve(build_app(answers, host="127.0.0.1", chat=chat), grace_s=1) as root,
        httpx.AsyncClient(base_url=root, timeout=30) as client,
    ):
        yield Asking(client, answers)
