"""The routes of sessions: made, kept alive, found, ended."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from art_cli.runtime.threads import call_in_thread
from art_cli.tinker.server.checkpoint_store import RunNotes
from art_cli.tinker.server.ranges import convert
from art_cli.tinker.server.sessions import ClientSession
from art_cli.tinker.server.state import BackendState
from art_cli.tinker.server.wire import MAX_PAGE, NewSession, OfSession, Search, moment, page, reply

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
