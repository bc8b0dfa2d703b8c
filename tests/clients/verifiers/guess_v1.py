"""An environment of its own over a taskset: several turns until the guess is right."""

import verifiers.v1 as vf


class GuessTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def found(self, trace: vf.Trace) -> float:
        return float(trace.nodes[-1].message.content == "7")


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    def load(self) -> list[GuessTask]:
        return [GuessTask(vf.TaskData(prompt="Guess 0-9."), self.config.task) for _ in range(2)]


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})


class Guess(vf.Env[GuessConfig]):
    async def run(self, task: GuessTask, agents: vf.Agents) -> None:
        async with agents.player.interaction(task) as talk:
            said = await talk.turn()
            while not said.terminated and said.last_reply != "7":
                said = await talk.turn("No.")


__all__ = ["GuessTaskset", "Guess"]
