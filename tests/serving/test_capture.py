"""`art gateway`: which trajectory a call belongs to, what is written of it, and that no kill loses or doubles any."""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import httpx
import pytest

from art_cli.chat.chat_app import READ_HERE_BYTES
from art_cli.chat.replies import Reply, input_of
from art_cli.chat.requests import Request
from art_cli.cli.gateway import _known_secrets
from art_cli.config.compose import load_gateway
from art_cli.config.schema import GatewayConfig, RedactConfig
from art_cli.engines import Endpoint
from art_cli.judges.files.judged_files import TrajectoryFile
from art_cli.runs.durable import LineWriter, read_lines
from art_cli.runs.trajectory import Trajectory, sequence
from art_cli.runtime.errors import ConfigError, RunError
from art_cli.runtime.secrets import Secrets
from art_cli.serving.gateway import conversations, gateway_service, journal
from art_cli.serving.gateway.client_names import name_clients
from art_cli.serving.gateway.conversations import prefixes_of
from art_cli.serving.gateway.entries import JournalEntry
from art_cli.serving.gateway.gateway_service import Clients, GatewayService
from art_cli.serving.gateway.journal import Journal
from art_cli.serving.gateway.redaction import Redactor
from benchmarks.serving.gateway_days import Plan, examine, play
from tests.support.standins.scripted import ScriptedBackend, encode, tool_call

Json = dict[str, Any]
ANN, BOB, UPSTREAM = "sk-ann-0123456789", "sk-bob-9876543210", "sk-upstream-00112233"
SYSTEM = {"role": "system", "content": "be brief"}


class Engine:
    """The part of an engine that the service uses."""

    def __init__(self, backend: ScriptedBackend) -> None:
        self.backend = backend
        self.endpoint = Endpoint(base_url=None, api_key=UPSTREAM, model="policy", step=3)

    async def watch(self) -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError


@dataclass
class Standing:
    """A gateway that listens, and a client of it."""

    service: GatewayService
    directory: Path
    http: httpx.AsyncClient

    async def ask(self, *messages: Json | str, key: str = ANN, **headers: str) -> httpx.Response:
        """A chat call. Texts are messages of user and assistant in turn, after the system prompt."""
        said = [m if isinstance(m, dict) else _message(place, m) for place, m in enumerate(messages)]
        head = {"authorization": f"Bearer {key}", **{name.replace("_", "-"): value for name, value in headers.items()}}
        body = {"model": "policy", "messages": [SYSTEM, *said]}
        return await self.http.post("/v1/chat/completions", json=body, headers=head)

    async def say(self, *messages: Json | str, **more: str) -> str:
        response = await self.ask(*messages, **more)
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["message"]["content"])


def _message(place: int, text: str) -> Json:
    return {"role": "assistant" if place % 2 else "user", "content": text}


@asynccontextmanager
async def standing(
    directory: Path,
    backend: ScriptedBackend,
    *,
    is_killed: bool = False,
    secrets: Secrets | None = None,
    keys: Sequence[str] = (ANN, BOB),
    **knobs: Any,
) -> AsyncIterator[Standing]:
    """A gateway in this process. `is_killed`: it ends without writing what it holds."""
    config = GatewayConfig(**knobs)
    opened = Journal(
        directory, group_size=config.group_size, rotate_bytes=config.rotate_mb * 1e6, rotate_s=config.rotate_s
    )
    with opened as files:
        if is_killed:
            files.finish = files._writer.close  # type: ignore[method-assign]
        service = GatewayService(
            Engine(backend),  # type: ignore[arg-type]
            files,
            config,
            clients=Clients(keys, name_clients(directory, keys)),
            secrets_known=secrets or Secrets([*keys, UPSTREAM]),
            drain_s=1,
        )
        ready = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(service.run("127.0.0.1", 0, ready.set_result))
        done, _ = await asyncio.wait((task, ready), timeout=30, return_when=asyncio.FIRST_COMPLETED)
        if task in done:
            task.result()
        try:
            async with httpx.AsyncClient(base_url=ready.result(), timeout=30) as http:
                yield Standing(service, directory, http)
        finally:
            service.stopping.stop()
            await task


def written(directory: Path) -> list[Trajectory]:
    paths = sorted(directory.glob("trajectories-*.jsonl"))
    return [trajectory for path in paths for trajectory in read_lines(path, Trajectory)]


def numbered() -> Callable[[object], str]:
    """Answers that are all different."""
    count = iter(range(1000))
    return lambda request: f"reply {next(count)}"


# --- which trajectory a call belongs to -------------------------------------------------------------------------------


async def test_attempts_at_one_question_are_a_group_and_each_goes_on_from_its_own_replies(tmp_path: Path) -> None:
    """Two attempts in alternation; the second turn of each continues its first, token for token."""
    async with standing(tmp_path, ScriptedBackend(numbered())) as gateway:
        first = [await gateway.say("how?") for _ in range(2)]
        for reply in first:
            await gateway.say("how?", reply, "and then?")
    one, other = written(tmp_path)
    assert (one.group_id, one.group_size, {one.index, other.index}) == (other.group_id, 2, {0, 1})
    for trajectory, reply, later in ((one, "reply 0", "reply 2"), (other, "reply 1", "reply 3")):
        assert [message["content"] for message in trajectory.messages[2::2]] == [reply, later]
        whole = f"<system>be brief\n<user>how?\n<assistant>{reply}\n<user>and then?\n<assistant>{later}\n"
        assert sequence(trajectory.turns, 1) == encode(whole)
        assert (trajectory.turns[1].parent, trajectory.branches) == (0, [])


async def test_equal_replies_do_not_mix_two_attempts(tmp_path: Path) -> None:
    """Both attempts hear the same words first, so only that one of them has gone on tells them apart."""
    answers = iter(["same", "same", "left", "right"])
    async with standing(tmp_path, ScriptedBackend(lambda request: next(answers))) as gateway:
        for _ in range(2):
            await gateway.say("how?")
        for _ in range(2):
            await gateway.say("how?", "same", "and then?")
    said = [[message["content"] for message in t.messages if message["role"] == "assistant"] for t in written(tmp_path)]
    assert sorted(said) == [["same", "left"], ["same", "right"]]
    assert all(not trajectory.branches for trajectory in written(tmp_path))


async def test_an_edited_history_is_a_branch_that_shares_the_prefix(tmp_path: Path) -> None:
    async with standing(tmp_path, ScriptedBackend(numbered())) as gateway:
        first = await gateway.say("how?")
        for question in ("and then?", "and why?"):
            await gateway.say("how?", first, question)
    (trajectory,) = written(tmp_path)
    assert [message["content"] for message in trajectory.messages[-2:]] == ["and why?", "reply 2"]
    assert [message["content"] for message in trajectory.branches[0][-2:]] == ["and then?", "reply 1"]
    shared = len(encode("<system>be brief\n<user>how?\n<assistant>reply 0\n<user>and "))
    assert [turn.kept for turn in trajectory.turns][2] == shared


async def test_arguments_written_anew_and_a_prompt_with_the_time_still_go_on(tmp_path: Path) -> None:
    answers = iter([tool_call("add", a=1, b=2.5), "three"])
    async with standing(tmp_path, ScriptedBackend(lambda request: next(answers))) as gateway:
        response = await gateway.ask("sum?")
        reply = response.json()["choices"][0]["message"]
        reply["tool_calls"][0]["function"]["arguments"] = '{"b":2.5,"a":1.0}'
        result = {"role": "tool", "tool_call_id": "call-add", "content": "3.5"}
        clock = {"role": "system", "content": "it is 12:01"}
        await gateway.say(clock, {"role": "user", "content": "sum?"}, reply, result)
    (trajectory,) = written(tmp_path)
    assert trajectory.metrics["num_turns"] == 2


async def test_a_named_key_is_one_conversation_also_on_two_connections_at_once(tmp_path: Path) -> None:
    async with standing(tmp_path, ScriptedBackend(numbered())) as gateway:
        await asyncio.gather(*(gateway.say(f"question {n}", key=f"{ANN}:mine") for n in range(2)))
        await gateway.say("another", key=ANN, X_Art_Conversation="mine")
        await gateway.say("of somebody else", key=f"{BOB}:mine")
    found = {trajectory.metadata["client"]: trajectory for trajectory in written(tmp_path)}
    assert len(found["key 1"].turns) == 3 and len(found["key 1"].branches) == 2
    assert found["key 1"].metadata["conversation"] == "mine"
    assert len(found["key 2"].turns) == 1


async def test_the_header_names_the_task_whatever_the_prompt_says(tmp_path: Path) -> None:
    async with standing(tmp_path, ScriptedBackend(numbered()), group_size=2) as gateway:
        for number in range(3):
            await gateway.say(f"it is {number} o'clock", X_Art_Scenario="ticket 7")
    groups = Counter(trajectory.group_id.rsplit("-", 3)[0] for trajectory in written(tmp_path))
    assert groups == {"ticket 7": 3}
    (path,) = tmp_path.glob("trajectories-*.jsonl")
    assert sorted(group.size for group in TrajectoryFile(path)) == [1, 2]
    assert all(group.is_complete for group in TrajectoryFile(path))


async def test_a_retry_replaces_a_call_of_its_own_attempt_and_never_one_of_another(tmp_path: Path) -> None:
    """The second of two equal first calls fails and is sent again: two attempts, none abandoned. A call that goes on
    from a reply can only be its own attempt's, so its retry marks the answered one as abandoned."""
    outcomes = iter(["one", httpx.HTTPError("down"), "two", "three", "four"])

    def answer(request: object) -> str:
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    retry = {"x-stainless-retry-count": "1"}
    async with standing(tmp_path, ScriptedBackend(answer)) as gateway:
        await gateway.say("how?")
        assert (await gateway.ask("how?")).status_code == 500
        await gateway.say("how?", **retry)
        await gateway.say("how?", "two", "and then?")
        await gateway.say("how?", "two", "and then?", **retry)
    abandoned = [[turn.is_abandoned for turn in trajectory.turns] for trajectory in written(tmp_path)]
    assert sorted(abandoned, key=len) == [[False], [False, True, False]]


# --- until when -------------------------------------------------------------------------------------------------------


async def test_what_is_idle_the_longest_makes_room_and_nothing_is_kept_of_it(tmp_path: Path) -> None:
    async with standing(tmp_path, ScriptedBackend(numbered()), max_open=2) as gateway:
        replies = [await gateway.say(f"question {number}") for number in range(5)]
        held = gateway.service.conversations
        assert [c.recorder.messages[1]["content"] for c in held.open.values()] == ["question 3", "question 4"]
        assert len(held._index) == 2
        assert held.num_bytes == sum(c.recorder.num_bytes for c in held.open.values())
        await gateway.say("question 4", replies[4], "more")
        await gateway.say("question 0", replies[0], "more")  # it is over, so this begins a new one
    assert sorted(trajectory.metrics["num_turns"] for trajectory in written(tmp_path)) == [1, 1, 1, 1, 1, 2]


async def test_a_conversation_that_is_large_ends_and_the_next_call_begins_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversations, "MAX_CALLS", 3)
    async with standing(tmp_path, ScriptedBackend(numbered())) as gateway:
        for number in range(7):
            await gateway.say(f"question {number}", key=f"{ANN}:mine")
        assert len(gateway.service.conversations.open) == 1
    assert sorted(trajectory.metrics["num_turns"] for trajectory in written(tmp_path)) == [1, 3, 3]


# --- what no kill loses or doubles ------------------------------------------------------------------------------------


async def test_a_conversation_goes_on_after_a_kill_as_if_there_was_none(tmp_path: Path) -> None:
    backend = ScriptedBackend(numbered())
    async with standing(tmp_path, backend, is_killed=True) as gateway:
        first = await gateway.say("how?")
    with next(tmp_path.glob("calls-*.jsonl")).open("ab") as file:
        file.write(b'{"conversation":"torn')
    async with standing(tmp_path, backend) as gateway:
        second = await gateway.say("how?", first, "and then?")
        await gateway.say("how?", first, "and then?", second, "and?")
    (trajectory,) = written(tmp_path)
    assert [turn.parent for turn in trajectory.turns] == [None, 0, 1]
    assert sequence(trajectory.turns, 2) == encode(
        "<system>be brief\n<user>how?\n<assistant>reply 0\n<user>and then?\n<assistant>reply 1\n<user>and?\n"
        "<assistant>reply 2\n"
    )
    assert not list(tmp_path.glob("calls-*"))


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["begun", "written", "copying", "copied", "never"])
async def test_a_rotation_that_is_broken_off_anywhere_loses_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """A conversation that is over and two that go on, one line each, broken off before each step of the rotation."""
    backend = ScriptedBackend(numbered())
    async with standing(tmp_path, backend, is_killed=True, max_open=2) as gateway:
        replies = [await gateway.say(f"question {number}") for number in range(3)]
        with monkeypatch.context() as patched, suppress(RuntimeError):
            _break_off(patched, moment)
            await gateway.service._journal.rotate(gateway.service.conversations.open.keys())
    async with standing(tmp_path, backend) as gateway:
        for number in (1, 2):
            await gateway.say(f"question {number}", replies[number], "more")
    said = [[m["content"] for m in trajectory.messages[2::2]] for trajectory in written(tmp_path)]
    assert sorted(said) == [["reply 0"], ["reply 1", "reply 3"], ["reply 2", "reply 4"]]
    assert sum(len(trajectory.turns) for trajectory in written(tmp_path)) == 5


def _break_off(patched: pytest.MonkeyPatch, moment: str) -> None:
    def die(*arguments: object, **knobs: object) -> NoReturn:
        raise RuntimeError("killed")

    match moment:
        case "begun":
            patched.setattr(journal, "write_lines", die)
        case "written":
            patched.setattr(journal.Outline, "copy", die)
        case "copying":
            append, num = LineWriter.append_all, iter([True])
            patched.setattr(LineWriter, "append_all", lambda *args: append(*args) if next(num, False) else die())
        case "copied":
            patched.setattr(Path, "unlink", die)


@pytest.mark.slow
async def test_a_day_of_clients_that_leave_an_endpoint_that_fails_and_two_kills(tmp_path: Path) -> None:
    plan = Plan(conversations=150, kills=2, seconds=4, timeout_s=1)
    day, totals = await play(plan, tmp_path)
    findings, counts = examine(day, tmp_path / "out", plan)
    assert not any(findings), (findings, day.leaks, day.notes)
    assert day.counts["kills"] == 2 and day.counts["clients gave up"] == 0
    assert counts["trajectories"] >= len(set(day.replies.values())) > 100
    assert len(day.replies) == day.counts["calls answered"]


async def test_a_call_that_cannot_be_recorded_costs_itself_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The endpoint sends a token id of 37 bits; calls before and after it are written, also after a kill."""

    class Odd(ScriptedBackend):
        async def reply(self, request: Request) -> Reply:
            reply = await super().reply(request)
            if "odd" in str(request.messages):
                reply.choices[0].token_ids[0] = 99_999_999_999
            return reply

    for is_killed in (True, False):
        async with standing(tmp_path, Odd(), is_killed=is_killed) as gateway:
            for question in ("one", "odd", "two"):
                answer = await gateway.ask(f"{question} {is_killed}", key=f"{ANN}:task")
                assert answer.status_code == (500 if question == "odd" else 200)
    (trajectory,) = written(tmp_path)
    said = [messages[1]["content"] for messages in [*trajectory.branches, trajectory.messages]]
    assert sorted(said) == ["one False", "one True", "two False", "two True"]
    assert "is left out: OverflowError" in caplog.text


async def test_a_line_of_the_journal_that_is_no_entry_costs_itself_alone(tmp_path: Path) -> None:
    async with standing(tmp_path, ScriptedBackend(numbered()), is_killed=True) as gateway:
        for question in ("one", "two"):
            await gateway.say(question)
    (path,) = tmp_path.glob("calls-*.jsonl")
    path.write_text(path.read_text().replace('"created":1', '"created":"today"', 1))
    async with standing(tmp_path, ScriptedBackend()):
        pass
    bad, good = sorted(written(tmp_path), key=lambda trajectory: trajectory.error is None)
    assert (bad.messages, bad.error) == ([], "journal: no call of this conversation can be read")
    assert (good.messages[1]["content"], good.error) == ("two", None)


async def test_a_full_disk_refuses_calls_and_loses_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = ScriptedBackend(numbered())

    def full(self: LineWriter, records: object) -> NoReturn:
        raise OSError(28, "No space left on device")

    async with standing(tmp_path, backend) as gateway:
        first = await gateway.say("how?")
        with monkeypatch.context() as patched:
            patched.setattr(LineWriter, "append_all", full)
            refused = await gateway.ask("how?", first, "and then?")
            assert refused.status_code == 503 and "No space left" in refused.text
            await gateway.service._journal.sync()
        with monkeypatch.context() as patched:
            patched.setattr(journal, "MIN_FREE", 2**80)
            num_asked = len(backend.requests)
            assert (await gateway.ask("how?", first, "and then?")).status_code == 503
            assert len(backend.requests) == num_asked  # the endpoint was not even asked
        await gateway.say("how?", first, "and then?")
    (trajectory,) = written(tmp_path)
    assert [m["content"] for m in trajectory.messages[2::2]] == ["reply 0", "reply 2"]


def test_two_gateways_cannot_write_to_one_directory(tmp_path: Path) -> None:
    knobs: Any = {"group_size": 8, "rotate_bytes": 1e6, "rotate_s": 1e6}
    with Journal(tmp_path, **knobs), pytest.raises(RunError, match="in use by process"):
        Journal(tmp_path, **knobs).__enter__()


def test_a_file_is_due_also_if_the_clock_was_set_back(tmp_path: Path) -> None:
    with Journal(tmp_path, group_size=8, rotate_bytes=1e6, rotate_s=60) as journal:
        journal.append(JournalEntry(conversation="a", number=0, at=1e9))
        assert [journal.is_due(1e9 + age) for age in (0, 59, 60, -59, -3600)] == [False, False, True, False, True]


# --- who may ask, and what is never written ---------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["sk-eve", f"{ANN}x", f"{ANN[:-1]}:mine", ":mine"])
async def test_an_unknown_key_gets_a_401_and_is_not_recorded(tmp_path: Path, key: str) -> None:
    async with standing(tmp_path, ScriptedBackend()) as gateway:
        assert (await gateway.ask("how?", key=key)).status_code == 401
    assert not written(tmp_path)


async def test_keys_and_what_rules_match_are_in_no_file_and_reach_the_endpoint_and_the_client(tmp_path: Path) -> None:
    """The call that quotes them keeps its text and loses its token ids; the other keeps both."""
    quoted = f"I am {ANN}, SSN 123-45-6789, at https://u:pass-word@host/"
    answer = tool_call("login", user="ann", password="hunter2")
    backend = ScriptedBackend(lambda request: answer if "SSN" in str(request.messages) else "fine")
    redact = {"patterns": [r"\d{3}-\d{2}-\d{4}"], "keys": ["Password"]}
    async with standing(tmp_path, backend, is_killed=True, redact=redact) as gateway:
        reply = (await gateway.ask(quoted)).json()["choices"][0]["message"]
        await gateway.say("how?", key=f"{BOB}:named-{BOB}")
        assert quoted in str(backend.requests[0].messages)
        assert json.loads(reply["tool_calls"][0]["function"]["arguments"])["password"] == "hunter2"
    journaled = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    async with standing(tmp_path, backend, redact=redact):
        pass
    text = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    for secret in (ANN, BOB, UPSTREAM, "123-45-6789", "hunter2", "pass-word"):
        assert secret.encode() not in journaled + text
    secretive, plain = sorted(written(tmp_path), key=lambda trajectory: len(trajectory.turns))
    assert not secretive.turns and secretive.metadata["text_only_calls"] == 1
    assert secretive.messages[1]["content"] == "I am ***, SSN [redacted], at https://***@host/"
    call = secretive.messages[2]["tool_calls"][0]["function"]
    assert json.loads(call["arguments"]) == {"user": "ann", "password": "[redacted]"}
    assert len(plain.turns) == 1 and plain.metadata["text_only_calls"] == 0


class Watched(Secrets):
    """Keeps the threads in which it redacts long texts."""

    def __init__(self, values: list[str]) -> None:
        super().__init__(values)
        self.threads: list[threading.Thread] = []

    def redact(self, text: str) -> str:
        if len(text) > READ_HERE_BYTES:
            self.threads.append(threading.current_thread())
        return super().redact(text)


async def test_a_long_call_is_redacted_once_and_not_on_the_event_loop(tmp_path: Path) -> None:
    """A plain prompt, a message and a tool, each with and without a key in it."""
    secrets = Watched([ANN, BOB, UPSTREAM])
    head = {"authorization": f"Bearer {ANN}"}
    async with standing(tmp_path, ScriptedBackend(), secrets=secrets) as gateway:
        for words in ("word " * 20_000, f"{ANN} " * 8_000):
            tool = {"type": "function", "function": {"name": "add", "description": f"tool {words}", "parameters": {}}}
            chat = {"model": "policy", "messages": [{"role": "user", "content": words}], "tools": [tool]}
            plain = {"model": "policy", "prompt": words}
            for path, body in (("chat/completions", chat), ("completions", plain)):
                assert (await gateway.http.post(f"/v1/{path}", json=body, headers=head)).status_code == 200
    assert len(secrets.threads) == 6
    assert threading.main_thread() not in secrets.threads
    assert ANN not in str(written(tmp_path))


def test_values_of_named_keys_go_also_in_json_that_a_text_quotes() -> None:
    redactor = Redactor(RedactConfig(keys=["token"], patterns=["b{3}"]), Secrets([]))
    cases = {
        '{"a": {"Token": [1, {"x": 2}]}}': '{"a":{"Token":"[redacted]"}}',
        'he sent {"token": {"x": [1]}, "b": 2} twice': 'he sent {"token": "[redacted]", "b": 2} twice',
        'cut off: {"token": "abc\nnext line': 'cut off: {"token": "[redacted]"\nnext line',
        json.dumps({"inner": json.dumps({"token": 1})}): json.dumps(
            {"inner": '{"token":"[redacted]"}'}, separators=(",", ":")
        ),
        "a bbb c": "a [redacted] c",
        '{"c": "bb\\u0062"}': '{"c":"[redacted]"}',
        "nothing": "nothing",
    }
    assert {text: redactor.text(text) for text in cases} == cases
    assert all(redactor.text(text) == text for text in cases.values())
    message = {"role": "user", "content": "nothing"}
    assert redactor.value(message) is message and redactor.messages([message, message])[1] is message


def test_keys_and_rules_reach_the_values_of_type_and_role() -> None:
    """The protocol's own words stay where it has them; in a tool's schema, or as a key, nothing is exempt."""
    redactor = Redactor(RedactConfig(patterns=["user|string-\\d"]), Secrets([ANN]))
    tools = [
        {
            "type": "function",
            "function": {"name": "f", "parameters": {"type": ANN, "properties": {"x": {"role": ANN}}}},
        },
        {"type": "function", "function": {"name": "g", "parameters": {"type": "string-1", "role": "user"}}},
    ]
    first, second = redactor.value(tools)
    assert first["type"] == "function" and ANN not in str(first)
    assert second["function"]["parameters"] == {"type": "[redacted]", "role": "[redacted]"}
    message = {"role": "user", "content": [{"type": ANN, "text": "x"}]}
    assert redactor.value(message) == {"role": "user", "content": [{"type": "***", "text": "x"}]}


def test_patterns_reach_the_keys_of_a_users_data() -> None:
    redactor = Redactor(RedactConfig(patterns=[r"\d{3}-\d{2}-\d{4}"]), Secrets([]))
    call = {"arguments": {"123-45-6789": {"by": "ann"}}, "role": "x"}
    assert redactor.value(call) == {"arguments": {"[redacted]": {"by": "ann"}}, "role": "x"}
    assert redactor.document({"123-45-6789": "ann"}) == {"[redacted]": "ann"}
    assert redactor.value(plain := {"arguments": {"id": "ann"}}) is plain


def test_the_password_of_the_endpoints_address_is_masked_alone() -> None:
    endpoint = Endpoint(base_url="https://me:pass%2Dword@host/v1?key=query-key", api_key=UPSTREAM, model="m", step=0)
    known = _known_secrets([ANN], endpoint)
    assert known.redact(f"{ANN} {UPSTREAM} pass-word query-key") == "*** *** *** ***"


async def test_a_reply_without_token_ids_is_text_only_and_can_be_judged(tmp_path: Path) -> None:
    class Plain(ScriptedBackend):
        async def reply(self, request: Any) -> Any:
            reply = await super().reply(request)
            reply.prompt_ids, reply.choices[0].token_ids, reply.usage = [], [], (9, 3)
            return reply

    async with standing(tmp_path, Plain(numbered())) as gateway:
        for _ in range(2):
            await gateway.say("how?")
        assert gateway.service.totals.num_calls == 2
    (path,) = tmp_path.glob("trajectories-*.jsonl")
    source = TrajectoryFile(path)
    (group,) = source
    assert [t.messages[-1]["content"] for t in source.load(group)] == ["reply 0", "reply 1"]
    assert [(len(t.turns), t.metrics["num_completion"]) for t in source.load(group)] == [(0, 3), (0, 3)]
    assert gateway.service.totals[1:] == (2, 0, 1)


async def test_a_client_cannot_switch_recording_off(tmp_path: Path) -> None:
    async with standing(tmp_path, ScriptedBackend()) as gateway:
        await gateway.say("how?", x_art_record="no")
    assert [trajectory.messages[1]["content"] for trajectory in written(tmp_path)] == ["how?"]


async def test_long_arguments_are_compared_in_a_thread_and_huge_ones_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, parsed = [], []

    def watched(*arguments: Any) -> list[bytes]:
        threads.append(threading.current_thread())
        return prefixes_of(*arguments)

    monkeypatch.setattr(gateway_service, "prefixes_of", watched)
    monkeypatch.setattr(conversations, "input_of", lambda text: parsed.append(len(text)) or input_of(text))
    lists = {num: "[" + ",".join(["[1.0]"] * num) + "]" for num in (10, 20_000, 100_000)}
    async with standing(tmp_path, ScriptedBackend()) as gateway:
        for text in lists.values():
            call = tool_call("add")
            call["tool_calls"][0]["function"]["arguments"] = text
            result = {"role": "tool", "tool_call_id": "call-add", "content": "3"}
            await gateway.say("sum?", call, result)
    assert [thread is threading.main_thread() for thread in threads] == [True, False, False]
    assert parsed == [len(lists[10]), len(lists[20_000])]


async def test_hostile_headers_and_huge_bodies_are_refused_and_calls_go_on(tmp_path: Path) -> None:
    async with standing(tmp_path, ScriptedBackend(numbered())) as gateway:
        names = {"X_Art_Conversation": "%00%FF../../etc" + "x" * 5000, "X_Art_Scenario": "%2e%2e/" + "y" * 5000}
        await gateway.say("how?", **names)
        await gateway.say("how?", key=f"{ANN}:%00:../../%7f")
        huge = await gateway.http.post(
            "/v1/chat/completions", content=b"[" * (50 << 20), headers={"authorization": f"Bearer {ANN}"}
        )
        assert huge.status_code == 413
        await gateway.say("how?")
    assert len(written(tmp_path)) == 3
    assert {path.parent for path in tmp_path.rglob("*")} == {tmp_path}


def test_a_file_needs_no_more_than_an_endpoint(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("engine: {name: openai, url: http://127.0.0.1:1/v1, model: m}\n")
    loaded = load_gateway(path, ["gateway.idle_s=5"])
    assert (loaded.trajectories, loaded.gateway.idle_s, loaded.run) == (tmp_path / "runs/mine/gateway", 5.0, None)
    path.write_text("gateway: {redact: {patterns: ['(']}}\n")
    with pytest.raises(ConfigError, match="is not a regular expression"):
        load_gateway(path)
    path.write_text("gateway: {idle_s: 5}\n")
    with pytest.raises(ConfigError, match="name an endpoint"):
        load_gateway(path)
