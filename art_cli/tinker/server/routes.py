"""Routes of the Tinker protocol for SDK 0.24.1 (JSON) and later (protobuf), one method per path.

Requests with side effects are answered immediately with an id, and the client polls for the result by this id. A
model's requests run in numerical order.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse

from art_cli.chat.chat_errors import ChatError, invalid
from art_cli.chat.reading import convert, decode_object
from art_cli.chat.requests import Json
from art_cli.runtime.threads import call_in_thread
from art_cli.tinker.server import passes, wire
from art_cli.tinker.server.base_model import Parts
from art_cli.tinker.server.checkpoint_store import Place, RunNotes, make_notes, parse, place, tar_length, tar_pieces
from art_cli.tinker.server.futures import Failure, plain_answer
from art_cli.tinker.server.models import AdamParams, NewModel, SaveTo, describe
from art_cli.tinker.server.samplers import SampleRequest
from art_cli.tinker.server.sessions import BackendState, ClientSession
from art_cli.tinker.server.wire import reply

Record = TypeVar("Record")

POLL_S = 20.0  # maximum wait for a result; the SDK times out after 45 s
PAUSED_S = 3.0  # maximum wait for a queued request, so its client learns the reason sooner


class Routes:
    """Each method receives the request and the client's owner name."""

    def __init__(self, state: BackendState) -> None:
        self.state = state

    async def _asked(self, http: Request, kind: type[Record]) -> Record:
        """Returns the decoded body. Raises ChatError 400 for invalid bodies."""
        return convert(await self.state.bodies.fields(http), kind)

    async def healthz(self, http: Request, owner: str) -> Response:
        return reply({"status": "ok"})

    async def capabilities(self, http: Request, owner: str) -> Response:
        supported = {"model_name": self.state.base.name, "max_context_length": self.state.base.max_length}
        own = {"loss_fn_inputs": passes.EXTRA, "is_lora": not self.state.base.is_whole}  # read by art, not by the SDK
        return reply({"supported_models": [{**supported, "trainable": True, "sampleable": True, **own}]})

    async def client_config(self, http: Request, owner: str) -> Response:
        """Selects JSON where the SDK supports it, and single-request loading from checkpoints."""
        await self.state.bodies.fields(http)
        return reply(
            {
                "pjwt_auth_enabled": False,
                "credential_default_source": "api_key",
                "proto_write_fwdbwd": False,
                "proto_compress_fwdbwd": False,
                "create_model_via_load_weights": True,
                "fwdbwd_max_chunk_len": self.state.limits.data,
                # Sends an update's data in one request where possible, so that packs equal those of local training.
                "fwdbwd_max_chunk_bytes_count": self.state.limits.body_bytes // 2,
            }
        )

    async def dynamic_config(self, http: Request, owner: str) -> Response:
        await self.state.bodies.fields(http)
        return reply({"refresh_interval_sec": 300, "sample_cancel_enabled": True})

    async def telemetry(self, http: Request, owner: str) -> Response:
        await self.state.bodies.fields(http)
        return reply({"status": "accepted"})

    # --- sampling -----------------------------------------------------------------------------------------------------

    async def create_sampling_session(self, http: Request, owner: str) -> Response:
        asked = await self._asked(http, wire.NewSampler)
        self.state.sessions.active(asked.session_id, owner)
        self.state.base.check(asked.base_model)
        if asked.base_model is None and asked.model_path is None:
            raise invalid("base_model or model_path: name one of them")
        id = f"{asked.session_id}:sample:{asked.sampling_session_seq_id}"
        await self.state.samplers.add(id, owner, None if asked.model_path is None else parse(asked.model_path))
        return reply({"type": "create_sampling_session", "sampling_session_id": id})

    async def get_sampler(self, http: Request, owner: str) -> Response:
        sampler = self.state.samplers.get(http.path_params["id"], owner)
        return reply({"sampler_id": sampler.id, "base_model": self.state.base.name, "model_path": sampler.model_path})

    async def asample(self, http: Request, owner: str) -> Response:
        body = await self.state.bodies.raw(http)
        asked: SampleRequest = await self.state.bodies.reader.read(lambda: convert(decode_object(body), SampleRequest))
        digest = wire.digest_of(http, body)
        policy, request = self.state.samplers.prepare(asked, owner)
        session = asked.sampling_session_id
        numbered = session is not None and asked.seq_id is not None
        id = f"{session}:{asked.seq_id}" if numbered else f"sample:{self.state.downloads.token()}"
        future, is_new = self.state.futures.add(id, owner, digest)
        if is_new:

            def on_wait(reason: str) -> None:
                future.waits_for = reason

            wants_prompt, last_n = bool(asked.prompt_logprobs), asked.prompt_logprobs_last_n
            work = self.state.samplers.sample(
                policy, request, last_n=last_n, wants_prompt=wants_prompt, on_wait=on_wait
            )
            self.state.futures.start(future, work)
        names = [f"{id}:{number}" for number in range(asked.num_samples)]
        return reply({"request_id": id, "sample_sequence_ids": names})

    # --- results ------------------------------------------------------------------------------------------------------

    async def retrieve(self, http: Request, owner: str) -> Response:
        """Returns a request's result. If none is ready in time, returns try_again and the reason for waiting."""
        asked = await self._asked(http, wire.Retrieve)
        future = self.state.futures.get(asked.request_id, owner)
        if not await self.state.futures.wait(future, PAUSED_S if future.waits_for else POLL_S):
            return reply(wire.try_again(future))
        result = future.result
        assert result is not None
        self.state.futures.mark_fetched(future)
        if isinstance(result, Failure):
            return reply({"error": result.message, "category": "user" if result.is_users else "server"})
        if result.as_proto is not None and wire.PROTO in http.headers.get("accept", ""):
            return Response(await call_in_thread(result.as_proto), media_type=wire.PROTO)
        return reply(await call_in_thread(result.as_json))

    async def cancel(self, http: Request, owner: str) -> Response:
        asked = await self._asked(http, wire.Retrieve)
        self.state.futures.cancel(self.state.futures.get(asked.request_id, owner))
        return reply({})

    # --- sessions: made, kept alive, found and ended ------------------------------------------------------------------

    async def create_session(self, http: Request, owner: str) -> Response:
        asked = await self._asked(http, wire.NewSession)
        session = self.state.sessions.add(owner, asked.user_metadata, asked.display_name)
        return reply({"type": "create_session", "session_id": session.id})

    async def heartbeat(self, http: Request, owner: str) -> Response:
        self.state.sessions.active((await self._asked(http, wire.OfSession)).session_id, owner)
        return reply({"type": "session_heartbeat"})

    async def finish_session(self, http: Request, owner: str) -> Response:
        """Ends the session: unloads its models and keeps its checkpoints."""
        session = self.state.sessions.get(http.path_params["id"], owner)
        fields = await self.state.bodies.fields(http)
        reason = fields.get("reason")
        if session.ended is None:
            session.ended = str(reason.get("type", "ended") if isinstance(reason, dict) else "ended")[:100]
            await self.state.end(session)
        return reply({})

    async def list_sessions(self, http: Request, owner: str) -> Response:
        offset, limit = wire.page(http)
        found = self.state.sessions.of(owner)[offset : offset + limit]
        return reply({"sessions": [session.id for session in found]})

    async def search_sessions(self, http: Request, owner: str) -> Response:
        asked = await self._asked(http, wire.Search)
        words = (asked.display_name or "").lower().split()
        wanted = asked.user_metadata.items()
        found = [
            session
            for session in self.state.sessions.of(owner)
            if (asked.session_id in (None, session.id))
            and wanted <= (session.user_metadata or {}).items()
            and all(word in (session.display_name or "").lower() for word in words)
        ]
        shown = found[: min(asked.limit, wire.MAX_PAGE)]

        def summaries() -> list[Json]:
            runs = self.state.store.runs(owner)
            return [self._summary(each, [run for run in runs if run.id.startswith(f"{each.id}:")]) for each in shown]

        return reply({"sessions": await call_in_thread(summaries), "next_cursor": None})

    def _summary(self, session: ClientSession, runs: list[RunNotes]) -> Json:
        kept = [notes for run in runs for _, notes in self.state.store.checkpoints(run.id)]
        return {
            "session_id": session.id,
            "created_at": wire.moment(session.created),
            "owner": session.owner,
            "project_id": "",
            "status": {"type": "active"} if session.ended is None else None,
            "checkpoints_count": len(kept),
            "display_name": session.display_name,
            "user_metadata": session.user_metadata,
            "checkpoint_storage_bytes": sum(notes.num_bytes for notes in kept),
        }

    async def get_session(self, http: Request, owner: str) -> Response:
        session = self.state.sessions.get(http.path_params["id"], owner)
        return reply(
            {
                "training_run_ids": [id for id in self.state.models.models if id.startswith(f"{session.id}:")],
                "sampler_ids": [id for id in self.state.samplers.samplers if id.startswith(f"{session.id}:")],
                "user_metadata": session.user_metadata,
                "display_name": session.display_name,
            }
        )

    # --- models: made, trained ----------------------------------------------------------------------------------------

    async def create_model(self, http: Request, owner: str) -> Response:
        fields, digest = await self.state.bodies.signed(http)
        asked = convert(fields, wire.CreateModel)
        self.state.sessions.active(asked.session_id, owner)
        self.state.base.check(asked.base_model)
        if asked.lora_config is None:
            raise invalid("lora_config: full fine-tuning is not served; every model is an adapter")
        if asked.optimizer_config.get("type", "adamw") != "adamw":
            raise invalid(f"optimizer_config.type {asked.optimizer_config['type']!r}: only adamw is served")
        lora = asked.lora_config
        new = NewModel(
            asked.session_id,
            asked.model_seq_id,
            lora.rank,
            lora.seed or 0,
            Parts(lora.train_attn, lora.train_mlp),
            user_metadata=asked.user_metadata,
        )
        return reply({"request_id": self.state.models.create(new, owner, digest), "model_id": new.id})

    async def get_info(self, http: Request, owner: str) -> Response:
        asked = await self._asked(http, wire.OfModel)
        model = self.state.models.get(asked.model_id, owner)
        # the SDK loads this tokenizer from the hub or a directory on the client
        data = {"arch": type(self.state.base.weights.model).__name__, "model_name": self.state.base.name}
        return reply(
            {
                "type": "get_info",
                "model_id": asked.model_id,
                "model_name": self.state.base.name,
                "model_data": {**data, "tokenizer_id": self.state.base.weights.base},
                "is_lora": model.run.rank > 0,
                "lora_rank": model.run.rank or None,
            }
        )

    async def unload_model(self, http: Request, owner: str) -> Response:
        fields, digest = await self.state.bodies.signed(http)
        asked = convert(fields, wire.OfModel)
        await self.state.models.unload(asked.model_id, owner)
        future, is_new = self.state.futures.add(f"{asked.model_id}:unload", owner, digest)
        if is_new:
            self.state.futures.settle(future, plain_answer({"model_id": asked.model_id, "type": "unload_model"}))
        return reply({"request_id": future.id})

    async def run_pass(self, http: Request, owner: str, *, backward: bool) -> Response:
        body = await self.state.bodies.raw(http)
        digest = wire.digest_of(http, body)
        try:
            if wire.content_type(http.headers) == wire.PROTO:
                asked = await self.state.bodies.reader.read(passes.of_proto, body)
            else:
                asked = await self.state.bodies.reader.read(lambda: passes.of_json(body, backward=backward))
            id = self.state.models.run_pass(asked, owner, digest)
        except passes.BadPass as error:
            id = self.state.models.refuse(error.model_id, error.seq_id, error, owner, digest, is_pass=backward)
        return reply({"request_id": id})

    async def _in_turn(self, http: Request, owner: str, submit: Callable[[Json, bytes], str]) -> Response:
        """Submits the body and returns the request id. A rejected model request takes its turn and fails then."""
        fields, digest = await self.state.bodies.signed(http)
        try:
            id = submit(fields, digest)
        except ChatError as error:
            if error.status != 400:
                raise
            id = self.state.models.refuse(
                fields.get("model_id"), fields.get("seq_id"), error, owner, digest, is_pass=False
            )
        return reply({"request_id": id})

    async def optim_step(self, http: Request, owner: str) -> Response:
        def submit(fields: Json, digest: bytes) -> str:
            asked = convert(fields, wire.OptimStep)
            if asked.optimizer_params is not None:
                raise invalid("optimizer_params: only adam_params are served")
            return self.state.models.update(
                asked.model_id, asked.seq_id, asked.adam_params or AdamParams(), owner, digest
            )

        return await self._in_turn(http, owner, submit)

    # --- their weights ------------------------------------------------------------------------------------------------

    async def save(self, http: Request, owner: str, *, kind: str) -> Response:
        def submit(fields: Json, digest: bytes) -> str:
            asked = convert(fields, wire.Save)
            if asked.age_encryption_recipients:
                raise invalid("age_encryption_recipients: files are not encrypted here")
            if asked.path is None and kind == "sampler_weights" and asked.sampling_session_seq_id is not None:
                session = asked.model_id.partition(":")[0]
                sampler = f"{session}:sample:{asked.sampling_session_seq_id}"
                return self.state.models.sample_from(asked.model_id, asked.seq_id, sampler, owner, digest)
            if asked.path is None:
                raise invalid("path: a checkpoint needs a name")
            at = place(asked.model_id, kind, asked.path)
            to = SaveTo(at, make_notes(asked.ttl_seconds, asked.user_metadata), asked.overwrite)
            return self.state.models.save(asked.model_id, asked.seq_id, to, owner, digest)

        return await self._in_turn(http, owner, submit)

    async def load_weights(self, http: Request, owner: str) -> Response:
        """Loads into an existing model, or into a new model if session and number are given."""

        def submit(fields: Json, digest: bytes) -> str:
            asked = convert(fields, wire.Load)
            at = parse(asked.path)
            self.state.base.check(asked.base_model)
            if asked.weights_access_token is not None:
                raise invalid("weights_access_token: this server has one account; publish the checkpoint instead")
            if (asked.optimizer_config or {}).get("type", "adamw") != "adamw":
                raise invalid("optimizer_config: only adamw is served")
            if asked.model_id is not None:
                return self.state.models.load(asked.model_id, asked.seq_id, at, asked.optimizer, owner, digest)
            if asked.session_id is None or asked.model_seq_id is None:
                raise invalid("model_id and seq_id are required, or session_id and model_seq_id")
            self.state.sessions.active(asked.session_id, owner)
            new = NewModel(
                asked.session_id,
                asked.model_seq_id,
                source=at,
                with_optimizer=asked.optimizer,
                user_metadata=asked.user_metadata,
            )
            return self.state.models.create(new, owner, digest)

        return await self._in_turn(http, owner, submit)

    # --- training runs and their checkpoints: listed, published, deleted, downloaded ----------------------------------

    async def weights_info(self, http: Request, owner: str) -> Response:
        asked = await self._asked(http, wire.OfPath)
        return reply(await call_in_thread(describe, self.state.store, parse(asked.tinker_path), owner))

    async def list_runs(self, http: Request, owner: str) -> Response:
        offset, limit = wire.page(http)

        def shown() -> Json:
            runs = self.state.store.runs(owner)
            described = [self._run(run) for run in runs[offset : offset + limit]]
            return {"training_runs": described, "cursor": wire.cursor(offset, limit, len(runs))}

        return reply(await call_in_thread(shown))

    async def get_run(self, http: Request, owner: str) -> Response:
        return reply(self._run(self.state.store.run(http.path_params["id"], owner)))

    def _run(self, run: RunNotes) -> Json:
        kept = self.state.store.checkpoints(run.id)
        last = {at.kind: wire.checkpoint_of(at, notes) for at, notes in kept}
        model = self.state.models.models.get(run.id)
        used = model.used if model is not None else max([run.created, *(notes.created for _, notes in kept)])
        return {
            "training_run_id": run.id,
            "base_model": run.base_model,
            "model_owner": run.owner,
            "is_lora": run.rank > 0,
            "corrupted": False,
            "lora_rank": run.rank or None,
            "last_request_time": wire.moment(used),
            "last_checkpoint": last.get("weights"),
            "last_sampler_checkpoint": last.get("sampler_weights"),
            "user_metadata": run.user_metadata,
        }

    async def list_checkpoints(self, http: Request, owner: str) -> Response:
        run = self.state.store.run(http.path_params["id"], owner)
        return reply({"checkpoints": [wire.checkpoint_of(*entry) for entry in self.state.store.checkpoints(run.id)]})

    async def list_all_checkpoints(self, http: Request, owner: str) -> Response:
        offset, limit = wire.page(http)
        store = self.state.store

        def shown() -> Json:
            kept = [wire.checkpoint_of(*each) for run in store.runs(owner) for each in store.checkpoints(run.id)]
            return {"checkpoints": kept[offset : offset + limit], "cursor": wire.cursor(offset, limit, len(kept))}

        return reply(await call_in_thread(shown))

    async def delete_checkpoint(self, http: Request, owner: str) -> Response:
        at = place_of(http)
        self.state.store.owned(at, owner)
        await call_in_thread(self.state.store.delete, at)
        return reply({})

    async def publish(self, http: Request, owner: str) -> Response:
        """Makes a checkpoint readable for all clients of this server. DELETE reverts this."""
        at = place_of(http)
        notes = self.state.store.owned(at, owner)
        notes.is_public = http.method == "POST"
        await call_in_thread(self.state.store.note, at, notes)
        return reply({})

    async def set_ttl(self, http: Request, owner: str) -> Response:
        at = place_of(http)
        asked = await self._asked(http, wire.Ttl)
        notes = self.state.store.owned(at, owner)
        notes.expires = None if asked.ttl_seconds is None else time.time() + asked.ttl_seconds
        await call_in_thread(self.state.store.note, at, notes)
        return reply({})

    async def archive(self, http: Request, owner: str) -> Response:
        """Returns a temporary address for downloading the checkpoint as a single file without a key."""
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
        return reply({"urls": {name: url for name, (url, _) in offers.items()}, "expires": wire.moment(expires)})

    async def download(self, http: Request) -> Response:
        """Returns the offered file. No key is needed, because the address is secret."""
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
