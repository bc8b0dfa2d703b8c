"""Sums: one question, one reply."""

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in said(trace))

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(said(trace)) < 12)

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


def said(trace: vf.Trace) -> str:
    return trace.nodes[-1].message.content or ""


class SumConfig(vf.TasksetConfig):
    num_tasks: int = 5


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    """Doubles of small numbers."""

    def load(self) -> list[SumTask]:
        return [self._task(number) for number in range(self.config.num_tasks)]

    def _task(self, number: int) -> SumTask:
        data = SumData(prompt=f"What is {number} + {number}?", answer=str(2 * number), system_prompt="Add.")
        return SumTask(data, self.config.task)


__all__ = ["SumTaskset"]
