"""The runner: user functions and real programs against a real gateway; every failure becomes a trajectory.

Functions run in this process where the property is not of a process: test_rollout_process.py compares the two.
"""

import asyncio
import hashlib
import logging
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from art_cli.chat.chat_errors import ChatError
from art_cli.chat.requests import Request
from art_cli.rollouts import function_rollout as function
from art_cli.rollouts import rollout_runner
from art_cli.rollouts.command_rollout import is_passed
from art_cli.rollouts.rollout_runner import Progress, RolloutPlan
from art_cli.runs.trajectory import Trajectory, prompt
from art_cli.runtime.errors import RolloutError, UsageError
from tests.support.others.node import clients
from tests.support.processes.process_table import is_alive
from tests.support.processes.stage import ASK, Stage
from tests.support.processes.waiting import until
from tests.support.standins.scripted import ScriptedBackend, encode, tool_call


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path, processes=0)


# --- what a rollout returns -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("keyword", ["def", "async def"])
async def test_a_number_is_a_reward(stage: Stage, keyword: str) -> None:
    values = "[1, 0.5, True, None, numpy.float32(2)]"
    source = f"import numpy\n{keyword} rollout(policy, scenario): return {values}[scenario['index']]"
    played = await stage.play(source, num=5)
    assert [(each.returned_reward, each.error) for each in played] == [
        (reward, None) for reward in (1.0, 0.5, 1.0, None, 2.0)
    ]


async def test_an_outcome_brings_metrics_and_metadata(stage: Stage) -> None:
    source = """
from art_cli.rollouts.policy import Outcome
async def rollout(policy, scenario):
    scenario["index"] = "changed"  # its own copy
    return Outcome(reward=1, metrics={"moves": 3, "won": True}, metadata={"board": ["X"], "step": policy.step})
"""
    first, second = await stage.play(source, num=2)
    assert first.metrics == {
        "num_turns": 0,
        "num_cancelled": 0,
        "num_abandoned": 0,
        "num_branches": 0,
        "num_sampled": 0,
        "num_retries": 0,
        "moves": 3,
        "won": 1,
    }
    assert first.metadata == {"board": ["X"], "step": 2}
    assert (first.scenario, second.scenario) == ({"id": "s", "index": 0}, {"id": "s", "index": 1})
    assert (first.id, first.group_id, first.group_size, first.index, first.step) == ("t0", "g", 2, 0, 2)
    assert first.duration_s > 0


@pytest.mark.slow
async def test_the_calls_of_a_rollout_are_its_turns(stage: Stage) -> None:
    source = (
        ASK
        + """
async def rollout(policy, scenario):
    reply = await ask(policy)
    await ask(policy, {"role": "user", "content": "hi"}, reply.choices[0].message, {"role": "user", "content": "on"})
    return 1.0
"""
    )
    (trajectory,) = await stage.play(source)
    assert [turn.parent for turn in trajectory.turns] == [None, 0]
    assert prompt(trajectory.turns, 1) == encode("<user>hi\n<assistant>ok\n<user>on\n<assistant>")
    assert [message["content"] for message in trajectory.messages] == ["hi", "ok", "on", "ok"]
    assert trajectory.metrics["num_turns"] == 2
    assert trajectory.num_sampled == 6


@pytest.mark.slow
@pytest.mark.parametrize("keyword", ["def", "async def"])
async def test_a_rollout_names_the_states_in_which_its_calls_act(stage: Stage, keyword: str) -> None:
    """A name holds for all calls until the next one, whichever client of the policy makes them."""
    wait = "await " if keyword == "async def" else ""
    client = "policy.client" if wait else "policy.sync_client"
    source = f"""
import openai
{keyword} rollout(policy, scenario):
    def ask(client):
        return client.chat.completions.create(model=policy.model, messages=[{{"role": "user", "content": "hi"}}])
    {wait}ask({client})
    policy.state("X O\\nÖ%41")
    {wait}ask({client})
    {wait}ask({client}.with_options(max_retries=0))
    policy.state("b" * 1000)
    own = openai.{"AsyncOpenAI" if wait else "OpenAI"}(
        base_url=policy.base_url, api_key=policy.api_key, default_headers=policy.headers
    )
    {wait}ask(own)
    policy.state(None)
    {wait}ask({client})
    {wait}own.close()
    return 1.0
"""
    (trajectory,) = await stage.play(source, processes=1)
    assert trajectory.error is None
    long = "sha256:" + hashlib.sha256(b"b" * 1000).hexdigest()
    assert [turn.state for turn in trajectory.turns] == [None, "X O\nÖ%41", "X O\nÖ%41", long, None]


async def test_a_state_that_is_no_text_fails_its_attempt_with_the_line(stage: Stage) -> None:
    (trajectory,) = await stage.play("def rollout(policy, scenario):\n    policy.state([1, 2])\n    return 1.0\n")
    assert trajectory.error == (
        "TypeError: policy.state takes text, such as a board or a page's address, not list (rollout.py:2)"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "value", ["'1.0'", "[1]", "{'reward': 1}", "(1, 2)", "Outcome(reward='x')", "Outcome(metadata={'f': open})"]
)
async def test_a_return_value_of_a_wrong_type_stops_the_run(stage: Stage, value: str) -> None:
    source = f"from art_cli.rollouts.policy import Outcome\ndef rollout(policy, scenario): return {value}"
    with pytest.raises(RolloutError, match=r"rollout\.py:rollout: ") as caught:
        await stage.play(source)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("def rollout(policy): ...", RolloutError, "must take (policy, scenario)"),
        ("rollout = 5", RolloutError, "not a function but int"),
        ("class rollout:\n    async def __call__(self, policy, scenario): ...", RolloutError, "`rollout = rollout()`"),
        ("class rollout:\n    def __init__(self, policy, scenario): ...", RolloutError, "a class; write `async def"),
        ("def rolout(policy, scenario): ...", UsageError, "did you mean 'rolout'"),
        ("import nothing_there\ndef rollout(p, s): ...", UsageError, "rollout.py:1: ModuleNotFoundError"),
    ],
)
async def test_what_cannot_be_called_is_said_before_anything_runs(
    stage: Stage, source: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as caught:
        await stage.play(source)
    assert message in str(caught.value)


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("keyword", ["def", "async def"])
async def test_an_exception_is_recorded_with_its_line_and_the_others_go_on(stage: Stage, keyword: str) -> None:
    source = f"""
import json
{keyword} rollout(policy, scenario):
    if scenario["index"] == 1:
        json.loads("nonsense")
    return scenario["index"]
"""
    first, second, third = await stage.play(source, num=3)
    assert second.error == "JSONDecodeError: Expecting value: line 1 column 1 (char 0) (rollout.py:5)"
    assert (first.returned_reward, second.returned_reward, third.returned_reward) == (0.0, None, 2.0)


@pytest.mark.slow
async def test_what_was_sampled_before_the_failure_is_kept(stage: Stage) -> None:
    source = ASK + "async def rollout(policy, scenario):\n    await ask(policy)\n    raise ValueError(policy.api_key)\n"
    (trajectory,) = await stage.play(source)
    assert trajectory.failure == "ValueError: *** (rollout.py:8)"  # and the key is nowhere
    assert len(trajectory.turns) == 1


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["turn_limit", "context_length_exceeded"])
async def test_a_limit_is_no_failure_and_its_rollout_has_a_reward(tmp_path: Path, limit: str) -> None:
    """What the rollout returned counts, otherwise `limit_reward`; failures of transport and its code stay failures.

    Each attempt ends in a way of its own.
    """
    endings: dict[str, tuple[float | None, str | None]] = {
        "return 0.25": (0.25, None),
        "return None": (-1.0, None),
        "raise": (-1.0, None),
        "raise ValueError('made of it')": (-1.0, None),
        "return float('nan')": (None, "reward: reward is nan, not a finite number"),
        "raise ConnectionError('gone')": (None, "ConnectionError: gone (rollout.py:"),
        "await asyncio.sleep(60)": (None, "timeout: not finished after 10 s (rollout.timeout_s)"),
    }

    def answer(request: Request) -> str:
        if limit != "turn_limit" and len(request.messages or ()) > 3:
            raise ChatError(400, "too long", code="context_length_exceeded")
        return "ok"

    source = (
        ASK
        + f"""
import asyncio, openai
async def rollout(policy, scenario):
    try:
        for number in range(1, 10):
            await ask(policy, *[{{"role": "user", "content": "hi"}}] * number)
    except openai.BadRequestError as error:
        assert error.code == {limit!r}
{
            "".join(
                f'''
        if scenario["index"] == {index}:
            {ending}'''
                for index, ending in enumerate(endings)
            )
        }
"""
    )
    max_turns = 3 if limit == "turn_limit" else 50
    played = await Stage(tmp_path, ScriptedBackend(answer), processes=0).play(
        source, num=len(endings), max_turns=max_turns, limit_reward=-1, timeout_s=10, retries=0
    )
    for trajectory, (reward, error) in zip(played, endings.values(), strict=True):
        assert (trajectory.returned_reward, trajectory.limit) == (reward, limit)
        assert (trajectory.error or "").startswith(error or "") and (trajectory.error is None) == (error is None)
        assert len(trajectory.turns) == 3


@pytest.mark.slow
async def test_a_limit_that_the_rollout_got_round_leaves_its_failure_its_own(tmp_path: Path) -> None:
    """The agent shortens an oversized conversation, continues, and then fails by itself."""

    def answer(request: Request) -> str:
        if len(request.messages or ()) > 1:
            raise ChatError(400, "too long", code="context_length_exceeded")
        return "ok"

    source = (
        ASK
        + """
import openai
async def rollout(policy, scenario):
    message = {"role": "user", "content": "hi"}
    await ask(policy)
    try:
        await ask(policy, message, message)
    except openai.BadRequestError:
        await ask(policy)
    raise KeyError("mine")
"""
    )
    (trajectory,) = await Stage(tmp_path, ScriptedBackend(answer), processes=0).play(source)
    assert str(trajectory.failure).startswith("KeyError: 'mine'")
    assert (trajectory.error, trajectory.returned_reward, trajectory.limit) == (None, 0.0, None)


@pytest.mark.slow
async def test_a_first_prompt_that_is_too_long_is_a_failure(tmp_path: Path) -> None:
    def answer(request: Request) -> str:
        raise ChatError(400, "too long", code="context_length_exceeded")

    source = ASK + "async def rollout(policy, scenario):\n    await ask(policy)\n"
    (trajectory,) = await Stage(tmp_path, ScriptedBackend(answer), processes=0).play(source)
    assert trajectory.error is not None and trajectory.error.startswith("BadRequestError: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        "import asyncio\nasync def rollout(policy, scenario): await asyncio.Event().wait()",
        "import threading\nlock = threading.Event()\ndef rollout(policy, scenario): lock.wait()",
    ],
    ids=["async", "sync"],
)
async def test_a_rollout_that_does_not_end_is_cut_off(stage: Stage, source: str) -> None:
    for trajectory in await stage.play(source, num=3, timeout_s=0.2, concurrency=1, processes=1):
        assert trajectory.error == "timeout: not finished after 0.2 s (rollout.timeout_s)"
        assert 0.19 <= trajectory.duration_s < 5  # uvloop counts in whole milliseconds


async def test_a_rollout_that_blocks_its_event_loop_is_told_so(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits in a blocking read, as `time.sleep` or a sync client would; the gateway goes on answering."""
    monkeypatch.setattr(function, "PING_TIMEOUT_S", 0.1)
    monkeypatch.setattr(function, "CLOSE_TIMEOUT_S", 0.1)
    pipe = stage.directory / "pipe"
    os.mkfifo(pipe)
    source = f"""
async def rollout(policy, scenario):
    with open({str(pipe)!r}) as pipe:
        pipe.read()
"""
    (trajectory,) = await stage.play(source, timeout_s=0.2, processes=0)
    assert trajectory.error is not None
    assert trajectory.error.endswith("it blocks the event loop: await what waits, or make it a plain `def`")
    pipe.write_text("")  # lets it go


async def test_a_finished_rollouts_key_is_dead(stage: Stage) -> None:
    """A thread that outlives its rollout cannot add to any trajectory."""
    source = """
import threading
late = threading.Event()
seen = []
def rollout(policy, scenario):
    def call():
        late.wait(10)
        try:
            policy.sync_client.chat.completions.create(model=policy.model, messages=[{"role": "user", "content": "x"}])
        except Exception as error:
            seen.append(type(error).__name__)
        done.set()
    threading.Thread(target=call, daemon=True).start()
    return 1
done = threading.Event()
"""
    (stage.directory / "rollout.py").write_text(source)
    async with stage.open(processes=0) as runner:
        await runner.run(stage.plans(1), stage.finished.append)
        (module,) = [
            m for name, m in sys.modules.items() if getattr(m, "__file__", "") == str(stage.directory / "rollout.py")
        ]
        module.late.set()
        await asyncio.to_thread(module.done.wait, 10)
    assert module.seen == ["AuthenticationError"]
    assert stage.backend.requests == []


# --- tries ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_failed_transport_is_tried_again_with_a_fresh_record(tmp_path: Path) -> None:
    """The first attempt's second call meets a dead engine. The trajectory holds the second attempt's calls alone."""
    errors: list[Exception | None] = [None, ChatError(503, "the engine died"), None, None]

    def answer(request: Request) -> str:
        error = errors.pop(0)
        if error is not None:
            raise error
        return "ok"

    source = (
        ASK
        + """
async def rollout(policy, scenario):
    await ask(policy)
    try:
        await ask(policy)
    except Exception as error:
        raise RuntimeError("some framework's own exception") from error
    return 1
"""
    )
    stage = Stage(tmp_path, ScriptedBackend(answer), processes=0)
    (trajectory,) = await stage.play(source)
    assert (trajectory.error, trajectory.returned_reward, trajectory.metrics["num_retries"]) == (None, 1.0, 1)
    assert len(trajectory.turns) == 2
    assert [request.sampling.seed for request in stage.backend.requests[:2]] == [
        request.sampling.seed for request in stage.backend.requests[2:]
    ]


@pytest.mark.slow
async def test_only_transport_is_tried_again(stage: Stage) -> None:
    """The first three attempts meet a failure of transport, the other ones their own."""
    source = """
import httpx, openai, pathlib
async def rollout(policy, scenario):
    with pathlib.Path(__file__).with_name(f"log{scenario['index']}").open("a") as log:
        log.write(policy.api_key + "\\n")
    if scenario["index"] == 5:
        return float("nan")
    raise [ConnectionResetError("gone"), httpx.ConnectError("gone"), openai.APIConnectionError(request=None),
           ValueError("mine"), OSError("disk")][scenario["index"]]
"""
    for trajectory in await stage.play(source, num=6, retries=2):
        keys = (stage.directory / f"log{trajectory.index}").read_text().split()
        assert len(keys) == len(set(keys)) == (3 if trajectory.index < 3 else 1)  # a key of its own for each
        assert trajectory.error is not None
        assert trajectory.metrics["num_retries"] == len(keys) - 1


async def test_a_retry_that_runs_out_of_time_names_the_failure_before_it(stage: Stage) -> None:
    """A dead process or a lost connection is the cause, and a retry that waits is only its consequence."""
    source = """
import asyncio
tries = []
async def rollout(policy, scenario):
    tries.append(1)
    if len(tries) == 1:
        raise ConnectionResetError("gone")
    await asyncio.sleep(60)
"""
    (played,) = await stage.play(source, timeout_s=1)
    assert played.error == (
        "timeout: not finished after 1 s (rollout.timeout_s); "
        "the try before it failed: ConnectionResetError: gone (rollout.py:7)"
    )
    assert played.metrics["num_retries"] == 1


# --- many at once -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keyword", ["async def", "def"])
async def test_as_many_run_at_once_as_the_limit_says(stage: Stage, keyword: str) -> None:
    """Limit 4: a barrier for 4 opens, so attempts run concurrently; a counter never exceeds the limit."""
    wait = "await barrier.wait()" if keyword == "async def" else "barrier.wait(10)"
    source = f"""
import asyncio, threading
barrier = {"asyncio" if keyword == "async def" else "threading"}.Barrier(4)
running = peak = 0
lock = threading.Lock()
{keyword} rollout(policy, scenario):
    global running, peak
    with lock:
        running += 1
        peak = max(peak, running)
    {wait}
    with lock:
        running -= 1
    return peak
"""
    trajectories = await stage.play(source, num=12, concurrency=4, timeout_s=20)
    assert [trajectory.returned_reward for trajectory in trajectories] == [4.0] * 12


@pytest.mark.slow
async def test_a_sync_rollout_uses_the_sync_client(stage: Stage) -> None:
    source = """
def rollout(policy, scenario):
    reply = policy.sync_client.chat.completions.create(model=policy.model, messages=[{"role": "user", "content": "hi"}])
    return len(reply.choices[0].message.content)
"""
    trajectories = await stage.play(source, num=8)
    assert [(t.returned_reward, len(t.turns)) for t in trajectories] == [(2.0, 1)] * 8


async def test_a_trajectory_is_handed_over_before_it_is_counted(stage: Stage) -> None:
    """With a single slot, each hand-over sees all previous trajectories counted."""
    seen = []
    (stage.directory / "rollout.py").write_text("def rollout(policy, scenario): return scenario['index']")
    async with stage.open(concurrency=1) as runner:
        shown = []

        async def keep(trajectory: Trajectory) -> None:
            await asyncio.sleep(0)
            seen.append((trajectory.index, shown[0].done if shown else 0))

        original = rollout_runner.Progress.count

        def count(self: Progress, trajectory: Trajectory) -> None:
            shown[:] = [self]
            original(self, trajectory)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rollout_runner.Progress, "count", count)
            counts = await runner.run(stage.plans(3), keep)
    assert seen == [(0, 0), (1, 1), (2, 2)]
    assert (counts.done, counts.failed, counts.mean_reward) == (3, 0, 1.0)


async def test_a_trajectory_that_cannot_be_written_stops_the_run(stage: Stage) -> None:
    def keep(trajectory: Trajectory) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        await stage.play("def rollout(policy, scenario): return 1", num=5, on_finished=keep)


async def test_a_cancelled_run_finishes_what_is_being_written_and_drops_the_rest(stage: Stage) -> None:
    source = """
import asyncio
async def rollout(policy, scenario):
    if scenario["index"] == 0:
        return 1
    open(__file__ + ".began", "w").close()
    try:
        await asyncio.Event().wait()
    finally:
        with open(__file__ + ".ended", "w") as file:
            file.write("yes")
"""
    (stage.directory / "rollout.py").write_text(source)
    is_writing, may_end = asyncio.Event(), asyncio.Event()

    async def keep(trajectory: Trajectory) -> None:
        is_writing.set()
        await may_end.wait()
        stage.finished.append(trajectory)

    async with stage.open(processes=1) as runner:
        run = asyncio.create_task(runner.run(stage.plans(2), keep))
        await asyncio.wait_for(is_writing.wait(), 10)
        await until((stage.directory / "rollout.py.began").exists)
        run.cancel()
        await asyncio.sleep(0)
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await run
    assert [trajectory.index for trajectory in stage.finished] == [0]
    assert (stage.directory / "rollout.py.ended").read_text() == "yes"  # the other one was let clean up


# --- a broken agent ---------------------------------------------------------------------------------------------------


async def test_an_agent_that_always_fails_the_same_way_stops_the_run(stage: Stage) -> None:
    source = "def rollout(policy, scenario):\n    raise KeyError(scenario['index'])"
    with pytest.raises(RolloutError, match=r"the first 16 rollouts all failed alike.*KeyError: 15 \(rollout\.py:2\)"):
        await stage.play(source, num=40, concurrency=1)
    assert len(stage.finished) == 16  # all of them written


@pytest.mark.slow
@pytest.mark.parametrize("exception", ["", "raise ValueError", "raise KeyError(1)\n"], ids=["success", "kind", "line"])
async def test_one_rollout_that_ends_differently_shows_that_the_agent_can_work(stage: Stage, exception: str) -> None:
    source = f"""
def rollout(policy, scenario):
    if scenario["index"] == 3:
        {exception or "return 1"}
    raise KeyError(scenario["index"])
"""
    trajectories = await stage.play(source, num=40, concurrency=1)
    assert sum(trajectory.error is not None for trajectory in trajectories) == (39 if not exception else 40)


# --- programs ---------------------------------------------------------------------------------------------------------


async def test_a_node_program_plays_with_the_official_client(tmp_path: Path) -> None:
    """tests/clients/agent.mjs: one tool call, one streamed answer; two turns, the second continuing the first."""

    def answer(request: Request) -> Any:
        is_first = len(request.messages or ()) == 1
        return tool_call("add", a=2, b=3) if is_first else (request.messages or [])[-1]["content"]

    stage = Stage(clients(), ScriptedBackend(answer))
    plan = stage.plans(1)[0]
    plans = [
        RolloutPlan(**{**{f: getattr(plan, f) for f in plan.__struct_fields__}, "scenario": scenario, "index": index})
        for index, scenario in enumerate(
            [{"id": "a", "question": "2+3?", "answer": "5"}, {"id": "b", "question": "é\n?", "answer": "6"}]
        )
    ]
    async with stage.open(entry=None, command=["node", "agent.mjs"], timeout_s=60) as runner:
        await runner.run(plans, stage.finished.append)
    right, wrong = sorted(stage.finished, key=lambda trajectory: trajectory.index)
    assert (right.error, right.returned_reward, right.metrics["sum"], right.metadata) == (None, 1.0, 5.0, {"text": "5"})
    assert (wrong.error, wrong.returned_reward) == (None, 0.0)
    assert [message["role"] for message in right.messages] == ["user", "assistant", "tool", "assistant"]
    assert (right.turns[1].parent, right.metrics["num_branches"]) == (0, 0)
    assert wrong.messages[0]["content"] == "é\n?"


async def play_program(stage: Stage, source: str, **options: Any) -> Trajectory:
    (stage.directory / "agent.py").write_text(source)
    (trajectory,) = await stage.play(entry=None, command=[sys.executable, "agent.py"], **options)
    return trajectory


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "reward", "error"),
    [
        ("print('noise')\nprint(0.5)", 0.5, None),
        ("print('null')", None, None),
        ("import json\nprint(json.dumps({'reward': json.loads(input())['index']}))", 0.0, None),
        ("print('no number')", None, "output: the last line of standard output must be a number or a JSON object"),
        ("", None, "output: "),
        ("print('NaN')", None, "output: "),
        ("import sys\nsys.exit('it broke')", None, "exit: status 1: it broke"),
        ("import os\nos.kill(os.getpid(), 15)", None, "exit: signal 15"),
        ("import os, sys\nsys.exit(os.environ['OPENAI_API_KEY'])", None, "exit: status 1: ***"),
    ],
)
async def test_the_last_line_of_a_program_is_its_outcome(
    stage: Stage, source: str, reward: float | None, error: str | None
) -> None:
    trajectory = await play_program(stage, source)
    assert trajectory.returned_reward == reward
    assert (trajectory.error or "").startswith(error or "")
    assert (trajectory.error is None) == (error is None)


@pytest.mark.slow
@pytest.mark.parametrize("line", ['"1"', "[1]", '{"rewrad": 1}', '{"reward": "1"}', '{"metrics": 5}'])
async def test_a_program_whose_outcome_has_a_wrong_type_stops_the_run(stage: Stage, line: str) -> None:
    with pytest.raises(RolloutError, match=r"rollout\.command: "):
        await play_program(stage, f"print({line!r})")


async def test_after_a_good_outcome_one_of_a_wrong_type_fails_its_attempt_alone(stage: Stage) -> None:
    source = "import json\nprint([0.5, '\"hello\"', '[1]', '{\"answer\": 4}', 1][json.loads(input())['index']])"
    (stage.directory / "agent.py").write_text(source)
    played = await stage.play(entry=None, command=[sys.executable, "agent.py"], num=5, concurrency=1)
    assert [t.returned_reward for t in played] == [0.5, None, None, None, 1.0]
    assert all((t.error or "").startswith("output: rollout.command: ") for t in played[1:4])


async def test_a_program_that_is_not_there_is_said_before_anything_runs(stage: Stage) -> None:
    for program in ("no-such-program", "./no-such-file"):
        with pytest.raises(RolloutError, match="no such program"):
            await stage.play(entry=None, command=[program])


async def test_a_program_gets_no_variable_but_the_usual_ones_and_those_that_the_configuration_names(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "ANTHROPIC_AUTH_TOKEN", "OPENAI_ORG_ID", "ART_MINE", "LC_TIME"):
        monkeypatch.setenv(name, f"of {name}")
    source = "import json, os\nprint(json.dumps({'metadata': dict(os.environ)}))"
    found = (await play_program(stage, source, env=["ART_MINE"])).metadata
    ours = {f"{wire}_{what}" for wire in ("OPENAI", "ANTHROPIC") for what in ("BASE_URL", "API_KEY", "MODEL")}
    ours |= {"NO_PROXY", "no_proxy"}  # the gateway is on this machine
    assert ours <= found.keys() and found["ART_MINE"] == "of ART_MINE" and found["PATH"] == os.environ["PATH"]
    assert {name for name in found if not is_passed(name, ["ART_MINE"])} - {"PWD", "SHLVL", "_"} == ours
    assert not any("of HF" in str(value) or "of AWS" in str(value) for value in found.values())


@pytest.mark.parametrize(
    ("source", "end"),
    [
        (
            "import os\nos.environ['ART_MINE']",
            r"\(withheld from the program; to pass it on: rollout\.env=\[ART_MINE\]\)",
        ),
        (
            "import nowhere_to_find",
            r"'nowhere_to_find' \(the program is /.*; if this is another Python, name yours .*\)",
        ),
        ("import sys\nsys.exit('it broke')", r"\(it has not got \d+ of art's variables; rollout\.env=\[NAME\] .*\)"),
    ],
)
async def test_a_program_that_fails_without_a_variable_is_told_how_to_get_it(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, source: str, end: str
) -> None:
    monkeypatch.setenv("ART_MINE", "x" * 20)
    failed = await play_program(stage, source)
    assert re.search(rf" {end}$", failed.error or ""), failed.error


async def test_a_variable_that_is_named_and_not_set_stops_the_run(stage: Stage) -> None:
    with pytest.raises(RolloutError, match=r"rollout\.env: ART_NOT_SET is not set"):
        await play_program(stage, "", env=["ART_NOT_SET"])


FAMILY = "tail -f /dev/null & echo $$ $! > pids; "  # a child that never ends, the two process ids


async def until_gone(pids: str) -> None:
    """Returns when none of the processes runs (a zombie waits for init, and runs no more); fails after 10 s."""
    async with asyncio.timeout(10):
        while any(is_alive(int(pid)) for pid in pids.split()):
            await asyncio.sleep(0.01)


async def test_a_cancelled_run_kills_its_programs(stage: Stage) -> None:
    os.mkfifo(stage.directory / "pids")
    async with stage.open(entry=None, command=["sh", "-c", FAMILY + "wait"]) as runner:
        run = asyncio.create_task(runner.run(stage.plans(1), stage.finished.append))
        pids = await asyncio.wait_for(asyncio.to_thread((stage.directory / "pids").read_text), 20)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
    await until_gone(pids)
    assert stage.finished == []


async def test_a_program_whose_gateway_failed_is_tried_again(tmp_path: Path) -> None:
    errors: list[Exception | None] = [ChatError(502, "unreachable"), None]

    def answer(request: Request) -> str:
        error = errors.pop(0)
        if error is not None:
            raise error
        return "ok"

    source = """
import json, os, urllib.request
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": "hi"}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers))
print(1)
"""
    trajectory = await play_program(Stage(tmp_path, ScriptedBackend(answer), processes=0), source)
    assert (trajectory.error, trajectory.returned_reward, trajectory.metrics["num_retries"]) == (None, 1.0, 1)


# --- progress ---------------------------------------------------------------------------------------------------------


def trajectory(index: int, reward: float | None, error: str | None = None) -> Trajectory:
    return Trajectory(id=f"t{index}", group_id="g", group_size=9, index=index, returned_reward=reward, error=error)


def test_progress_counts_and_averages_what_did_not_fail() -> None:
    counts = Progress("step 1", 4, sampled=lambda: 0)
    assert counts.mean_reward is None
    for index, (reward, error) in enumerate([(1.0, None), (0.0, None), (9.0, "turn_limit: x"), (None, None)]):
        counts.count(trajectory(index, reward, error))
    assert (counts.done, counts.failed, counts.mean_reward) == (4, 1, 0.5)
    assert counts.facts() == "reward 0.500  1 failed  0 tokens, 0.0 tok/s"


async def test_lines_of_a_slow_step_come_twice_as_late_each_and_show_what_moves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Lines are due after 0.02, 0.06, 0.14 and 0.30 s; without doubling they would be 17."""
    monkeypatch.setattr(rollout_runner, "LINE_S", 0.02)
    counts = Progress("check", 2, sampled=lambda: 7)
    with caplog.at_level(logging.INFO, logger="art_cli"):
        async with rollout_runner.shown(counts):
            await asyncio.sleep(0.35)
    lines = [record.getMessage() for record in caplog.records]
    assert 1 <= len(lines) <= 4
    assert all(line.startswith("check: 0/2 rollouts  7 tokens, ") and line.endswith("  after 0 s") for line in lines)


# --- the clients of a policy ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("agent", ["await policy.client", "policy.sync_client"])
async def test_a_policys_client_reaches_the_gateway_whatever_proxy_the_environment_names(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, agent: str
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    keyword = "async def" if "await" in agent else "def"
    source = f"""
{keyword} rollout(policy, scenario):
    messages = [{{"role": "user", "content": "hi"}}]
    {agent}.chat.completions.create(model=policy.model, messages=messages)
    return 1.0
"""
    (trajectory,) = await stage.play(source)
    assert (trajectory.error, len(trajectory.turns)) == (None, 1)
