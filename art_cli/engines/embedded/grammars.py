"""Grammars for replies with `response_format` and forced tool calls, and the tokens they allow next.

A Format is text: llguidance's Lark, with `%json` rules and special tokens by id. If the template has thinking, a
thought may precede the answer. If there are tools and the choice is free, calls may replace the answer. Calls are
written as chat_prompts.py reads them.

llguidance compiles formats and masks tokens. A schema is tried out in a child process
(grammar_trial.py). The child is killed when it exceeds its limits, because the library's own limits do not hold
everywhere. Then the schema is compiled here, in a thread. Compiled formats and rejections are cached.
"""

import asyncio
import json
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from art_cli.chat.chat_errors import ChatError, invalid
from art_cli.chat.requests import Json, Request
from art_cli.engines.embedded.reply_text import MARKERS, Vocabulary
from art_cli.runtime.errors import EngineError
from art_cli.runtime.processes.child import run_program

if TYPE_CHECKING:  # the import takes 0.1 s, and most runs never use a format
    from llguidance import LLMatcher, LLTokenizer

# Thoughts before the answer. begun: the prompt opened a thought; free: the model may open one; none: not allowed.
Thoughts = Literal["begun", "free", "none"]

CALL, CALL_END, THINK, THINK_END = MARKERS
MAX_SCHEMA = 128 * 1024  # characters of a schema's JSON; OpenAI admits 120,000
NAME_KEY, ARGUMENTS_KEY = '{"name": "', ', "arguments": '
Bools = npt.NDArray[np.bool_]

MAX_KEPT = 32  # compiled formats in the cache; a costly format takes some 50 MB
NUM_THREADS = 2  # formats compiled concurrently
TRIAL_CPU_S = 2  # 2,000 properties take 0.8
TRIAL_WALL_S = 20.0  # a busy machine gives a process little
TRIAL_BYTES = 512 * 2**20
COMPILE_DEADLINE_S = 60.0  # longest time to compile a format, including the wait for a thread
LIMITS: dict[str, Any] = {
    "max_lexer_states": 50_000,  # each takes 1 to 2 kB
    "verbose_errors": False,  # they quote the reply
}


@dataclass(frozen=True)
class Format:
    """Example: Format("start: answer\\nanswer: %json {...}", ("%json {...}",), "response_format")"""

    grammar: str
    schemas: tuple[str, ...]  # client-written parts of the grammar, each the right side of a rule
    param: str  # the request parameter with these schemas


def reply_format(vocabulary: Vocabulary, request: Request, tools: list[Json], thoughts: Thoughts) -> Format | None:
    """Returns the format for a chat reply; None when the reply is free. Raises ChatError 400 if a schema is too long.

    `tools` may be called. The prompt has already opened a forced call, unless it has opened a thought.
    """
    if request.response_format is None and not tools:
        return None
    calls = _Calls(vocabulary, tools)
    if tools and request.tool_choice != "auto":
        rules, start, param = calls.rules, calls.forced(request.tool_choice, begun=thoughts != "begun"), "tools"
        thoughts = "begun" if thoughts == "begun" else "none"
    elif request.response_format is not None:
        rules, start, param = [("answer", _answer_rule(request.response_format))], "answer", "response_format"
        if tools:
            rules, start = [*rules, *calls.rules], f"(answer | {calls.several})"
    else:
        return None
    thought = _thought(vocabulary, thoughts)
    lines = [f"start: {thought} {start}", *(f"{name}: {side}" for name, side in rules)]
    if thought:
        lines.append("GAP: /\\n{1,8}/")
        lines.append("thought[lazy]: /(?s:.*)<\\/think>/")
    schemas = tuple(side for _, side in rules if side.startswith("%json "))
    return Format("\n".join(lines), schemas, param)


class _Calls:
    """Grammar rules for tool calls: `name_on` is a call starting at its name, `end` the text after its arguments."""

    def __init__(self, vocabulary: Vocabulary, tools: Sequence[Json]) -> None:
        self._names = [tool["function"]["name"] for tool in tools]
        self._begin = f"{_spelled(vocabulary, CALL)} {_quoted(chr(10) + NAME_KEY)}"
        sides = []
        self.rules: list[tuple[str, str]] = []
        for index, tool in enumerate(tools):
            function = tool["function"]
            schema = {"type": "object", **(function.get("parameters") or {})}
            self.rules.append((f"arguments_{index}", _json_rule(schema, "tools", bool(function.get("strict")))))
            head = json.dumps(function["name"], ensure_ascii=False)[1:] + ARGUMENTS_KEY
            sides.append(f"{_quoted(head)} arguments_{index} end")
        self.rules.append(("name_on", " | ".join(sides)))
        self.rules.append(("end", f"{_quoted('}' + chr(10))} {_spelled(vocabulary, CALL_END)}"))

    @property
    def several(self) -> str:
        return f"{self._begin} name_on {self._more}"

    @property
    def _more(self) -> str:
        return f'("\\n" {self._begin} name_on)*'

    def forced(self, choice: str | Json, *, begun: bool) -> str:
        """`begun`: the prompt already holds the call's opening, up to a named tool's arguments or up to the name."""
        if isinstance(choice, dict):
            name = choice["function"]["name"]
            index = self._names.index(name)
            head = json.dumps(name, ensure_ascii=False)[1:] + ARGUMENTS_KEY
            return f"{'' if begun else f'{self._begin} {_quoted(head)}'} arguments_{index} end"
        return f"{'' if begun else self._begin} name_on {self._more}"


def _thought(vocabulary: Vocabulary, thoughts: Thoughts) -> str:
    """Returns the grammar for a thought before the answer; "" where thoughts are not allowed."""
    end = _spelled(vocabulary, THINK_END)
    rest = "thought GAP?" if end.startswith('"') else f"/(?s:.*)/ {end} GAP?"
    return {"begun": rest, "free": f"({_spelled(vocabulary, THINK)} {rest})?", "none": ""}[thoughts]


def _answer_rule(response_format: Json) -> str:
    if response_format["type"] == "json_object":
        return _json_rule({"type": "object"}, "response_format", True)
    wanted = response_format["json_schema"]
    return _json_rule(wanted["schema"], "response_format", bool(wanted.get("strict")))


def _json_rule(schema: Json, param: str, is_strict: bool) -> str:
    """Returns the schema as a rule. Without `strict`, llguidance ignores unknown keywords."""
    # No white space: a weak model would write it until its reply is cut.
    text = json.dumps({**schema, "x-guidance": {"lenient": not is_strict, "whitespace_flexible": False}})
    if len(text) > MAX_SCHEMA:
        raise invalid(f"{param}: a schema of {len(text)} characters; at most {MAX_SCHEMA}", param)
    return f"%json {text}"


def _spelled(vocabulary: Vocabulary, marker: str) -> str:
    """Returns the marker in grammar notation: its id if it is an added token, otherwise quoted text.

    llguidance never treats an added token as text, even if the tokenizer does not call it special.
    """
    id = vocabulary.tokenizer.convert_tokens_to_ids(marker)
    return f"<[{id}]>" if id in vocabulary.tokenizer.added_tokens_decoder else _quoted(marker)


def _quoted(text: str) -> str:
    return json.dumps(text)


class GrammarError(EngineError):
    """A format failed to compile, or a reply broke it."""


class Grammars:
    """Compiled formats for one vocabulary. `vocab`: number of token ids in the model; `stop_ids`: they end a reply."""

    def __init__(self, tokenizer: Any, *, vocab: int, stop_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab = tokenizer, vocab
        self._stop_ids = [id for id in stop_ids if id < vocab]
        self._wrapped: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._wrap_lock = threading.Lock()
        self._kept: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="art-grammar")

    async def compile(self, format: Format) -> "LLMatcher":
        """Returns a new matcher to copy. Raises ChatError 400 if there is no grammar, 503 on a busy machine."""
        compiled = asyncio.wrap_future(self._future(format))
        # An exception counts as retrieved even if no client waits for it.
        compiled.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            return await asyncio.wait_for(asyncio.shield(compiled), COMPILE_DEADLINE_S)
        except TimeoutError:
            raise ChatError(503, f"{format.param}: too many schemas are being compiled; try again later") from None
        except GrammarError as error:
            raise invalid(f"{format.param}: {error}", format.param) from error

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)  # the process exits once running compilations finish

    def _future(self, format: Format) -> "Future[LLMatcher]":
        with self._lock:
            if format.grammar not in self._kept or _failed_in_passing(self._kept[format.grammar]):
                self._kept[format.grammar] = self._pool.submit(self._compile, format)
                if len(self._kept) > MAX_KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(format.grammar)
            return self._kept[format.grammar]

    def _compile(self, format: Format) -> "LLMatcher":
        from llguidance import LLMatcher, LLParserLimits

        try_out(format.schemas)
        matcher = LLMatcher(self._wrap(), format.grammar, limits=LLParserLimits(**LIMITS), log_level=0)
        if matcher.is_error():
            raise GrammarError(reason(matcher.get_error()))
        return matcher

    def _wrap(self) -> "LLTokenizer":
        """Returns llguidance's view of the tokenizer. Built once; takes about a second for 150,000 tokens."""
        from llguidance import LLTokenizer

        with self._wrap_lock:
            if self._wrapped is None:
                if not self._stop_ids:
                    raise GrammarError("this model has no end-of-reply token")
                if len(self._tokenizer) > self._vocab:
                    raise GrammarError("this model's tokenizer has tokens that the model has not")
                try:
                    text = self._tokenizer.backend_tokenizer.to_str()
                    self._wrapped = LLTokenizer(text, n_vocab=self._vocab, eos_token=self._stop_ids)
                except (AttributeError, ValueError) as error:
                    raise GrammarError(f"this model's tokenizer cannot be held to a format: {error}") from error
            return self._wrapped


def _failed_in_passing(compiled: "Future[LLMatcher]") -> bool:
    """Returns True if compiling failed for a reason outside the schema, so it may be tried again."""
    return compiled.done() and not isinstance(compiled.exception(), GrammarError | None)


class Masks:
    """Computes the allowed next tokens for several generations together."""

    def __init__(self, vocab: int, num_threads: int) -> None:
        from llguidance import LLExecutor

        self._vocab = vocab
        self._executor = LLExecutor(num_threads)

    def allowed(self, matchers: Sequence["LLMatcher"]) -> Bools:
        """Returns [n, V] masks with at least one token per row: stop tokens as the fallback, also on errors."""
        words = np.zeros((len(matchers), -(-self._vocab // 32)), np.int32)
        jobs = [(matcher, row) for row, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(jobs, words.ctypes.data, words.shape[1] * 4, len(matchers))
        bits = np.unpackbits(words.view(np.uint8), axis=1, count=self._vocab, bitorder="little")
        return bits.view(np.bool_)


def try_out(schemas: Sequence[str]) -> None:
    """Compiles schemas in a child process, not in an event loop. Raises GrammarError if invalid or too costly."""
    names = [f"schema_{index}" for index in range(len(schemas))]
    rules = [f"{name}: {schema}" for name, schema in zip(names, schemas, strict=True)]
    grammar = "\n".join([f"start: {' | '.join(names)}", *rules])
    task = {"grammar": grammar, "seconds": TRIAL_CPU_S, "bytes": TRIAL_BYTES, "limits": LIMITS}
    command = [sys.executable, "-P", str(Path(__file__).with_name("grammar_trial.py"))]
    try:
        done = asyncio.run(run_program(command, json.dumps(task).encode(), timeout_s=TRIAL_WALL_S))
    except TimeoutError:
        # Not the schema's fault: a costly schema hits the CPU limit earlier.
        message = f"the schema took more than {TRIAL_WALL_S:g} s to compile: the machine is busy; try again later"
        raise ChatError(503, message) from None
    if done.status > 0 and b"MemoryError" not in done.stderr:
        raise EngineError(f"the trial of a grammar failed: {done.stderr.decode(errors='replace').strip()[-300:]}")
    if done.status:
        raise GrammarError(f"the schema takes more than {TRIAL_CPU_S} s or too much memory to compile; simplify it")
    if done.stdout:
        raise GrammarError(reason(done.stdout.decode(errors="replace")))


def reason(text: str) -> str:
    """Returns the library's message as one line, with the quoted grammar removed."""
    text = re.split(r"\n\s*\d+ \| |\n<", text, maxsplit=1)[0]
    text = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", " ".join(text.split()))
    text = text.partition(" Enable 'coerce_one_of'")[0]  # an option that no client has
    return text[:300] or "it cannot be compiled"
