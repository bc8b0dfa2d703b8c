"""The routes of training runs and their checkpoints: listed, published, deleted, downloaded."""

import time
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse

from art_cli.chat.chat_errors import invalid
from art_cli.runtime.threads import call_in_thread
from art_cli.tinker.server.checkpoint_store import Place, RunNotes, parse, place, tar_length, tar_pieces
from art_cli.tinker.server.models import describe
from art_cli.tinker.server.ranges import convert
from art_cli.tinker.server.sessions import BackendState
from art_cli.tinker.server.wire import OfPath, Ttl, checkpoint_of, cursor, moment, page, reply

Json = dict[str, Any]


class CheckpointRoutes:
    """Each method gets the request and its owner."""

    def __init__(self, state: BackendState) -> None:
        self.state = state

    async def weights_info(self, http: Request, owner: str) -> Response:
        asked = convert(await self.state.bodies.fields(http), OfPath)
        return reply(await call_in_thread(describe, self.state.store, parse(asked.tinker_path), owner))

    async def list_runs(self, http: Request, owner: str) -> Response:
        offset, limit = page(http)

        def shown() -> Json:
            runs = self.state.store.runs(owner)
            described = [self._run(run) for run in runs[offset : offset + limit]]
            return {"training_runs": described, "cursor": cursor(offset, limit, len(runs))}

        return reply(await call_in_thread(shown))

    async def get_run(self, http: Request, owner: str) -> Response:
        return reply(self._run(self.state.store.run(http.path_params["id"], owner)))

    def _run(self, run: RunNotes) -> Json:
        kept = self.state.store.checkpoints(run.id)
        last = {at.kind: checkpoint_of(at, notes) for at, notes in kept}
        model = self.state.models.models.get(run.id)
        used = model.used if model is not None else max([run.created, *(notes.created for _, notes in kept)])
        return {
            "training_run_id": run.id,
            "base_model": run.base_model,
            "model_owner": run.owner,
            "is_lora": run.rank > 0,
            "corrupted": False,
            "lora_rank": run.rank or None,
            "last_request_time": moment(used),
            "last_checkpoint": last.get("weights"),
            "last_sampler_checkpoint": last.get("sampler_weights"),
            "user_metadata": run.user_metadata,
        }

    async def list_checkpoints(self, http: Request, owner: str) -> Response:
        run = self.state.store.run(http.path_params["id"], owner)
        return reply({"checkpoints": [checkpoint_of(*entry) for entry in self.state.store.checkpoints(run.id)]})

    async def list_all_checkpoints(self, http: Request, owner: str) -> Response:
        offset, limit = page(http)
        store = self.state.store

        def shown() -> Json:
            kept = [checkpoint_of(*each) for run in store.runs(owner) for each in store.checkpoints(run.id)]
            return {"checkpoints": kept[offset : offset + limit], "cursor": cursor(offset, limit, len(kept))}

        return reply(await call_in_thread(shown))

    async def delete_checkpoint(self, http: Request, owner: str) -> Response:
        at = place_of(http)
        self.state.store.owned(at, owner)
        await call_in_thread(self.state.store.delete, at)
        return reply({})

    async def publish(self, http: Request, owner: str) -> Response:
        """Lets every client of this server read the checkpoint; DELETE takes that back."""
        at = place_of(http)
        notes = self.state.store.owned(at, owner)
        notes.is_public = http.method == "POST"
        await call_in_thread(self.state.store.note, at, notes)
        return reply({})

    async def set_ttl(self, http: Request, owner: str) -> Response:
        at = place_of(http)
        asked = convert(await self.state.bodies.fields(http), Ttl)
        notes = self.state.store.owned(at, owner)
        notes.expires = None if asked.ttl_seconds is None else time.time() + asked.ttl_seconds
        await call_in_thread(self.state.store.note, at, notes)
        return reply({})

    async def archive(self, http: Request, owner: str) -> Response:
        """Returns an address to download the checkpoint as one file, for a while, without a key."""
        path = await call_in_thread(self.state.store.find, place_of(http), owner)
        url, expires = self.state.downloads.offer(str(http.base_url), path)
        headers = {"location": url, "expires": format_datetime(datetime.fromtimestamp(expires, UTC), usegmt=True)}
        return Response(status_code=302, headers=headers)

    async def external_urls(self, http: Request, owner: str) -> Response:
        at = place_of(http)
        if at.kind != "external_weights":
            raise invalid(f"{at.uri}: files of external weights only are offered one by one; take its archive")
        path = await call_in_thread(self.state.store.find, at, owner)
        offers = {
            str(file.relative_to(path)): self.state.downloads.offer(str(http.base_url), file)
            for file in sorted(path.rglob("*"))
            if file.is_file()
        }
        expires = max((expires for _, expires in offers.values()), default=time.time())
        return reply({"urls": {name: url for name, (url, _) in offers.items()}, "expires": moment(expires)})

    async def download(self, http: Request) -> Response:
        """Returns the offered file. It needs no key, because its address is secret."""
        path = self.state.downloads.take(http.path_params["token"])
        if path.is_file():
            return FileResponse(path, filename=path.name)
        headers = {
            "content-length": str(tar_length(path)),
            "content-disposition": f'attachment; filename="{path.name}.tar"',
        }
        return StreamingResponse(tar_pieces(path), headers=headers, media_type="application/x-tar")


def place_of(http: Request) -> Place:
    return place(*(http.path_params[name] for name in ("id", "kind", "name")))
