"""Agents of many frameworks, each as its users write it, are recorded token for token and trained.

The programs in tests/clients/agents are the snippets of docs/clients.md and docs/coming-from.md.
"""

import asyncio
import itertools
import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from art_cli.chat.chat_errors import ChatError
from art_cli.chat.requests import Request
from art_cli.runs.run_checkpoints import import_start
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import Trajectory, Turn, sequence
from tests.support.attacks.lossy import Swallowing
from tests.support.models.tool_clients import teach
from tests.support.others.node import clients as install_node_clients
from tests.support.others.real_agents import MARKS, PYTHON, has
from tests.support.paths import CLIENTS, ROOT
from tests.support.processes import forked
from tests.support.processes.stage import Stage
from tests.support.records.trees import samples_of
from tests.support.standins.template_backend import THINKS, TemplateBackend

PLACE = CLIENTS / "agents"
# File -> the package that it needs.
AGENTS = {
    "plain.py": "openai",
    "sdk.py": "agents",
    "sdk_responses.py": "agents",
    "pydantic_agent.py": "pydantic_ai",
    "langgraph_agent.py": "langgraph",
    "autogen_agent.py": "autogen_agentchat",
    "smolagents_agent.py": "smolagents",
}
SMOLAGENTS, NODE = "smolagents_agent.py", "vercel.mjs"
TRAINED = ("plain.py", "sdk_responses.py", "langgraph_agent.py")  # of what all record, all could be trained
PARAMS = {
    name: pytest.param(name, marks=[*MARKS, pytest.mark.skipif(not has(of), reason=f"no {of} in .venv-agents")])
    for name, of in AGENTS.items()
}
SCENARIO = {"question": "What is 2 plus 3?", "answer": "The sum is 5."}
OPENING = '<tool_call>\n{"name": "'  # part of the prompt when a call is required
CALL, ANSWER = f'{OPENING}add", "arguments": {{"b":3,"a":  2}}}}\n</tool_call>', "The sum is 5."
LAST = f'{OPENING}final_answer", "arguments": {{"answer": "{ANSWER}"}}}}\n</tool_call>'
Json = dict[str, Any]


def right(request: Request) -> str:
    """A call, its arguments written as no client writes them; after its result the answer."""
    is_answered = "5" in str((request.messages or [])[-1]["content"])
    names = [tool["function"]["name"] for tool in request.tools]
    text = CALL if not is_answered else LAST if "final_answer" in names else ANSWER
    return text.removeprefix(OPENING) if request.tool_choice == "required" else text


class Episode(NamedTuple):
    """An agent's attempt with a failing network.

    The first answer is lost, the next call gets a 429, and the second turn's first call a 500. The AI SDK does not mark
    retries, so there the first request is lost instead of the answer.
    """

    trajectory: Trajectory
    backend: TemplateBackend
    seen: list[Turn]  # the turns whose replies the agent got


def failing(errors: dict[int, ChatError]) -> Callable[[Request], str]:
    """`right`, but the calls with these numbers fail."""
    numbers = itertools.count()

    def answer(request: Request) -> str:
        if (error := errors.get(next(numbers))) is not None:
            raise error
        return right(request)

    return answer


async def play(agent: str, place: Path) -> Episode:
    busy, broken = ChatError(429, "busy"), ChatError(500, "broken")
    backend = TemplateBackend(failing({0: busy, 2: broken} if agent == NODE else {1: busy, 3: broken}), template=THINKS)
    lose = {"before_asking": True} if agent == NODE else {"closes": True}
    stage = Stage(place, backend, scenario=SCENARIO, between=lambda url: Swallowing(url, **lose).serve())
    if agent == NODE:
        options: Json = {"entry": None, "command": ["node", str(install_node_clients() / NODE)]}
        (trajectory,) = await stage.play(timeout_s=120, **options)
    else:
        shutil.copytree(PLACE, place, dirs_exist_ok=True)
        (trajectory,) = await stage.play((PLACE / agent).read_text(), timeout_s=120, python=PYTHON)
    return Episode(trajectory, backend, [turn for turn in trajectory.turns if not turn.is_abandoned])


@pytest.fixture(scope="module")
def episode(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Episode]:
    """Plays an agent's episode when it is first asked for."""
    return cache(lambda agent: asyncio.run(play(agent, tmp_path_factory.mktemp("episode"))))


def trained(trajectory: Trajectory) -> list[list[int]]:
    """The trained tokens, sample by sample."""
    return [sample.token_ids[sample.targets].tolist() for sample in samples_of(trajectory)]


def of(turns: list[Turn]) -> list[list[int]]:
    return [turn.sampled_ids for turn in turns]


@pytest.mark.slow
@pytest.mark.parametrize("agent", [*PARAMS.values(), NODE])
def test_an_agents_turns_are_recorded_and_its_second_prompt_continues_the_first_reply(
    episode: Callable[[str], Episode], agent: str
) -> None:
    """The tool ran, because its result is in the second prompt."""
    trajectory, backend, seen = episode(agent)
    assert (trajectory.error, trajectory.returned_reward) == (None, 1.0)
    first, second = seen
    assert "5" in str((backend.requests[-1].messages or [])[-1]["content"])
    texts = [right(backend.requests[0]), right(backend.requests[-1])]
    assert of(seen) == [backend.encode(f"{text}<|im_end|>") for text in texts]
    assert second.parent == trajectory.turns.index(first)
    whole = len(sequence(trajectory.turns, second.parent))
    if agent == SMOLAGENTS:  # the call comes back as "Calling tools: [...]", so the two turns share the first prompt
        assert second.kept == whole - len(first.sampled_ids) - len(backend.encode(OPENING))
    else:
        assert second.kept == whole and trajectory.branches == []
        assert [message["role"] for message in trajectory.messages][-4:] == ["user", "assistant", "tool", "assistant"]
    if agent == "plain.py":
        assert trajectory.metadata == {"python": str(PYTHON), "torch": False, "openai": trajectory.metadata["openai"]}


@pytest.mark.slow
@pytest.mark.parametrize("agent", [*PARAMS.values(), NODE])
def test_what_an_sdk_sends_again_is_one_turn(episode: Callable[[str], Episode], agent: str) -> None:
    """Five calls for two turns, four where the first came to nobody; the answer that was lost is not trained on."""
    trajectory, backend, seen = episode(agent)
    assert len(backend.requests) == (4 if agent == NODE else 5)
    assert len(trajectory.turns) - len(seen) == trajectory.metrics["num_abandoned"] == (0 if agent == NODE else 1)
    assert trajectory.metrics["num_branches"] == (1 if agent == SMOLAGENTS else 0)
    assert sorted(sum(trained(trajectory), [])) == sorted(sum(of(seen), []))


def test_the_documentation_shows_what_is_tested() -> None:
    shown = "".join((ROOT / "docs" / name).read_text() for name in ("clients.md", "coming-from.md"))
    for path in (*(PLACE / name for name in AGENTS if name != "plain.py"), CLIENTS / NODE):
        kind = "js" if path.suffix == ".mjs" else "python"
        starts = (f"```{kind}\n", f"```{kind}\n# agent.py\n")  # the second where a page names the file
        assert any(f"{start}{path.read_text()}```\n" in shown for start in starts), (
            f"no page shows {path.name} as it is"
        )


# --- training ---------------------------------------------------------------------------------------------------------

JUDGE = """
def judge(group):  # a signal in every group, whatever was said
    return [trajectory.index / len(group) for trajectory in group]
"""
NUM_STEPS, GROUP_SIZE = 1, 2


def transcript(episode: Episode) -> Json:
    """The conversation to teach."""
    keys = ("role", "content", "tool_calls", "tool_call_id")
    messages = [{key: message[key] for key in keys if key in message} for message in episode.trajectory.messages]
    return {"messages": messages, "tools": episode.trajectory.tools}


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory, episode: Callable[[str], Episode]) -> RunDir:
    """A run with one checkpoint, which was taught to call the tool as each of the agents shows it."""
    place = tmp_path_factory.mktemp("taught")
    agents = [name for name in TRAINED if has(AGENTS[name])]
    demos = [transcript(episode(name)) for name in [*agents, NODE]]
    (place / "judge.py").write_text(JUDGE)
    return teach(place, list({json.dumps(each, sort_keys=True): each for each in demos}.values()), length=8192)


def train(taught: RunDir, place: Path, agents: list[str], *settings: str) -> RunDir:
    """The run of `art train` for a step from the taught policy, with one group of each agent."""
    scenarios = [{"id": Path(name).stem, "agent": Path(name).stem, **SCENARIO} for name in agents]
    (place / "scenarios.jsonl").write_text("".join(json.dumps(each) + "\n" for each in scenarios))
    project, run = taught.root.parent, RunDir(place / "adder")
    import_start(taught.checkpoint_path(0), run.root)
    common = [
        f"runs={place}",
        f"train.steps={NUM_STEPS}",
        "rollout.sampling.temperature=0.3",
        "judge=function",
        f"judge.entry={project}/judge.py:judge",
    ]
    common += [f"rollout.scenarios={place}/scenarios.jsonl", f"rollout.groups_per_step={len(agents)}", "sft=null"]
    common += [f"rollout.group_size={GROUP_SIZE}", "rollout.sampling.max_tokens=80", *settings]
    done = forked.run(["train", project / "config.yaml", *common], timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    assert run.checkpoint_steps()[-1] == NUM_STEPS
    return run


@pytest.fixture(scope="module")
def run(taught: RunDir, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    agents = [name for name in TRAINED if has(AGENTS[name])]
    entry = [f"rollout.entry={PLACE / 'all.py'}:rollout", f"rollout.python={PYTHON}"]
    return train(taught, tmp_path_factory.mktemp("run"), agents, *entry)


def assert_trained(run: RunDir, agent: str) -> None:
    """The step played the attempt, the tool ran, and all sampled tokens were trained on."""
    for step in range(NUM_STEPS):
        played = [scored for scored in run.scored(step) if scored.scenario["id"] == Path(agent).stem]
        assert len(played) == GROUP_SIZE and not [each.error for each in played if each.error]
        answered = [each for each in played if {"role": "tool", "content": "5"}.items() <= _tool(each).items()]
        assert answered, [each.messages for each in played]
        for each in played:
            assert sum(map(len, trained(each))) == sum(len(turn.sampled_ids) for turn in each.turns) > 0
            assert each.metrics["num_branches"] == 0
            for index, turn in enumerate(each.turns[1:], 1):
                assert turn.kept == len(sequence(each.turns, index - 1))


def _tool(trajectory: Trajectory) -> Json:
    """Returns the first tool result, if a tool was called."""
    return next((message for message in trajectory.messages if message["role"] == "tool"), {})


@pytest.mark.slow
@pytest.mark.parametrize("agent", [PARAMS[name] for name in TRAINED])
def test_an_agent_is_trained_as_it_comes(run: RunDir, agent: str) -> None:
    assert_trained(run, agent)


@pytest.mark.slow
def test_an_agent_of_the_ai_sdk_is_trained_as_it_comes(taught: RunDir, tmp_path: Path) -> None:
    command = f"rollout.command=[node,{install_node_clients() / NODE}]"
    assert_trained(train(taught, tmp_path, [NODE], command, "rollout.entry=null"), NODE)
