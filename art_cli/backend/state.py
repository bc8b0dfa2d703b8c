"""BackendState: what the routes share: models, samplers, sessions, the answers that are kept."""

from art_cli.backend import BackendLimits
from art_cli.backend.base import Base
from art_cli.backend.bodies import Bodies
from art_cli.backend.downloads import Downloads
from art_cli.backend.futures import Futures
from art_cli.backend.models import Models
from art_cli.backend.samplers import Samplers
from art_cli.backend.sessions import ClientSession, Sessions
from art_cli.backend.store import Store


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
        """Unloads what the session made, and gives up what it waits for."""
        self.models.give_up(session.id)
        for id in [id for id in self.models.models if id.startswith(f"{session.id}:")]:
            await self.models.unload(id, session.owner)
        await self.samplers.end_session(session.id)
