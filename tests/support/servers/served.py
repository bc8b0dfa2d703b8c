"""Runs made by hand for tests of serving: a tiny base, a checkpoint per step, each with another adapter.

`ScriptedLoader` makes engines whose answers a test writes, where no model is needed.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from art_cli.chat.requests import Request, Sampling
from art_cli.engines import Endpoint
from art_cli.models.saved_weights import save_weights
from art_cli.runs.durable import write_lines
from art_cli.runs.manifest import Manifest, new_checkpoint
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import Trajectory, Turn
from art_cli.serving.served_model import Source
from tests.support.models.tiny import tiny_weights
from tests.support.standins.scripted import ScriptedBackend


def make_run(root: Path, steps: Sequence[int] = (1, 2), *, rewards: dict[int, float] | None = None) -> RunDir:
    """A run whose base lies in it and whose `steps` have checkpoints; `rewards` are its evaluations."""
    run = RunDir(root)
    if not run.base.exists():
        save_weights(tiny_weights(lora_rank=None), run.base)
        sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 8}
        config = {
            "name": root.name,
            "model": {"base": "build.py:build", "dtype": "auto", "max_length": None},
            "rollout": {"sampling": sampling},
            "engine": {"name": "embedded", "max_batch": 16, "prefill_tokens": 512},
            "train": {"keep_checkpoints": 2},
        }
        run.config_path.write_text(json.dumps(config))
    for step in steps:
        add_checkpoint(run, step)
    for step, reward in (rewards or {}).items():
        run.append_metrics(step, "eval", {"reward": reward})
    return run


def add_checkpoint(run: RunDir, step: int) -> Path:
    """Another adapter on the same base: its B is drawn from the step."""
    weights = tiny_weights()
    generator = torch.Generator().manual_seed(step)
    for name, parameter in weights.model.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    manifest = Manifest(step=step, base="../../base", config_hash="0123456789abcdef")
    with new_checkpoint(run.checkpoint_path(step), manifest) as directory:
        save_weights(weights, directory)
    return run.checkpoint_path(step)


def add_trajectories(run: RunDir, step: int, sequences: Sequence[list[int]]) -> None:
    """Trajectories of one turn each: the first half of each sequence is its prompt."""
    path = run.trajectories_path(step)
    path.parent.mkdir(parents=True)
    lines = []
    for index, ids in enumerate(sequences):
        half = len(ids) // 2
        zeros = [0.0] * (len(ids) - half)
        turn = Turn(parent=None, kept=0, prompt_ids=ids[:half], sampled_ids=ids[half:], logprobs=zeros,
                    raw_logprobs=zeros, step=step, temperature=1.0)  # fmt: skip
        lines.append(Trajectory(id=f"t{index}", group_id="g", group_size=len(sequences), index=index, turns=[turn]))
    write_lines(path, lines)


class ScriptedEngine(ScriptedBackend):
    """An engine that is ready at once."""

    def __init__(self, answer: Callable[[Request], Any], name: str, step: int) -> None:
        super().__init__(answer, name)
        self.endpoint = Endpoint(base_url=None, api_key="", model=name, step=step)
        self.is_closed = False

    @property
    def backend(self) -> "ScriptedEngine":
        return self

    async def start(self) -> None: ...

    async def load(self, checkpoint: Path, step: int) -> None:
        raise AssertionError("engines in this process are doubled")

    async def score(self, token_ids: list[int]) -> list[float]:
        return [0.0] * (len(token_ids) - 1)

    def longest_prompt(self) -> int | None:
        return None

    async def rest(self) -> None: ...

    async def wake(self) -> None: ...

    async def watch(self) -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError

    async def close(self) -> None:
        self.is_closed = True


class ScriptedLoader:
    """Makes ScriptedEngines; `engines` are those it has made."""

    swaps_adapters = False

    def __init__(
        self, answer: Callable[[Request], Any] = lambda request: "ok", make: type[ScriptedEngine] = ScriptedEngine
    ) -> None:
        self.answer, self.kind = answer, make
        self.engines: list[ScriptedEngine] = []

    async def make(self, source: Source) -> ScriptedEngine:
        self.engines.append(self.kind(self.answer, source.name, source.step))
        return self.engines[-1]


def scripted_source(name: str = "policy", step: int = 0) -> Source:
    return Source(name, "nowhere", None, step, "auto", None, Sampling())
