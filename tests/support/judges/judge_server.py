"""A judge that scores by a known rule, behind an OpenAI-compatible HTTP server, and misbehaves on demand.

It reads the record of a group as the instructions describe it (`read_record`; nothing of `art_cli` is used for that),
scores each attempt by `rule`, and answers by id. The default rule reads `quality=0.73` out of an attempt's own texts.
Position bias and noise can be added; `misbehaviour` says what it does wrong, and `times` how often before it behaves.

    async with JudgeServer(Conduct(bias=0.2)) as server: ...  server.api_base
    python -m tests.support.judges.judge_server --delay-ms 50 --rule recipes/x.py:rule   prints its api_base and serves
"""

import argparse
import asyncio
import hashlib
import importlib.util
import json
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

QUALITY = re.compile(r"quality=(-?[0-9.]+)")

# --- the record -------------------------------------------------------------------------------------------------------


@dataclass
class Shown:
    """One message of the record: role, and (kind, text) pieces."""

    role: str
    pieces: list[tuple[str, str]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "\n".join(text for _, text in self.pieces)


@dataclass
class Record:
    """What the prompt shows. `attempts` are in the order shown: id -> [(label, conversation)]."""

    tools: str = ""
    passages: dict[int, str] = field(default_factory=dict)
    parts: dict[int, list[Shown]] = field(default_factory=dict)
    attempts: dict[str, list[tuple[str, list[Shown]]]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)


def split_marks(content: str) -> list[tuple[str, str | None]]:
    """(mark, the text below it; None: no line below it), by the code that the first line names."""
    first, *lines = content.split("\n")
    code = re.fullmatch(r'The record\. Lines that start with "<(\d+) " are its marks\.', first)
    assert code, f"the record does not begin as it should: {first[:200]}"
    found: list[tuple[str, list[str]]] = []
    for line in lines:
        if line.startswith(f"<{code[1]} "):
            assert line.endswith(">"), line[:200]
            found.append((line[len(code[1]) + 2 : -1], []))
        else:
            found[-1][1].append(line)
    return [(mark, "\n".join(texts) if texts else None) for mark, texts in found]


def read_record(content: str) -> Record:
    """The record, every conversation spelt out."""
    record = Record()
    current: list[Shown] | None = None
    name = ""
    for mark, text in split_marks(content):
        words = mark.split(" ")
        after = list(record.parts[int(words[-1])]) if "part" in words[1:] else []
        match words[0]:
            case "tools":
                record.tools = text or ""
            case "passage":
                record.passages[int(words[1])] = text or ""
            case "part":
                current = record.parts[int(words[1])] = after
            case "attempt":
                name, current = words[1], None
                record.attempts[name] = []
                if len(words) > 2:
                    current = after
                    record.attempts[name].append(("main", current))
            case "main" | "side":
                current = after
                record.attempts[name].append((words[0], current))
            case "system" | "developer" | "user" | "assistant" | "tool" | "message":
                if current is None:
                    current = []
                    record.attempts[name].append(("main", current))
                current.append(Shown(mark))
                if text is not None:
                    current[-1].pieces.append(("text", text))
            case "cut":
                assert current is not None
                if words[2] == "messages":
                    current.append(Shown(mark))
                else:
                    kind, head = current[-1].pieces.pop()
                    current[-1].pieces.append((kind, f"{head}<{mark}>{text}"))
            case "end":
                assert text is not None
                record.asked = text.partition(": ")[2].split(", ")
            case _:
                assert current is not None
                kind = "text" if words[0] == "as" else words[0]
                passage = record.passages[int(words[-1])] if "passage" in words else text
                current[-1].pieces.append((kind, passage or ""))
    return record


# --- the rule ---------------------------------------------------------------------------------------------------------

Attempt = list[list[tuple[str, str]]]  # conversations of (role, text), the main one last
Rule = Callable[[Attempt], float]  # -> [0, 1]
GroupRule = Callable[[list[Attempt]], list[float]]  # the attempts of one question, which may be compared
Words = Callable[[list[Attempt]], list[str]]  # what is said of each attempt at one question


def stated_quality(conversations: Attempt) -> float:
    """The last `quality=...` that an assistant message of the attempt states; 0 where none does."""
    found = [
        QUALITY.findall(text) for conversation in conversations for role, text in conversation if role == "assistant"
    ]
    stated = [value for values in found for value in values]
    return float(stated[-1]) if stated else 0.0


@dataclass
class Conduct:
    """How the judge behaves."""

    rule: Rule = stated_quality
    group_rule: GroupRule | None = None  # in place of `rule`
    bias: float = 0.0  # added for the first place, taken off for the last, half of it each; linear between
    noise: float = 0.0  # standard deviation; drawn anew for every call
    relative: bool = False  # stretch each answer's scores from 0 to 1, as a judge who only compares does
    delay_s: float = 0.0
    misbehaviour: str = ""  # a name of MISBEHAVIOURS, or of an HTTP one below
    times: int = 10**9  # how many calls are still answered so
    only: str = ""  # the misbehaviour is for prompts that hold this text
    retry_after: str = "0.05"
    seed: int = 0
    takes_schema: bool = True
    says: str = ""  # the explanation of every entry; "": the place it was shown at
    words: Words | None = None  # the explanations, in place of `says`
    models: Sequence[str] = ()  # the models that its replies name, in turn; none: the one that was asked for
    key: str | None = None  # the key it wants; a wrong one is answered with 401 that quotes it
    log: Path | None = None  # a line per answered call: digest of its prompt
    headers: dict[str, str] = field(default_factory=dict)  # besides, of every answer
    error: str = ""  # the message of a 429 or 500; "": a harmless one
    usage: Any = None  # in place of the true one
    change_text: Callable[[str], str] | None = None  # applied to what the model says
    change_body: Callable[[bytes], bytes] | None = None  # applied to the whole body of an answer, behind the head


Entry = dict[str, Any]
MISBEHAVIOURS: dict[str, Callable[[list[Entry]], str]] = {
    "out_of_order": lambda scores: _dump(scores[::-1]),
    "missing_id": lambda scores: _dump(scores[:-1]),
    "extra_id": lambda scores: _dump([*scores, {"id": "zz9", "explanation": "", "score": 0.5}]),
    "duplicate": lambda scores: _dump([*scores, {**scores[0], "score": 1 - scores[0]["score"]}]),
    "seven": lambda scores: _dump([{**scores[0], "score": 7}, *scores[1:]]),
    "negative": lambda scores: _dump([{**scores[0], "score": -0.1}, *scores[1:]]),
    "nan": lambda scores: _dump([{**scores[0], "score": float("nan")}, *scores[1:]]),
    "infinite": lambda scores: _dump([{**scores[0], "score": float("inf")}, *scores[1:]]),
    "true": lambda scores: _dump([{**scores[0], "score": True}, *scores[1:]]),
    "text_score": lambda scores: _dump([{**entry, "score": f" {entry['score']:.6f}"} for entry in scores]),
    "upper_case": lambda scores: _dump([{**entry, "id": entry["id"].upper()} for entry in scores]),
    "long": lambda scores: _dump([{**scores[0], "explanation": "because " * 250_000}, *scores[1:]]),
    "word_score": lambda scores: _dump([{**scores[0], "score": "0.5 of 1"}, *scores[1:]]),
    "percent": lambda scores: _dump([{**entry, "score": 100 * entry["score"]} for entry in scores]),
    "null_score": lambda scores: _dump([{**scores[0], "score": None}, *scores[1:]]),
    "prose": lambda scores: f"Let me think. {{It is close.}}\n\n{_dump(scores)}\n\nI hope this helps! {{}}",
    "fenced": lambda scores: f"Here you are:\n```json\n{_dump(scores)}\n```\nDone.",
    "thinking": lambda scores: f'<think>{{"scores": []}} no...</think>{_dump(scores)}',
    "two_verdicts": lambda scores: _dump(scores) + "\nOn reflection:\n" + _dump(_swap(scores)),
    "empty": lambda scores: "",
    "blank": lambda scores: " \n ",
    "cut_off": lambda scores: _dump(scores)[: len(_dump(scores)) * 2 // 3],
    "no_json": lambda scores: "The first attempt is the best one.",
    "wrong_schema": lambda scores: json.dumps({"scores": {entry["id"]: entry["score"] for entry in scores}}),
    "by_position": lambda scores: json.dumps({"scores": [entry["score"] for entry in scores]}),
    "bare_list": lambda scores: json.dumps(scores),
    "key_twice": lambda scores: _dump(scores).replace('"score":', '"score": 0.123, "score":', 1),
    "wrong_ids": lambda scores: _dump([{**entry, "id": str(place)} for place, entry in enumerate(scores, 1)]),
}
VALID = frozenset(
    {"out_of_order", "prose", "fenced", "thinking", "text_score", "upper_case", "long"}
)  # unusual answers that say what they must
HTTP_MISBEHAVIOURS = ("429", "500", "503", "hang", "disconnect", "not_json", "no_choices", "null_content")


def _dump(scores: Sequence[Entry]) -> str:
    return json.dumps({"scores": list(scores)})


def _swap(scores: Sequence[Entry]) -> list[Entry]:
    """The scores in reverse on the same ids."""
    return [{**entry, "score": other["score"] / 2} for entry, other in zip(scores, reversed(scores), strict=True)]


def judge_record(record: Record, conduct: Conduct, rng: random.Random) -> list[Entry]:
    """The entries in the order shown."""
    names = list(record.attempts)
    assert record.asked == names, (record.asked, names)
    attempts: list[Attempt] = [
        [
            [(message.role.split(" ")[0], message.text) for message in conversation]
            for _, conversation in sorted(record.attempts[name], key=lambda labelled: labelled[0] == "main")
        ]
        for name in names
    ]
    exact = conduct.group_rule(attempts) if conduct.group_rule else [conduct.rule(attempt) for attempt in attempts]
    scores = []
    for place, score in enumerate(exact):
        lean = conduct.bias * (0.5 - place / (len(names) - 1)) if len(names) > 1 else 0.0
        scores.append(score + lean + rng.gauss(0, conduct.noise))
    if conduct.relative and max(scores) > min(scores):
        scores = [(score - min(scores)) / (max(scores) - min(scores)) for score in scores]
    said = (
        conduct.words(attempts) if conduct.words else [conduct.says or f"place {place}" for place in range(len(names))]
    )
    return [
        {"id": name, "explanation": explanation, "score": round(min(1.0, max(0.0, score)), 6)}
        for name, explanation, score in zip(names, said, scores, strict=True)
    ]


# --- the server -------------------------------------------------------------------------------------------------------


class JudgeServer:
    """Serves POST /v1/chat/completions on a free loopback port. `asked` holds every request's body."""

    def __init__(self, conduct: Conduct | None = None, *, keep: bool = True) -> None:
        self.conduct = conduct or Conduct()
        self.asked: list[dict[str, Any]] = []
        self.arrived: list[float] = []  # when each of them came, monotonic
        self.num_answered = 0
        self._keep, self._rng = keep, random.Random(self.conduct.seed)
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def api_base(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port, limit=1 << 24, backlog=1024)

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for connection in list(self._connections):
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def __aenter__(self) -> "JudgeServer":
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            while await self._answer(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Reads and answers one request; False: the connection is to be closed."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        length = int(re.search(r"content-length: (\d+)", head)[1])  # type: ignore[index]
        body = json.loads(await reader.readexactly(length))
        self.arrived.append(time.monotonic())
        if self._keep:
            self.asked.append(body)
        conduct = self.conduct
        if conduct.key is not None and f"authorization: bearer {conduct.key.lower()}" not in head:
            given = re.search(r"authorization: bearer (\S*)", head)
            message = f"Incorrect API key provided: {given[1] if given else 'none'}"
            return await _respond(writer, 401, {"error": {"message": message}})
        if not conduct.takes_schema and "response_format" in body:
            return await _respond(writer, 400, {"error": {"message": "response_format is not supported"}})
        misbehaviour = self._choose_misbehaviour(body)
        if misbehaviour in HTTP_MISBEHAVIOURS:
            return await self._misbehave(writer, misbehaviour)
        if conduct.delay_s:
            await asyncio.sleep(conduct.delay_s)
        return await self._complete(writer, body, misbehaviour)

    def _choose_misbehaviour(self, body: dict[str, Any]) -> str:
        is_meant = any(self.conduct.only in message["content"] for message in body["messages"])
        if not self.conduct.misbehaviour or self.conduct.times <= 0 or not is_meant:
            return ""
        self.conduct.times -= 1
        return self.conduct.misbehaviour

    async def _complete(self, writer: asyncio.StreamWriter, body: dict[str, Any], misbehaviour: str) -> bool:
        content = next(message["content"] for message in body["messages"] if message["role"] == "user")
        entries = judge_record(read_record(content), self.conduct, self._rng)
        text = MISBEHAVIOURS[misbehaviour](entries) if misbehaviour else _dump(entries)
        if self.conduct.change_text is not None:
            text = self.conduct.change_text(text)
        models = self.conduct.models or [body["model"]]
        model = models[self.num_answered % len(models)]
        self.num_answered += 1
        if self.conduct.log is not None:
            with self.conduct.log.open("a") as file:
                file.write(hashlib.sha256(content.encode()).hexdigest() + "\n")
        prompt_tokens = sum(len(message["content"]) for message in body["messages"]) // 4
        usage = self.conduct.usage or {"prompt_tokens": prompt_tokens, "completion_tokens": len(text) // 4}
        reason = "length" if misbehaviour == "cut_off" else "stop"
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": reason}
        reply = {"id": "x", "object": "chat.completion", "created": 0, "model": model}
        body = {**reply, "choices": [choice], "usage": usage}
        return await _respond(writer, 200, body, self.conduct.headers, change=self.conduct.change_body)

    async def _misbehave(self, writer: asyncio.StreamWriter, kind: str) -> bool:
        match kind:
            case "429":
                headers = {"Retry-After": self.conduct.retry_after} if self.conduct.retry_after else {}
                headers |= self.conduct.headers
                message = self.conduct.error or "slow down"
                return await _respond(writer, 429, {"error": {"message": message}}, headers)
            case "500" | "503":
                message = self.conduct.error or "oops"
                return await _respond(writer, int(kind), {"error": {"message": message}}, self.conduct.headers)
            case "hang":
                await asyncio.get_running_loop().create_future()
            case "disconnect":
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{")
                await writer.drain()
            case "not_json":
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n<htm>")
                await writer.drain()
                return True
            case "no_choices":
                return await _respond(writer, 200, {"choices": []})
            case "null_content":
                return await _respond(
                    writer, 200, {"choices": [{"message": {"content": None}, "finish_reason": "stop"}]}
                )
        return False


async def _respond(
    writer: asyncio.StreamWriter,
    status: int,
    body: dict[str, Any],
    headers: dict[str, str] | None = None,
    *,
    change: Callable[[bytes], bytes] | None = None,
) -> bool:
    data = json.dumps(body).encode()
    data = data if change is None else change(data)
    lines = [f"HTTP/1.1 {status} X", "Content-Type: application/json", f"Content-Length: {len(data)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
    await writer.drain()
    return True


@contextmanager
def serving(conduct: Conduct | None = None) -> Iterator[JudgeServer]:
    """A judge in a thread of its own, for programs that run an event loop themselves."""
    server = JudgeServer(conduct)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(server.start(), loop).result(5)
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(server.close(), loop).result(5)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
        loop.close()


def load_rule(entry: str) -> Any:
    """The function of "file.py:function"."""
    path, _, name = entry.rpartition(":")
    spec = importlib.util.spec_from_file_location("judge_rule", path)
    assert spec and spec.loader, entry
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


async def _main(arguments: argparse.Namespace) -> None:
    conduct = Conduct(
        rule=load_rule(arguments.rule) if arguments.rule else stated_quality,
        group_rule=load_rule(arguments.group_rule) if arguments.group_rule else None,
        words=load_rule(arguments.words) if arguments.words else None,
        bias=arguments.bias,
        noise=arguments.noise,
        delay_s=arguments.delay_ms / 1000,
        misbehaviour=arguments.misbehaviour,
        log=arguments.log,
    )
    server = JudgeServer(conduct, keep=False)
    await server.start(arguments.port)
    sys.stdout.write(server.api_base + "\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--bias", type=float, default=0.0)
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--misbehaviour", default="")
    parser.add_argument("--rule", default="")
    parser.add_argument("--group-rule", default="")
    parser.add_argument("--words", default="")
    parser.add_argument("--log", type=Path, default=None)
    asyncio.run(_main(parser.parse_args()))
