"""BackendState: what the routes share: models, samplers, sessions, the answers that are kept."""

from art_cli.tinker.server import BackendLimits
from art_cli.tinker.server.base_model import Base
from art_cli.tinker.server.checkpoint_store import Store
from art_cli.tinker.server.downloads import Downloads
from art_cli.tinker.server.futures import Futures
from art_cli.tinker.server.models import Models
from art_cli.tinker.server.request_fields import Bodies
from art_cli.tinker.server.samplers import Samplers
from art_cli.tinker.server.sessions import ClientSession, Sessions


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
