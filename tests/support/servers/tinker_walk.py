"""A walk through learner and engine of a server of the Tinker protocol, in a process that may have another
SDK. No test.

python -m tests.support.servers.tinker_walk ADDRESS BASE DIRECTORY
"""

import asyncio
import json
import sys
from pathlib import Path

import tinker

from art_cli.chat.requests import Request, Sampling
from art_cli.config.schema import (
    GrpoConfig,
    LoraConfig,
    ModelConfig,
    TinkerEngineConfig,
    TinkerLearnerConfig,
    TrainConfig,
)
from art_cli.learners import LearnerSetup
from art_cli.models.policy_spec import read_spec
from art_cli.runs.durable import read_lines
from art_cli.runs.manifest import Manifest, new_checkpoint
from art_cli.runs.trajectory import ScoredTrajectory
from art_cli.tinker.tinker_engine import TinkerEngine
from art_cli.tinker.tinker_learner import TinkerLearner


async def sampled(engine: TinkerEngine, checkpoint: Path) -> int:
    await engine.start()
    await engine.load(checkpoint, 2)
    messages = [{"role": "user", "content": "say letters"}]
    reply = await engine.reply(Request(model="p", messages=messages, sampling=Sampling(max_tokens=5)))
    await engine.close()
    assert len(reply.choices[0].logprobs) == len(reply.choices[0].token_ids)
    return len(reply.choices[0].token_ids)


def walk(address: str, base: str, directory: Path) -> None:
    config = TinkerEngineConfig(name="tinker", url=address, base_model="tiny", timeout_s=60)
    spec = read_spec(ModelConfig(base=base, lora=LoraConfig(rank=4)), base, is_remote=True)
    train = TrainConfig(learning_rate=1e-3, max_logprob_gap=10.0, epochs_per_step=2)
    scored = list(read_lines(directory / "scored.jsonl", ScoredTrajectory))
    groups = [[each for each in scored if each.group_id == name] for name in dict.fromkeys(s.group_id for s in scored)]
    place = directory / "checkpoints"
    for step in (1, 2):
        learner = TinkerLearner(
            spec,
            LearnerSetup(train=train, loss=GrpoConfig(), learner=TinkerLearnerConfig(name="tinker")),
            engine=config,
            lora=LoraConfig(rank=4),
        )
        if step > 1:
            learner.load(place / f"step_{step - 1:04d}")
        learner.step(groups)
        with new_checkpoint(place / f"step_{step:04d}", Manifest(step=step, base=base, config_hash="")) as made:
            learner.save(made)
        learner.close()
    number = asyncio.run(sampled(TinkerEngine(config, spec, name="p"), place / "step_0002"))
    print(json.dumps({"version": tinker.__version__, "sampled": number}))


if __name__ == "__main__":
    walk(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
