"""Sessions: a client process's objects and last heartbeat. Also client names from keys, and shared server state.

BackendState combines models, samplers, sessions and stored answers.
"""

import contextlib
import functools
import hashlib
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import msgspec

from art_cli.chat.chat_errors import ChatError, invalid
from art_cli.tinker.server import BackendLimits
from art_cli.tinker.server.base_model import Base
from art_cli.tinker.server.checkpoint_store import Downloads, Store, encode_notes
from art_cli.tinker.server.futures import Futures
from art_cli.tinker.server.models import Models
from art_cli.tinker.server.samplers import Samplers
from art_cli.tinker.server.wire import Bodies

MAX_SESSIONS = 1000  # maximum sessions per client
ANYONE = "anyone"  # the owner of everything on a server without keys
SALT = b"art backend: the owner of a checkpoint"


@dataclass(eq=False)
class ClientSession:
    id: str
    owner: str
    notes: bytes  # JSON of the client's metadata, smaller in memory than objects
    created: float = field(default_factory=time.time)
    heard: float = field(default_factory=time.monotonic)  # time of the last heartbeat
    ended: str | None = None  # the client's reason for ending the session

    @property
    def user_metadata(self) -> dict[str, Any] | None:
        found: dict[str, Any] | None = msgspec.json.decode(self.notes)["user_metadata"]
        return found

    @property
    def display_name(self) -> str | None:
        found: str | None = msgspec.json.decode(self.notes)["display_name"]
        return found


class Sessions:
    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._sessions: dict[str, ClientSession] = {}

    def add(self, owner: str, user_metadata: dict[str, Any] | None, name: str | None) -> ClientSession:
        """Raises ChatError if metadata is too large (400) or the client has too many sessions (429)."""
        notes = encode_notes(user_metadata=user_metadata, display_name=name)
        if sum(session.owner == owner for session in self._sessions.values()) >= MAX_SESSIONS:
            raise ChatError(429, f"this client has {MAX_SESSIONS} sessions", retry_after="60")
        session = ClientSession(uuid.uuid4().hex, owner, notes)
        self._sessions[session.id] = session
        return session

    def get(self, id: str, owner: str) -> ClientSession:
        """Returns the client's session. Raises ChatError 404 for unknown sessions."""
        found = self._sessions.get(id)
        if found is None or found.owner != owner:
            raise ChatError(404, f"no session {id[:200]!r}; it ended, or the server was restarted")
        return found

    def active(self, id: str, owner: str) -> ClientSession:
        """Returns the client's session. Raises ChatError for unknown (404) and ended (400) sessions."""
        session = self.get(id, owner)
        if session.ended is not None:
            raise invalid(f"the session {id} was ended ({session.ended})")
        session.heard = time.monotonic()
        return session

    def of(self, owner: str) -> list[ClientSession]:
        """Returns the owner's sessions, newest first."""
        return sorted((s for s in self._sessions.values() if s.owner == owner), key=lambda s: s.created, reverse=True)

    def expired(self) -> list[ClientSession]:
        """Removes and returns sessions without recent heartbeats."""
        before = time.monotonic() - self._timeout_s
        old = [session for session in self._sessions.values() if session.heard < before]
        for session in old:
            del self._sessions[session.id]
        return old


@functools.lru_cache(maxsize=256)
def owner_of(key: str | None) -> str:
    """Returns a client name for this key. It may be stored, because recovering the key from it is expensive."""
    if key is None:
        return ANYONE
    return hashlib.scrypt(key.encode(errors="surrogateescape"), salt=SALT, n=2**14, r=8, p=1, dklen=16).hex()


class BackendState:
    def __init__(
        self, base: Base, store: Store, models: Models, samplers: Samplers, futures: Futures, limits: BackendLimits
    ) -> None:
        self.base, self.store, self.models, self.samplers, self.futures = base, store, models, samplers, futures
        self.limits = limits
        self.sessions = Sessions(timeout_s=limits.session_s)
        self.downloads = Downloads()
        self.bodies = Bodies(limits.body_bytes)

    async def end(self, session: ClientSession) -> None:
        """Unloads the session's models and cancels pending ones."""
        self.models.give_up(session.id)
        for id in [id for id in self.models.models if id.startswith(f"{session.id}:")]:
            with contextlib.suppress(ChatError):  # the client is unloading the model right now
                await self.models.unload(id, session.owner)
        await self.samplers.end_session(session.id)
