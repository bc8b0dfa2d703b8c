"""A task with a tool, which verifiers serves from a process of its own."""

import verifiers.v1 as vf


class DeskTools(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "desk"

    @vf.tool
    def add(self, a: int, b: int) -> int:
        """The sum."""
        return a + b


class DeskTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float("42" in (trace.nodes[-1].message.content or ""))

    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [DeskTools(vf.ToolsetConfig())]


class DeskTaskset(vf.Taskset[DeskTask, vf.TasksetConfig]):
    def load(self) -> list[DeskTask]:
        return [DeskTask(vf.TaskData(prompt="What is 17 + 25?"), self.config.task)]


__all__ = ["DeskTaskset"]

if __name__ == "__main__":
    DeskTools.run()
