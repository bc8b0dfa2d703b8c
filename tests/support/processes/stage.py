"""Stage: a rollout in a directory, a gateway being served, and a runner that plays it."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from art_cli.chat import Backend
from art_cli.chat.requests import Sampling
from art_cli.config.schema import RolloutConfig
from art_cli.rollouts.rollout_gateway import Gateway
from art_cli.rollouts.rollout_runner import RolloutPlan, Runner
from art_cli.runs.trajectory import Trajectory
from tests.support.standins.scripted import Engine, ScriptedBackend

ASK = """
async def ask(policy, *messages):
    client = policy.client.with_options(max_retries=0)
    messages = messages or [{"role": "user", "content": "hi"}]
    return await client.chat.completions.create(model=policy.model, messages=messages)
"""


class Stage:
    """A directory with a rollout, a gateway being served, and a runner."""

    def __init__(
        self,
        directory: Path,
        backend: Backend | None = None,
        *,
        processes: int = 1,
        scenario: dict[str, Any] | None = None,
        between: Callable[[str], AbstractAsyncContextManager[str]] | None = None,
    ) -> None:
        """`processes` is for a function; `scenario` is what it holds besides id and index; `between` makes a proxy of
        the gateway's address."""
        self.directory = directory
        self.backend = backend or ScriptedBackend()
        self.finished: list[Trajectory] = []
        self._processes = processes
        self._scenario = scenario or {}
        self._between = between or contextlib.nullcontext

    def plans(self, number: int) -> list[RolloutPlan]:
        return [
            RolloutPlan(
                trajectory_id=f"t{index}",
                group_id="g",
                group_size=number,
                index=index,
                scenario={"id": "s", "index": index, **self._scenario},
                step=2,
            )
            for index in range(number)
        ]

    @contextlib.asynccontextmanager
    async def open(self, **options: Any) -> Any:
        given = {"scenarios": "none", "entry": "rollout.py:rollout", **options}
        config = RolloutConfig(**({"processes": self._processes} if given["entry"] else {}) | given)
        gateway = Gateway(Engine(self.backend, step=2), defaults=Sampling(), seed=0, max_turns=config.max_turns)
        async with (
            gateway.serve() as url,
            self._between(url) as gateway.base_url,
            Runner(config, self.directory, gateway, backoff_s=0) as runner,
        ):
            yield runner
        assert gateway._backends == {}  # nothing is kept of a rollout that is over

    async def play(
        self, source: str = "", *, num: int = 1, on_finished: Callable[[Trajectory], Any] | None = None, **options: Any
    ) -> list[Trajectory]:
        """The trajectories of `num` rollouts of the source's function `rollout`, in order of their plans."""
        (self.directory / "rollout.py").write_text(source)
        async with self.open(**options) as runner:
            counts = await runner.run(self.plans(num), on_finished or self.finished.append)
        assert counts.done == num
        return sorted(self.finished, key=lambda trajectory: trajectory.index)
