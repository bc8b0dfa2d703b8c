"""Routes of the server itself, of sessions, of sampling and of results, for SDK 0.24.1 (JSON) and later (protobuf).

A request that changes something is answered with an id at once, and its result is asked for by that id. Sessions are
made, kept alive, found and ended.
"""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from art_cli.chat.chat_errors import invalid
from art_cli.chat.reading import decode_object
from art_cli.runtime.threads import call_in_thread
from art_cli.tinker.server import passes
from art_cli.tinker.server.checkpoint_store import RunNotes, parse
from art_cli.tinker.server.futures import Failure
from art_cli.tinker.server.ranges import convert
from art_cli.tinker.server.samplers import SampleRequest
from art_cli.tinker.server.sessions import BackendState, ClientSession
from art_cli.tinker.server.wire import (
    MAX_PAGE,
    PROTO,
    NewSampler,
    NewSession,
    OfSession,
    Retrieve,
    Search,
    digest_of,
    moment,
    page,
    reply,
    try_again,
)

Json = dict[str, Any]


class SessionRoutes:
    """Each method gets the request and its owner."""

    def __init__(self, state: BackendState) -> None:
        self.state = state

    async def create_session(self, http: Request, owner: str) -> Response:
        asked = convert(await self.state.bodies.fields(http), NewSession)
        session = self.state.sessions.add(owner, asked.user_metadata, asked.display_name)
        return reply({"type": "create_session", "session_id": session.id})

    async def heartbeat(self, http: Request, owner: str) -> Response:
        self.state.sessions.active(convert(await self.state.bodies.fields(http), OfSession).session_id, owner)
        return reply({"type": "session_heartbeat"})

    async def finish_session(self, http: Request, owner: str) -> Response:
        """Ends the session: its models are unloaded, its checkpoints stay."""
        session = self.state.sessions.get(http.path_params["id"], owner)
        fields = await self.state.bodies.fields(http)
        reason = fields.get("reason")
        if session.ended is None:
            session.ended = str(reason.get("type", "ended") if isinstance(reason, dict) else "ended")[:100]
            await self.state.end(session)
        return reply({})

    async def list_sessions(self, http: Request, owner: str) -> Response:
        offset, limit = page(http)
        found = self.state.sessions.of(owner)[offset : offset + limit]
        return reply({"sessions": [session.id for session in found]})

    async def search_sessions(self, http: Request, owner: str) -> Response:
        asked = convert(await self.state.bodies.fields(http), Search)
        words = (asked.display_name or "").lower().split()
        wanted = asked.user_metadata.items()
        found = [
            session
            for session in self.state.sessions.of(owner)
            if (asked.session_id in (None, session.id))
            and wanted <= (session.user_metadata or {}).items()
            and all(word in (session.display_name or "").lower() for word in words)
        ]
        shown = found[: min(asked.limit, MAX_PAGE)]

        def summaries() -> list[Json]:
            runs = self.state.store.runs(owner)
            return [self._summary(each, [run for run in runs if run.id.startswith(f"{each.id}:")]) for each in shown]

        return reply({"sessions": await call_in_thread(summaries), "next_cursor": None})

    def _summary(self, session: ClientSession, runs: list[RunNotes]) -> Json:
        kept = [notes for run in runs for _, notes in self.state.store.checkpoints(run.id)]
        return {
            "session_id": session.id,
            "created_at": moment(session.created),
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


POLL_S = 20.0  # longest wait for a result; the SDK gives up after 45 s
PAUSED_S = 3.0  # longest wait for one that waits for room itself, because its client is to know why


class Routes:
    """Each method gets the request and the owner of what the client has."""

    def __init__(self, state: BackendState) -> None:
        self.state = state

    async def healthz(self, http: Request, owner: str) -> Response:
        return reply({"status": "ok"})

    async def capabilities(self, http: Request, owner: str) -> Response:
        supported = {"model_name": self.state.base.name, "max_context_length": self.state.base.max_length}
        own = {"loss_fn_inputs": passes.EXTRA, "is_lora": not self.state.base.is_whole}  # read by art, not by the SDK
        return reply({"supported_models": [{**supported, "trainable": True, "sampleable": True, **own}]})

    async def client_config(self, http: Request, owner: str) -> Response:
        """Offers JSON to SDKs that can speak it; one request loads a model from a checkpoint."""
        await self.state.bodies.fields(http)
        return reply(
            {
                "pjwt_auth_enabled": False,
                "credential_default_source": "api_key",
                "proto_write_fwdbwd": False,
                "proto_compress_fwdbwd": False,
                "create_model_via_load_weights": True,
                "fwdbwd_max_chunk_len": self.state.limits.data,
                # one request for all data of an update, where it fits, so that its packs are those of a local step
                "fwdbwd_max_chunk_bytes_count": self.state.limits.body_bytes // 2,
            }
        )

    async def dynamic_config(self, http: Request, owner: str) -> Response:
        await self.state.bodies.fields(http)
        return reply({"refresh_interval_sec": 300, "sample_cancel_enabled": True})

    async def telemetry(self, http: Request, owner: str) -> Response:
        """Accepts and drops it."""
        await self.state.bodies.fields(http)
        return reply({"status": "accepted"})

    # --- sampling -----------------------------------------------------------------------------------------------------

    async def create_sampling_session(self, http: Request, owner: str) -> Response:
        asked = convert(await self.state.bodies.fields(http), NewSampler)
        self.state.sessions.active(asked.session_id, owner)
        self.state.base.check(asked.base_model)
        if asked.base_model is None and asked.model_path is None:
            raise invalid("base_model or model_path: one of them says what to sample from")
        id = f"{asked.session_id}:sample:{asked.sampling_session_seq_id}"
        await self.state.samplers.add(id, owner, None if asked.model_path is None else parse(asked.model_path))
        return reply({"type": "create_sampling_session", "sampling_session_id": id})

    async def get_sampler(self, http: Request, owner: str) -> Response:
        sampler = self.state.samplers.get(http.path_params["id"], owner)
        return reply({"sampler_id": sampler.id, "base_model": self.state.base.name, "model_path": sampler.model_path})

    async def asample(self, http: Request, owner: str) -> Response:
        body = await self.state.bodies.raw(http)
        asked: SampleRequest = await self.state.bodies.reader.read(lambda: convert(decode_object(body), SampleRequest))
        digest = digest_of(http, body)
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
        """Returns the result of a request. After a while without one, try_again, and what the request waits for."""
        asked = convert(await self.state.bodies.fields(http), Retrieve)
        future = self.state.futures.get(asked.request_id, owner)
        if not await self.state.futures.wait(future, PAUSED_S if future.waits_for else POLL_S):
            return reply(try_again(future))
        result = future.result
        assert result is not None
        self.state.futures.mark_fetched(future)
        if isinstance(result, Failure):
            return reply({"error": result.message, "category": "user" if result.is_users else "server"})
        if result.as_proto is not None and PROTO in http.headers.get("accept", ""):
            return Response(await call_in_thread(result.as_proto), media_type=PROTO)
        return reply(await call_in_thread(result.as_json))

    async def cancel(self, http: Request, owner: str) -> Response:
        asked = convert(await self.state.bodies.fields(http), Retrieve)
        self.state.futures.cancel(self.state.futures.get(asked.request_id, owner))
        return reply({})
