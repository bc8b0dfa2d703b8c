"""The work of `art scenarios`: asks a server for its tools, and a model for tasks until there are enough."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from art_cli.cli.judging import choose_judge, dollars
from art_cli.config.compose import load_config
from art_cli.config.schema import RulerJudgeConfig
from art_cli.judges.costs import Usage
from art_cli.judges.judge_groups import require_keys
from art_cli.judges.providers.caller import Caller
from art_cli.judges.ruler.ruler_judge import RulerJudge
from art_cli.loop.interrupts import Interrupts
from art_cli.rollouts.environments import Json, Settings, cure, library_named, not_installed
from art_cli.rollouts.environments.mcp import McpServer
from art_cli.rollouts.environments.tasks import (
    BATCH,
    AnswerError,
    TaskPlan,
    Tasks,
    complaint,
    questions,
    read_answer,
    schema,
    spread,
)
from art_cli.rollouts.scenario_files import load_scenarios
from art_cli.runs.durable import write_lines
from art_cli.runtime import threads
from art_cli.runtime.errors import DataError, JudgeError, JudgeStopped, UsageError, printable
from art_cli.runtime.log import Bar, shown_bar

log = logging.getLogger(__name__)

CALLS = 4  # calls at once; each knows what was there before all of them
MAX_IDLE = 3  # number of rounds without a new task after which the model is given up


@dataclass
class Written:
    """The result: the tasks in the file, their cost, and the problem that ended the writing early, if any."""

    path: Path
    environment: str
    num_wanted: int
    num_before: int
    tasks: Tasks
    usage: Usage
    problem: str = ""  # why there are fewer than wanted

    def as_dict(self) -> dict[str, Any]:
        by_difficulty, by_tool = spread(self.tasks.found)
        return {
            "file": str(self.path),
            "tasks": len(self.tasks.found),
            "before": self.num_before,
            "wanted": self.num_wanted,
            "difficulties": {str(each): by_difficulty[each] for each in sorted(by_difficulty)},
            "tools": dict(by_tool),
            "near_duplicates": self.tasks.num_same,
            "unusable": self.tasks.num_unusable,
            "calls": self.usage.calls,
            "tokens": self.usage.tokens,
            "cost_usd": self.usage.cost_usd,
            "problem": self.problem,
        }


def write(
    kind: str,
    place: str,
    output: Path,
    *,
    num: int,
    model: str | None,
    config: Path | None,
    overrides: Sequence[str],
    is_more: bool,
) -> Written:
    """Writes the file. Raises UsageError, Interrupted, and JudgeError if no task was added."""
    if kind != "mcp":
        raise UsageError(f"{kind!r}: tasks are written for mcp; other environments have scenarios of their own")
    before = _tasks_before(output, is_more=is_more)
    chosen, model_directory = _choose_model(config, overrides, model)
    tools = _find_tools(place, config)
    names = [tool["function"]["name"] for tool in tools]
    tasks = Tasks(names)
    for each in before:
        tasks.keep(each)
    written = Written(output, f"mcp/{place}", num, len(before), tasks, Usage())
    interrupts = Interrupts(f"interrupted; what is written is in {output}; the same command with --append goes on")

    async def ask() -> None:
        judge = RulerJudge(chosen.model_copy(update={"cache": None}), model_directory)
        try:
            with interrupts.handled(), shown_bar("writing") as bar:
                await _Writer(judge.voters[0].caller, tools, written, bar).run()
        finally:
            await judge.close()

    if len(tasks.found) < num:
        threads.run(ask())
    if written.problem and len(tasks.found) == len(before):
        raise JudgeError(f"no task was written: {written.problem}")
    return written


def _tasks_before(output: Path, *, is_more: bool) -> list[Json]:
    """Returns the tasks of the file. Raises UsageError if it exists without --append, DataError if it has others."""
    if not output.exists():
        return []
    if not is_more:
        raise UsageError(f"{output}: it is there already; --append adds to it, or name another one with -o")
    if not output.stat().st_size:
        return []
    before = load_scenarios(str(output.resolve()), output.resolve().parent)
    for scenario in before:
        if not isinstance(scenario.get("task"), str):
            raise DataError(f'the scenario {printable(repr(scenario["id"]), limit=80)} has no "task"', output)
    return before


def _choose_model(config: Path | None, overrides: Sequence[str], model: str | None) -> tuple[RulerJudgeConfig, Path]:
    """Returns the settings of the model that writes, and the directory of its configuration. Raises UsageError."""
    loaded = choose_judge(config, overrides, model=model)
    if not isinstance(loaded.config, RulerJudgeConfig):
        raise UsageError("a judge that is a language model writes the tasks; name one with --model, or judge=ruler")
    if loaded.config.panel:
        raise UsageError("judge.panel: one model writes the tasks; name it with --model and judge=ruler")
    require_keys(loaded.config, loaded.directory)
    return loaded.config, loaded.directory


def _find_tools(place: str, config: Path | None) -> list[Json]:
    """Returns the server's tools. Raises UsageError if it cannot be reached, or has none."""
    library = library_named("mcp")
    if problem := not_installed(library):
        raise UsageError(f"{problem}; {cure(library)}")
    args: Json = {}
    directory = Path.cwd()
    if config is not None:
        loaded = load_config(config)
        directory = loaded.directory
        chosen = loaded.config.rollout.environment
        args = chosen.args if chosen is not None and chosen.name == f"mcp/{place}" else {}
    opened = library.open(place, Settings(f"mcp/{place}", args, directory=str(directory)))
    assert isinstance(opened, McpServer)
    return opened.tools


class _Writer:
    """A writer of tasks: asks for them in rounds of calls, and writes the file after each round."""

    def __init__(self, caller: Caller, tools: list[Json], written: Written, bar: Bar | None) -> None:
        self._caller, self._tools, self._written, self._bar = caller, tools, written, bar
        self._names = [tool["function"]["name"] for tool in tools]

    async def run(self) -> None:
        tasks, num_idle = self._written.tasks, 0
        while len(tasks.found) < self._written.num_wanted:
            count = len(tasks.found)
            try:
                await self._round()
            except JudgeStopped as stop:
                self._written.problem = str(stop)
                return
            num_idle = 0 if len(tasks.found) > count else num_idle + 1
            if num_idle == MAX_IDLE:
                last = f" ({self._written.problem})" if self._written.problem else ""
                self._written.problem = f"{MAX_IDLE} rounds of calls brought nothing new{last}"
                return
        self._written.problem = ""

    async def _round(self) -> None:
        """Makes as many calls as are needed, each for other tasks. Raises JudgeStopped if no further call can
        succeed."""
        tasks, wanted = self._written.tasks, self._written.num_wanted
        places = tasks.places(min(wanted - len(tasks.found), CALLS * BATCH))
        batches = [places[first : first + BATCH] for first in range(0, len(places), BATCH)]
        results = await asyncio.gather(*map(self._ask, batches), return_exceptions=True)
        for found in results:
            if not isinstance(found, BaseException):
                for task in found:
                    if len(tasks.found) < wanted:
                        tasks.add(task)
        if tasks.found:
            write_lines(self._written.path, tasks.found)
        if self._bar is not None:
            self._bar(len(tasks.found), wanted, dollars(self._written.usage.cost_usd))
        failures = [found for found in results if isinstance(found, BaseException)]
        for failure in sorted(failures, key=lambda failure: not isinstance(failure, JudgeStopped)):
            if isinstance(failure, JudgeStopped) or not isinstance(failure, JudgeError):
                raise failure
            self._written.problem = str(failure)
            log.warning("%s", failure)

    async def _ask(self, places: list[TaskPlan]) -> list[Json]:
        """Returns the usable tasks of an answer. One that cannot be read is sent back once. Raises JudgeError."""
        first = questions(self._tools, places, self._written.tasks.near(places))
        messages, problem = first, ""
        for _ in range(2):
            answer = await self._caller.ask(messages, schema(self._names), num_attempts=len(places))
            self._written.usage += answer.usage
            try:
                found = read_answer(answer.text, self._names)
            except AnswerError as error:
                problem = str(error) + (" (the answer was cut off)" if answer.finish_reason == "length" else "")
                messages = [*first, *complaint(answer.text, problem)]
                continue
            if found.tasks or not found.problems:
                self._written.tasks.num_unusable += len(found.problems)
                return found.tasks
            problem = "; ".join(found.problems[:5])
            messages = [*first, *complaint(answer.text, problem)]
        raise JudgeError(f"{self._caller.member.model}: no usable tasks: {problem}")


def as_text(written: Written) -> str:
    by_difficulty, by_tool = spread(written.tasks.found)
    before = f" ({written.num_before} were before)" if written.num_before else ""
    usage = written.usage
    lines = [f"{printable(written.path)}: {len(written.tasks.found)} tasks{before}"]
    if written.problem:
        lines[0] += f" of {written.num_wanted}, because {printable(written.problem, limit=500)}"
    lines.append("  difficulty " + ", ".join(f"{each}: {by_difficulty[each]}" for each in sorted(by_difficulty)))
    lines.append("  " + ", ".join(f"{printable(name)} {count}" for name, count in by_tool.most_common(20)))
    left = f"{written.tasks.num_same} near-duplicates and {written.tasks.num_unusable} unusable ones left out"
    lines.append(f"  {usage.calls} calls, {usage.tokens:,} tokens, {dollars(usage.cost_usd)}; {left}")
    lines.append(f"to train on them: rollout.environment: {written.environment!r}, judge: ruler, and rollout.scenarios")
    return "\n".join(lines) + "\n"
