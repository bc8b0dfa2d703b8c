"""Task writing for `art scenarios`: asks a server for tools, and a model for tasks."""

import asyncio
import hashlib
import json
import logging
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from art_cli.cli.judging import choose_judge, dollars
from art_cli.config.compose import load_config
from art_cli.config.schema import RulerJudgeConfig
from art_cli.judges.costs import Usage
from art_cli.judges.providers.caller import Caller
from art_cli.judges.ruler.ruler_judge import RulerJudge
from art_cli.judges.trial import require_keys
from art_cli.loop.interrupts import Interrupts
from art_cli.rollouts.environments import Json, Settings, cure, library_named, not_installed
from art_cli.rollouts.environments.mcp import McpServer
from art_cli.rollouts.near_duplicates import is_same, words_of
from art_cli.rollouts.scenario_files import load_scenarios
from art_cli.runs.durable import write_lines
from art_cli.runtime import threads
from art_cli.runtime.errors import DataError, JudgeError, JudgeStopped, UsageError, brief, printable
from art_cli.runtime.log import Bar, shown_bar

log = logging.getLogger(__name__)

CALLS = 4  # concurrent calls per round
MAX_IDLE = 3  # rounds without new tasks before giving up
DIFFICULTIES = range(1, 6)
BATCH = 10  # tasks per call; larger answers are often cut off or repetitive
MAX_TASK = 4000  # characters per task
MAX_SHOWN = 40  # existing tasks in a prompt
MAX_SHOWN_TASK = 400  # characters per existing task
MAX_TOOLS = 60_000  # characters of JSON; above it, a call includes only the requested tools

SYSTEM = """\
You write tasks for training an agent that has tools. The agent sees nothing but the task and the tools. A task is one
message that a user could send: it says what is wanted, with everything that the agent needs to know, and never which
tool to call. It can be done with these tools alone, and one can tell afterwards whether it was done well.

Difficulty is how much the agent has to do: 1 is one obvious call, 2 one call that needs some thought, 3 two or three
calls where one needs what another returned, 4 several calls and a judgement, 5 many calls, a plan and a summary.
Vary what the tasks are about, their wording and their length. Invent plausible names and values where a tool needs
them.

Answer with one JSON object: {"tasks": [{"task": "...", "tools": ["name", ...], "difficulty": 3}, ...]}. `tools` are
the names of those that a good solution calls.

The tools:
"""


class TaskPlan(NamedTuple):
    """A requested task. Example: TaskPlan("search", 3)"""

    tool: str
    difficulty: int


@dataclass
class Tasks:
    """The tasks so far, each {"id": ..., "task": ..., "tools": [...], "difficulty": 3}."""

    tools: Sequence[str]  # names of the server's tools
    found: list[Json] = field(default_factory=list)
    num_same: int = 0  # duplicates
    num_unusable: int = 0  # malformed tasks
    _words: list[frozenset[str]] = field(default_factory=list)

    def keep(self, task: Json) -> None:
        self._words.append(words_of(task["task"]))
        self.found.append(task)

    def add(self, task: Json) -> bool:
        """Adds a task unless it is a duplicate. Returns True if added."""
        words = words_of(task["task"])
        if any(is_same(words, other) for other in self._words):
            self.num_same += 1
            return False
        self.keep(task)
        return True

    def places(self, count: int) -> list[TaskPlan]:
        """Returns the next requests, balanced over tools, and over difficulties per tool."""
        by_tool = spread(self.found)[1]
        rated = [task for task in self.found if isinstance(task.get("difficulty"), int)]
        by_place = Counter(TaskPlan(tool, task["difficulty"]) for task in rated for tool in _names(task))
        places = []
        for _ in range(count):
            tool = min(self.tools, key=lambda name: by_tool[name])
            place = min((TaskPlan(tool, difficulty) for difficulty in DIFFICULTIES), key=lambda each: by_place[each])
            by_tool[tool] += 1
            by_place[place] += 1
            places.append(place)
        return places

    def near(self, places: Sequence[TaskPlan]) -> list[str]:
        """Returns existing tasks to avoid: the newest first, same tools first."""
        wanted = {place.tool for place in places}
        newest = sorted(reversed(self.found), key=lambda task: wanted.isdisjoint(_names(task)))
        return [str(task["task"])[:MAX_SHOWN_TASK] for task in newest[:MAX_SHOWN]]


def _names(task: Json) -> set[str]:
    return {name for name in task.get("tools", []) if isinstance(name, str)}


def questions(tools: Sequence[Json], places: Sequence[TaskPlan], there_are: Sequence[str]) -> list[Json]:
    """Returns messages that request a task per place. `tools` have OpenAI's format."""
    shown = _show(tools, {place.tool for place in places})
    wanted = "\n".join(f"- difficulty {place.difficulty}, with the tool {place.tool}" for place in places)
    before = "".join(f"- {json.dumps(task, ensure_ascii=False)}\n" for task in there_are)
    tail = f"\n\nThese are there already; write others:\n{before}" if before else ""
    ask = f"Write {len(places)} tasks, each with the tool named and others where they are needed:\n{wanted}{tail}"
    return [{"role": "system", "content": SYSTEM + shown}, {"role": "user", "content": ask}]


def _show(tools: Sequence[Json], wanted: set[str]) -> str:
    """Returns tools as JSON lines. For many tools, only wanted tools, and other names."""
    lines = {tool["function"]["name"]: json.dumps(tool["function"], ensure_ascii=False) for tool in tools}
    if sum(map(len, lines.values())) <= MAX_TOOLS:
        return "\n".join(lines.values())
    others = ", ".join(sorted(lines.keys() - wanted))
    return "\n".join(line[:MAX_TOOLS] for name, line in lines.items() if name in wanted) + f"\nand also: {others}"


def schema(tools: Sequence[str]) -> Json:
    task = {
        "type": "object",
        "properties": {
            "task": {"type": "string"},
            "tools": {"type": "array", "items": {"type": "string", "enum": list(tools)}},
            "difficulty": {"type": "integer", "enum": list(DIFFICULTIES)},
        },
        "required": ["task", "tools", "difficulty"],
        "additionalProperties": False,
    }
    properties = {"tasks": {"type": "array", "items": task}}
    return {"type": "object", "properties": properties, "required": ["tasks"], "additionalProperties": False}


class TaskAnswer(NamedTuple):
    tasks: list[Json]
    problems: list[str]


def read_answer(text: str, tools: Sequence[str]) -> TaskAnswer:
    """Extracts tasks from an answer, also from code fences or prose. The problems can be sent to the model."""
    if (document := _document(text)) is None:
        return TaskAnswer([], ["no JSON object was found; it may have been cut off"])
    if not isinstance(tasks := document.get("tasks"), list):
        return TaskAnswer([], ['"tasks" is not a list'])
    known = set(tools)
    usable, problems = list[Json](), list[str]()
    for number, task in enumerate(tasks, 1):
        problem = _problem(task, known)
        if problem:
            problems.append(f"task {number}: {problem}")
            continue
        words = " ".join(task["task"].split()) if "\n" not in task["task"].strip() else task["task"].strip()
        called = list(dict.fromkeys(task["tools"]))
        usable.append({"id": task_id(words), "task": words, "tools": called, "difficulty": task["difficulty"]})
    return TaskAnswer(usable, problems)


def _document(text: str) -> Json | None:
    """Parses an answer as a JSON object, or the text between the outer braces."""
    said = text.rpartition("</think>")[2].strip()
    begin, end = said.find("{"), said.rfind("}")
    for piece in (said, said[begin : end + 1] if begin >= 0 else ""):
        try:
            document = json.loads(piece)
        except (ValueError, RecursionError):
            continue
        if isinstance(document, dict):
            return document
    return None


def _problem(task: Any, known: set[str]) -> str:
    if not isinstance(task, dict) or not isinstance(task.get("task"), str) or not task["task"].strip():
        return '"task" is not a text'
    if len(task["task"]) > MAX_TASK:
        return f"it is longer than {MAX_TASK} characters"
    if any(
        unicodedata.category(letter) in ("Cc", "Cs", "Co", "Cn") and letter not in "\n\t" for letter in task["task"]
    ):
        return "it has invalid characters"
    tools = task.get("tools")
    if not isinstance(tools, list) or not tools or not all(isinstance(name, str) and name in known for name in tools):
        return f'"tools" are not names of the tools: {", ".join(sorted(known)[:20])}'
    difficulty = task.get("difficulty")
    if isinstance(difficulty, bool) or difficulty not in DIFFICULTIES:
        return '"difficulty" is not a whole number from 1 to 5'
    return ""


def complaint(text: str, problem: str) -> list[Json]:
    request = f"This answer cannot be used: {problem}. Answer again with one JSON object and nothing else."
    return [{"role": "assistant", "content": text[:20_000] or "(nothing)"}, {"role": "user", "content": request}]


def task_id(text: str) -> str:
    return f"task-{hashlib.sha256(text.encode()).hexdigest()[:10]}"


def spread(tasks: Iterable[Json]) -> tuple[Counter[int], Counter[str]]:
    by_difficulty, by_tool = Counter[int](), Counter[str]()
    for task in tasks:
        if isinstance(task.get("difficulty"), int):
            by_difficulty[task["difficulty"]] += 1
        by_tool.update(_names(task))
    return by_difficulty, by_tool


@dataclass
class Written:
    """The result: all tasks in the file, their cost, and any problem."""

    path: Path
    environment: str
    num_wanted: int
    num_before: int
    tasks: Tasks
    usage: Usage
    problem: str = ""  # reason for missing tasks

    def as_dict(self) -> dict[str, Any]:
        by_difficulty, by_tool = spread(self.tasks.found)
        tasks, usage = self.tasks, self.usage
        counts = {"tasks": len(tasks.found), "before": self.num_before, "wanted": self.num_wanted}
        difficulties = {str(each): by_difficulty[each] for each in sorted(by_difficulty)}
        left = {"near_duplicates": tasks.num_same, "unusable": tasks.num_unusable}
        paid = {"calls": usage.calls, "tokens": usage.tokens, "cost_usd": usage.cost_usd}
        spread_over = {"difficulties": difficulties, "tools": dict(by_tool)}
        return {"file": str(self.path), **counts, **spread_over, **left, **paid, "problem": self.problem}


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
    """Writes the file. Raises UsageError, Interrupted, and JudgeError without new tasks."""
    if kind != "mcp":
        raise UsageError(f"{kind!r}: tasks are written for mcp; other environments bring their scenarios")
    before = _tasks_before(output, is_more=is_more)
    chosen, model_directory = _choose_model(config, overrides, model)
    tools = _find_tools(place, config)
    names = [tool["function"]["name"] for tool in tools]
    tasks = Tasks(names)
    for each in before:
        tasks.keep(each)
    written = Written(output, f"mcp/{place}", num, len(before), tasks, Usage())
    interrupts = Interrupts(f"interrupted; what is written is in {output}; the same command with --append continues")

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
    """Returns existing tasks. Raises UsageError for a file without --append, DataError for other scenarios."""
    if not output.exists():
        return []
    if not is_more:
        raise UsageError(f"{output}: it is there already; --append adds to it, or name another one with -o")
    if not output.stat().st_size:
        return []
    before = load_scenarios(str(output.resolve()), output.resolve().parent)
    for scenario in before:
        if not isinstance(scenario.get("task"), str):
            raise DataError(f'the scenario {brief(scenario["id"])} has no "task"', output)
    return before


def _choose_model(config: Path | None, overrides: Sequence[str], model: str | None) -> tuple[RulerJudgeConfig, Path]:
    """Returns the writing model's settings, and the configuration's directory. Raises UsageError."""
    loaded = choose_judge(config, overrides, model=model)
    if not isinstance(loaded.config, RulerJudgeConfig):
        raise UsageError("a judge that is a language model writes the tasks; name one with --model, or judge=ruler")
    if loaded.config.panel:
        raise UsageError("judge.panel: one model writes the tasks; name it with --model and judge=ruler")
    require_keys(loaded.config, loaded.directory)
    return loaded.config, loaded.directory


def _find_tools(place: str, config: Path | None) -> list[Json]:
    """Returns the server's tools. Raises UsageError."""
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
    """Requests tasks in rounds of calls, and writes the file after every round."""

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
        """Requests up to CALLS batches of tasks. Raises JudgeStopped if further calls cannot succeed."""
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
        """Returns usable tasks. Sends an unreadable answer back once. Raises JudgeError."""
        first = questions(self._tools, places, self._written.tasks.near(places))
        messages, problem = first, ""
        for _ in range(2):
            answer = await self._caller.ask(messages, schema(self._names), num_attempts=len(places))
            self._written.usage += answer.usage
            found = read_answer(answer.text, self._names)
            if found.tasks or not found.problems:
                self._written.tasks.num_unusable += len(found.problems)
                return found.tasks
            cut = " (the answer was cut off)" if answer.finish_reason == "length" else ""
            problem = "; ".join(found.problems[:5]) + cut
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
    left = f"{written.tasks.num_same} near-duplicates and {written.tasks.num_unusable} unusable tasks skipped"
    lines.append(f"  {usage.calls} calls, {usage.tokens:,} tokens, {dollars(usage.cost_usd)}; {left}")
    lines.append(f"to train on them: rollout.environment: {written.environment!r}, judge: ruler, and rollout.scenarios")
    return "\n".join(lines) + "\n"
