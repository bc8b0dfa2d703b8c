"""Tasks that a language model writes for the tools of a server: the question, the reading of answers, what counts.

Pure. The tasks to come are spread over the tools and five difficulties: each goes to the tool with the
fewest tasks, and there to the difficulty with the fewest. A task that nearly repeats another is left out.
"""

import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Json = dict[str, Any]

DIFFICULTIES = range(1, 6)
BATCH = 10  # tasks of one call; more are often cut off, or repeat each other
MAX_TASK = 4000  # characters of a task
MAX_SHOWN = 40  # tasks that are shown as those that are there already
MAX_SHOWN_TASK = 400  # characters of each
MAX_TOOLS = 60_000  # characters of all tools as JSON from which a call shows only those that it is about
SAME = 0.8  # share of their words that two tasks have in common (Jaccard) from which they are the same

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
    """The plan of a task to come. Example: TaskPlan("search", 3)"""

    tool: str
    difficulty: int


class AnswerError(Exception):
    """The answer cannot be read. The message can be sent back to the model."""


@dataclass
class Tasks:
    """The tasks so far, each {"id": ..., "task": ..., "tools": [...], "difficulty": 3}."""

    tools: Sequence[str]  # names of the server's tools
    found: list[Json] = field(default_factory=list)
    num_same: int = 0  # tasks left out because they repeat another
    num_unusable: int = 0  # tasks left out because they have the wrong shape
    _words: list[frozenset[str]] = field(default_factory=list)

    def keep(self, task: Json) -> None:
        """Takes a task as it is."""
        self._words.append(words_of(task["task"]))
        self.found.append(task)

    def add(self, task: Json) -> bool:
        """Returns whether the task was new."""
        words = words_of(task["task"])
        if any(is_same(words, other) for other in self._words):
            self.num_same += 1
            return False
        self.keep(task)
        return True

    def places(self, count: int) -> list[TaskPlan]:
        """Returns the plans of the next tasks: over all tools, and within a tool over all difficulties."""
        by_tool = Counter(tool for task in self.found for tool in task.get("tools", []) if isinstance(tool, str))
        by_place = Counter(
            TaskPlan(tool, task["difficulty"])
            for task in self.found
            for tool in task.get("tools", [])
            if isinstance(tool, str) and isinstance(task.get("difficulty"), int)
        )
        places = []
        for _ in range(count):
            tool = min(self.tools, key=lambda name: by_tool[name])
            place = min((TaskPlan(tool, difficulty) for difficulty in DIFFICULTIES), key=lambda each: by_place[each])
            by_tool[tool] += 1
            by_place[place] += 1
            places.append(place)
        return places

    def near(self, places: Sequence[TaskPlan]) -> list[str]:
        """Tasks that the model is not to repeat: the newest ones of the same tools first."""
        wanted = {place.tool for place in places}
        newest = sorted(reversed(self.found), key=lambda task: wanted.isdisjoint(_names(task)))
        return [str(task["task"])[:MAX_SHOWN_TASK] for task in newest[:MAX_SHOWN]]


def _names(task: Json) -> set[str]:
    return {name for name in task.get("tools", []) if isinstance(name, str)}


def questions(tools: Sequence[Json], places: Sequence[TaskPlan], there_are: Sequence[str]) -> list[Json]:
    """Returns the messages that ask for one task for each place. `tools` as OpenAI's functions."""
    shown = _show(tools, {place.tool for place in places})
    wanted = "\n".join(f"- difficulty {place.difficulty}, with the tool {place.tool}" for place in places)
    before = "".join(f"- {json.dumps(task, ensure_ascii=False)}\n" for task in there_are)
    tail = f"\n\nThese are there already; write others:\n{before}" if before else ""
    ask = f"Write {len(places)} tasks, each with the tool named and others where they are needed:\n{wanted}{tail}"
    return [{"role": "system", "content": SYSTEM + shown}, {"role": "user", "content": ask}]


def _show(tools: Sequence[Json], wanted: set[str]) -> str:
    """Returns the tools as JSON, a line each; of too many only those that are wanted, and the names of the others."""
    lines = {tool["function"]["name"]: json.dumps(tool["function"], ensure_ascii=False) for tool in tools}
    if sum(map(len, lines.values())) <= MAX_TOOLS:
        return "\n".join(lines.values())
    others = ", ".join(sorted(lines.keys() - wanted))
    return "\n".join(line[:MAX_TOOLS] for name, line in lines.items() if name in wanted) + f"\nand also: {others}"


def schema(tools: Sequence[str]) -> Json:
    """Returns the JSON schema of an answer."""
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
    """The content of an answer: usable tasks, and the reasons why others are not."""

    tasks: list[Json]
    problems: list[str]


def read_answer(text: str, tools: Sequence[str]) -> TaskAnswer:
    """Returns the tasks of an answer, also from a code fence or prose. Raises AnswerError if there is no list."""
    tasks = _document(text).get("tasks")
    if not isinstance(tasks, list):
        raise AnswerError('"tasks" is not a list')
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


def _document(text: str) -> Json:
    """Returns the JSON object of an answer: all of it, or what stands between its first and last brace."""
    said = text.rpartition("</think>")[2].strip()
    begin, end = said.find("{"), said.rfind("}")
    for piece in (said, said[begin : end + 1] if begin >= 0 else ""):
        try:
            document = json.loads(piece)
        except (ValueError, RecursionError):
            continue
        if isinstance(document, dict):
            return document
    raise AnswerError("no JSON object was found; it may have been cut off")


def _problem(task: Any, known: set[str]) -> str:
    """Returns what is wrong with a task of an answer, or "" if nothing is."""
    if not isinstance(task, dict) or not isinstance(task.get("task"), str) or not task["task"].strip():
        return '"task" is not a text'
    if len(task["task"]) > MAX_TASK:
        return f"it is longer than {MAX_TASK} characters"
    if any(
        unicodedata.category(letter) in ("Cc", "Cs", "Co", "Cn") and letter not in "\n\t" for letter in task["task"]
    ):
        return "it has characters that are no text"
    tools = task.get("tools")
    if not isinstance(tools, list) or not tools or not all(isinstance(name, str) and name in known for name in tools):
        return f'"tools" are not names of the tools: {", ".join(sorted(known)[:20])}'
    difficulty = task.get("difficulty")
    if isinstance(difficulty, bool) or difficulty not in DIFFICULTIES:
        return '"difficulty" is not a whole number from 1 to 5'
    return ""


def complaint(text: str, problem: str) -> list[Json]:
    """Returns the unusable answer and what is wrong with it, as the next two messages."""
    request = f"This answer cannot be used: {problem}. TaskAnswer again with one JSON object and nothing else."
    return [{"role": "assistant", "content": text[:20_000] or "(nothing)"}, {"role": "user", "content": request}]


def task_id(text: str) -> str:
    """Returns the same for the same words."""
    return f"task-{hashlib.sha256(text.encode()).hexdigest()[:10]}"


def words_of(text: str) -> frozenset[str]:
    """Returns the words and numbers of a text, whatever their case, accents and punctuation."""
    plain = unicodedata.normalize("NFKD", text).casefold()
    return frozenset(re.findall(r"\w+", "".join(letter for letter in plain if not unicodedata.combining(letter))))


def is_same(one: frozenset[str], other: frozenset[str]) -> bool:
    """Returns whether two tasks are nearly the same. Seven of eight words each in common are 7 / 9, which is not."""
    shorter, longer = sorted((len(one), len(other)))
    if shorter < SAME * longer:
        return False  # they cannot have enough in common
    common = len(one & other)
    return common >= SAME * (shorter + longer - common)


def spread(tasks: Iterable[Json]) -> tuple[Counter[int], Counter[str]]:
    """Counts the tasks of each difficulty, and for each tool."""
    by_difficulty, by_tool = Counter[int](), Counter[str]()
    for task in tasks:
        if isinstance(task.get("difficulty"), int):
            by_difficulty[task["difficulty"]] += 1
        by_tool.update(_names(task))
    return by_difficulty, by_tool
