"""learner=prompt: the search end to end against models that follow rules, killed and resumed, evaluated and served."""

import json
import re
import shutil
import signal
import subprocess
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import pytest

from art_cli.chat.requests import Request, Sampling
from art_cli.config.compose import load_config
from art_cli.learners.prompt.prompt_learner import PromptSearch
from art_cli.loop.references import check_ready
from art_cli.rollouts.rollout_gateway import call_seed
from art_cli.runs.manifest import verify_checkpoint
from art_cli.runs.run_dir import RunDir
from art_cli.runs.system_prompt import SystemPrompt, read_prompt
from art_cli.runs.trajectory import Trajectory
from art_cli.runtime.errors import ConfigError
from tests.support.judges.judge_server import Attempt, Conduct, serving
from tests.support.judges.rule_followers import HOUSE, RULE, of_followers, rule_followers
from tests.support.paths import LETTERS, ROOT
from tests.support.processes import forked
from tests.support.processes.stage import Stage
from tests.support.servers.chat_server import ChatServer, Json, chatting
from tests.support.standins.scripted import ScriptedBackend

CONFIG = ROOT / "tests" / "prompted" / "config.yaml"
STEPS, GROUPS, SIZE = 8, 6, 4  # of tests/prompted/config.yaml


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with chatting(rule_followers()) as serving_now:
        yield serving_now


def art(*words: object, wants: int = 0) -> str:
    """What `art` printed: on stdout when it succeeded, on stderr when it failed."""
    process = forked.Forked(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate(timeout=120)
    assert process.returncode == wants, err
    return out if wants == 0 else err


def search_of(files: RunDir, step: int) -> PromptSearch:
    return msgspec.json.decode((files.checkpoint_path(step) / "optimizer.json").read_bytes(), type=PromptSearch)


def asked_of(server: ChatServer, model: str) -> list[Json]:
    return [body for body in server.asked if body["model"] == model]


@pytest.mark.slow
def test_an_endpoint_that_cannot_be_trained_gets_a_better_prompt(tmp_path: Path, server: ChatServer) -> None:
    """Held-out tickets are of the same kinds with other words. Every kept text was written by the reflector."""
    settings = [*of_followers(server), f"runs={tmp_path}", "train.keep_checkpoints=99"]
    assert f"art serve {tmp_path / 'prompted'} --trust\n" in art("train", CONFIG, *settings)
    files = RunDir(tmp_path / "prompted")
    evaluations = files.evaluations()
    assert evaluations[0]["reward"] == 0 and evaluations[STEPS]["reward"] > 0.5
    lines = [line.metrics for line in files.metrics() if line.split == "train"]
    assert len(lines) == STEPS
    for step, numbers in enumerate(lines):
        search = search_of(files, step)
        assert verify_checkpoint(files.checkpoint_path(step)).step == step
        groups = {each.group_id: [] for each in files.scored(step)}
        for each in files.scored(step):
            groups[each.group_id].append(each)
        assert len(groups) == GROUPS and all(len(members) == SIZE for members in groups.values())
        if search.proposal is None:
            assert "is_accepted" not in numbers
        else:  # the decision, computed again from the step's file
            sides = [fmean(each.reward for members in groups.values() for each in members if (each.index >= 2) == side)
                     for side in (False, True)]  # fmt: skip
            assert numbers["reward_parent"] == pytest.approx(sides[0])
            assert numbers["reward_proposal"] == pytest.approx(sides[1])
            assert numbers["is_accepted"] == float(sides[1] > sides[0] + 1e-8)
            kept = search_of(files, step + 1).kept
            assert (kept[-1].parts == search.proposal) == bool(numbers["is_accepted"])
        assert numbers["turns"] == GROUPS * SIZE and numbers["tokens_sampled"] == 50 * GROUPS * SIZE
    reflected = asked_of(server, "reflector")
    usd = sum(line.get("reflection_usd", 0.0) for line in lines)
    answered = sum(line["reflection_tokens"] for line in lines) / 150
    assert usd == pytest.approx(answered * (100 * 2 + 50 * 8) / 1e6) and answered <= len(reflected)
    assert lines[-1]["run_usd"] == pytest.approx(usd)


@pytest.mark.slow
def test_attempts_have_the_prompt_of_their_side_and_the_judge_sees_neither(tmp_path: Path, server: ChatServer) -> None:
    """RULER gets one group of both sides. What it scores by is in the replies alone."""

    def shouts(conversations: Attempt) -> float:
        role, text = conversations[-1][-1]
        assert role == "assistant"
        return float(text.isupper())

    with serving(Conduct(rule=shouts)) as judge:
        settings = [*of_followers(server), f"runs={tmp_path}", "train.steps=3", "eval=null", "train.keep_checkpoints=9",
                    "rollout.entry=rollout.py:judged", "judge={name: ruler, model: m, cache: null, base_url: '"
                    + judge.api_base + "'}"]  # fmt: skip
        art("train", CONFIG, *settings)
    files = RunDir(tmp_path / "prompted")
    assert len(judge.asked) == 3 * GROUPS  # one verdict for each group
    assert not any("Rules of the house" in json.dumps(body) for body in judge.asked)
    systems = {body["seed"]: body["messages"][0]["content"] for body in asked_of(server, "follower")}
    for step in range(3):
        search = search_of(files, step)
        parent = search.kept[search.parent].parts["instructions"]
        proposal = (search.proposal or search.kept[search.parent].parts)["instructions"]
        for each in files.trajectories(step):
            text = proposal if each.index >= 2 else parent
            own = "You answer tickets with one word."
            assert systems[call_seed(0, each.id, 0)] == (f"{own}\n\n{text}" if text else own)
            assert each.messages[0]["content"] == own


@pytest.mark.slow
def test_one_prompt_for_two_agents_whose_scenarios_have_the_same_ids(tmp_path: Path, server: ChatServer) -> None:
    """The agents' rewards are kept separate. Its evaluation is of each alone."""
    sources = "{desk: {entry: 'rollout.py:rollout', scenarios: 'rollout.py:tickets', weight: 2}, "
    sources += "echo: {entry: 'rollout.py:echo', scenarios: 'rollout.py:tickets'}}"
    removed = ["~rollout.entry", "~rollout.scenarios", f"+rollout.sources={sources}"]
    art("train", CONFIG, *of_followers(server), f"runs={tmp_path}", *removed, "train.steps=12")
    files = RunDir(tmp_path / "prompted")
    first, last = (files.evaluations()[step] for step in (0, 12))
    assert first["reward.desk"] == 0 and first["reward.echo"] > 0.7
    assert last["reward.desk"] > 0.3 and last["reward.echo"] > 0.7
    played = {(each.source, each.scenario["id"]) for step in range(12) for each in files.trajectories(step)}
    noted = {tuple(name.split("/")) for prompt in search_of(files, 12).kept for name in prompt.rewards}
    assert noted == played


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_search_ends_with_the_same_prompt_and_asks_for_nothing_twice(tmp_path: Path) -> None:
    """Killed during a step's attempts, and right after a checkpoint. What was written is not asked again."""
    with chatting(rule_followers()) as server:
        art("train", CONFIG, *of_followers(server), f"runs={tmp_path / 'whole'}", "rollout.concurrency=2")
    with chatting(rule_followers()) as server:
        settings = [*of_followers(server), f"runs={tmp_path / 'killed'}", "rollout.concurrency=2"]
        files = RunDir(tmp_path / "killed" / "prompted")
        written: list[set[str]] = []
        marks: list[int] = []
        for step in (0, 3):
            child = forked.Forked(["train", CONFIG, *settings], stdout=forked.DEVNULL, stderr=forked.DEVNULL)
            while len(files.trajectories(step)) < 7:
                assert child.poll() is None
            child.kill()
            assert child.wait(timeout=30) == -signal.SIGKILL
            written.append({each.id for past in range(STEPS) for each in files.trajectories(past)})
            marks.append(len(server.asked))
        art("train", CONFIG, *settings)
    for ids, mark in zip(written, marks, strict=True):
        seeds = {call_seed(0, name, 0) for name in ids}
        assert not [body for body in server.asked[mark:] if body.get("seed") in seeds]
    counts = Counter(json.dumps(body["messages"]) for body in asked_of(server, "reflector"))
    assert max(counts.values()) == 1, "a question whose answer is in a checkpoint was asked again"
    whole, killed = RunDir(tmp_path / "whole" / "prompted"), files
    assert read_prompt(killed.checkpoint_path(STEPS)) == read_prompt(whole.checkpoint_path(STEPS))
    assert search_of(killed, STEPS) == search_of(whole, STEPS)
    of_both = [[(line.step, line.metrics.get("is_accepted")) for line in run.metrics() if line.split == "train"]
               for run in (whole, killed)]  # fmt: skip
    assert of_both[0] == of_both[1]
    assert killed.evaluations()[STEPS]["reward"] == whole.evaluations()[STEPS]["reward"]


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ChatServer, Path]]:
    """A finished search, and the server of its endpoint."""
    root = tmp_path_factory.mktemp("searched")
    with chatting(rule_followers()) as server:
        art("train", CONFIG, *of_followers(server), f"runs={root}", "train.steps=3")
        yield server, root / "prompted"


@pytest.mark.slow
def test_a_prompt_is_evaluated_beside_the_model_without_one(searched: tuple[ChatServer, Path]) -> None:
    server, run = searched
    words = ["--checkpoint", "base", "--checkpoint", run, "--json"]
    rows = json.loads(art("eval", CONFIG, *of_followers(server), f"runs={run.parent}", *words))["metrics"]
    means = {row["policy"]: row["mean"] for row in rows if row["metric"] == "reward"}
    assert means == {"base": 0.0, str(run): RunDir(run).evaluations()[3]["reward"]} and means[str(run)] > 0


@pytest.mark.slow
def test_a_prompt_for_an_endpoint_plays_there_beside_weights_of_this_machine(
    searched: tuple[ChatServer, Path],
) -> None:
    """The endpoint comes from the prompt's run; it gets calls and the key only if the run is trusted."""
    server, run = searched
    own = ["learner=torch", "engine=embedded", f"model.base={LETTERS}/build.py:build", "rollout.sampling.max_tokens=4"]
    words = ["eval", CONFIG, *own, f"runs={run.parent}", "--checkpoint", "base", "--checkpoint", run, "--json"]
    num = len(server.asked)
    said = art(*words, wants=2)
    assert f"{run}: its prompt is for {server.api_base}" in said and "--trust" in said
    assert [line.partition(":")[0] for line in said.splitlines()] == ["policy", "error"]
    assert len(server.asked) == num
    rows = json.loads(art(*words, "--trust"))["metrics"]
    means = {row["policy"]: row["mean"] for row in rows if row["metric"] == "reward"}
    assert means == {"base": 0.0, str(run): RunDir(run).evaluations()[3]["reward"]} and means[str(run)] > 0
    assert len(server.asked) > num


@pytest.mark.slow
def test_a_served_prompt_follows_its_run(tmp_path: Path, server: ChatServer) -> None:
    settings = [*of_followers(server), f"runs={tmp_path}", "eval=null"]
    art("train", CONFIG, *settings, "train.steps=1")
    run = tmp_path / "prompted"
    words = ["serve", run, "--last", "--follow", "--trust", "--port", "0", "--json"]
    with forked.Forked(words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        art("train", CONFIG, *settings, f"train.steps={STEPS}")
        rules = read_prompt(RunDir(run).checkpoint_path(STEPS)).parts["instructions"]
        deadline, heard = time.monotonic() + 60, None
        while heard != {"role": "system", "content": rules}:
            assert time.monotonic() < deadline
            post(f"{url}/chat/completions", {"model": "prompted", "messages": [{"role": "user", "content": "hi"}]})
            heard = asked_of(server, "follower")[-1]["messages"][0]
            time.sleep(0.2)
        process.terminate()


@pytest.mark.slow
def test_a_prompt_is_served_in_front_of_the_endpoint_that_its_user_names(searched: tuple[ChatServer, Path]) -> None:
    """A run's own endpoint is used only with --trust. The client's messages reach it behind the prompt."""
    server, run = searched
    refused = art("serve", run, "--port", "0", wants=2)
    assert server.api_base in refused and "--trust" in refused and len(refused.strip().splitlines()) <= 2
    named = ["--engine", "openai", "--set", f"base_url={server.api_base}", "--set", "model=follower"]
    for words in (["--trust"], named):
        with forked.Forked(["serve", run, "--port", "0", "--json", *words], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"]
            asked = {"model": "prompted", "messages": [{"role": "user", "content": "hi"}]}
            reply = post(f"{url}/chat/completions", asked)
            process.terminate()
        assert reply["model"] == "prompted" and reply["choices"][0]["message"]["role"] == "assistant"
        prompt = read_prompt(RunDir(run).checkpoint_path(3))
        assert prompt is not None and RULE.search(prompt.text)
        assert server.asked[-1]["messages"] == [{"role": "system", "content": prompt.text}, *asked["messages"]]


@pytest.mark.slow
def test_prompts_for_two_endpoints_are_not_served_by_the_first(
    searched: tuple[ChatServer, Path], tmp_path: Path
) -> None:
    _, run = searched
    shutil.copytree(run, other := tmp_path / "other")
    config = json.loads((path := other / "config.json").read_text())
    config["engine"]["base_url"] = "http://127.0.0.1:9/v1"
    path.write_text(json.dumps(config))
    refused = art("serve", f"a={run}", f"b={other}", "--trust", "--port", "0", wants=2)
    assert "different endpoints: start one server for each" in refused


def post(url: str, body: Json) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["step", "plan", "sft", "export", "gateway", "prove"])
def test_a_command_that_needs_weights_says_so_in_one_line(
    command: str, searched: tuple[ChatServer, Path], tmp_path: Path
) -> None:
    server, run = searched
    scored, settings = RunDir(run).scored_path(0), [*of_followers(server), f"runs={run.parent}"]
    words: dict[str, list[object]] = {
        "step": [CONFIG, scored, "-o", tmp_path / "out", *settings],
        "plan": [CONFIG, *settings],
        "sft": [CONFIG, scored, "-o", tmp_path / "out", *settings],
        "export": [run, "-o", tmp_path / "out"],
        "gateway": [CONFIG, "--checkpoint", run, *settings],
        "prove": [run],
    }
    said = art(command, *words[command], wants=1 if command == "prove" else 2)
    [line] = [line for line in said.splitlines() if line.startswith("error: ")]
    assert "prompt" in line and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_reflector_that_never_answers_usefully_ends_no_run(tmp_path: Path) -> None:
    """Empty texts, long texts and refusals: each round keeps the current prompt."""
    answers = ["```\n```", "```\n" + "x" * 20_001 + "\n```", (400, {"error": {"message": "no"}}), "```\n \n```"]

    def answer(body: Json, number: int) -> str | tuple[int, Json]:
        return answers[number % len(answers)] if body["model"] == "reflector" else "no"

    with chatting(ChatServer(answer)) as server:
        art("train", CONFIG, *of_followers(server), f"runs={tmp_path}", "train.steps=3", "eval=null")
    files = RunDir(tmp_path / "prompted")
    assert len(files.metrics()) == 3 and not any("is_accepted" in line.metrics for line in files.metrics())
    assert len(asked_of(server, "reflector")) == 9 and search_of(files, 3).proposal is None
    prompt = read_prompt(files.checkpoint_path(3))
    assert prompt is not None and prompt.text == ""


@pytest.mark.slow
def test_a_wrong_key_stops_the_run_before_more_is_paid(tmp_path: Path) -> None:
    """The step's attempts are on disk, and the next start uses them."""

    def answer(body: Json, number: int) -> str | tuple[int, Json]:
        return (401, {"error": {"message": "no such key"}}) if body["model"] == "reflector" else "no"

    with chatting(ChatServer(answer)) as server:
        settings = [*of_followers(server), f"runs={tmp_path}", "train.steps=3", "eval=null"]
        said = art("train", CONFIG, *settings, wants=1)
        assert "learner.model" in said and "401" in said
        follower = len(asked_of(server, "follower"))
        art("train", CONFIG, *settings, wants=1)
        assert len(asked_of(server, "follower")) == follower == GROUPS * SIZE


def refusals(*settings: str) -> str:
    try:
        load_config(CONFIG, settings)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("loss=dapo", "loss"),
        ("train.learning_rate=1e-4", "train.learning_rate"),
        ("train.max_staleness=1", "train.max_staleness"),
        ("+sft={demos: demos.jsonl}", "sft"),
        ("rollout.refill=1", "rollout.refill"),
        ("learner.model=null", "learner"),
        ("learner.place=instead", "learner"),
        ("learner.device=cpu", "learner.device"),
    ],
)
def test_a_key_that_a_search_has_no_use_for_is_an_error(setting: str, key: str) -> None:
    assert f" {key}: " in refusals(setting)
    assert refusals() == ""


OWN_ENGINE = """
name: own
model: {{base: "{letters}/build.py:build"}}
learner: {{name: prompt, model: reflector, base_url: "{url}", parts: {{role: role.txt, rules: rules.txt}}}}
rollout:
  entry: "{letters}/rollout.py:rollout"
  scenarios: "{letters}/scenarios.jsonl"
  group_size: 4
  groups_per_step: 3
  processes: 0
  sampling: {{max_tokens: 6}}
train: {{steps: 3}}
"""


@pytest.mark.slow
def test_a_model_of_this_machine_gets_a_prompt_of_parts_and_keeps_its_weights(tmp_path: Path) -> None:
    """Each proposal changes one part. The engine is given the prompt's tokens; the checkpoints have no weights."""

    def answer(body: Json, number: int) -> str:
        return f"```\nSay letters, and only letters: {number}.\n```"

    (tmp_path / "role.txt").write_text("You say letters.\n")
    (tmp_path / "rules.txt").write_text("Be short.")
    with chatting(ChatServer(answer)) as server:
        (tmp_path / "own.yaml").write_text(OWN_ENGINE.format(letters=LETTERS, url=server.api_base))
        assert re.search("^(ok|!) +rollout", art("check", tmp_path / "own.yaml"), re.M)
        art("train", tmp_path / "own.yaml")
    files = RunDir(tmp_path / "runs" / "own")
    first = read_prompt(files.checkpoint_path(0))
    assert first is not None and first.text == "You say letters.\n\nBe short."
    assert {path.name for path in files.checkpoint_path(3).iterdir()} == {
        "manifest.json",
        "optimizer.json",
        "prompt.json",
    }
    changed = []
    for step in (1, 2):
        search = search_of(files, step)
        assert search.proposal is not None
        parent = search.kept[search.parent].parts
        changed += [name for name in parent if parent[name] != search.proposal[name]]
        lengths = [{len(each.turns[0].prompt_ids) for each in files.trajectories(step) if (each.index >= 2) == side}
                   for side in (False, True)]  # fmt: skip
        texts = ["\n\n".join(parts.values()) for parts in (parent, search.proposal)]
        assert (min(lengths[1]) > max(lengths[0])) == (len(texts[1]) > len(texts[0]))
    assert sorted(changed) == ["role", "rules"]
    asked_about = [body["messages"][-1]["content"] for body in asked_of(server, "reflector")]
    assert len(asked_about) == 3 and "Be short." in asked_about[0] and "You say letters." in asked_about[1]


@pytest.mark.parametrize(
    ("setting", "said"),
    [("learner.base_url=nowhere", "is not an address"), ("learner.parts={a: missing.txt}", "learner.parts.a: ")],
)
def test_what_a_search_names_is_looked_up_before_anything_is_paid(setting: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_ready(load_config(CONFIG, [setting]), ("learner",))


# --- the text in a call -----------------------------------------------------------------------------------------------


def asked(prompt: SystemPrompt, messages: list[Json]) -> list[Json] | None:
    return prompt.apply(Request(model="m", sampling=Sampling(), messages=messages)).messages


BOTH, OWN = "A\n\nB", {"role": "system"}
USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("place", "sent", "gets"),
    [
        ("after", [USER], [{"role": "system", "content": BOTH}, USER]),
        ("after", [{**OWN, "content": "own"}, USER], [{**OWN, "content": f"own\n\n{BOTH}"}, USER]),
        ("instead", [{"role": "developer", "content": "own"}, USER], [{"role": "developer", "content": BOTH}, USER]),
        ("after", [{"role": "system", "content": [{"type": "text", "text": "own"}]}],
         [{"role": "system", "content": f"own\n\n{BOTH}"}]),
        ("after", [], [{"role": "system", "content": BOTH}]),
    ],
)  # fmt: skip
def test_the_parts_stand_in_the_system_message(place: Any, sent: list[Json], gets: list[Json]) -> None:
    before = json.dumps(sent)
    assert asked(SystemPrompt(parts={"a": "A", "none": "", "b": "B"}, place=place), sent) == gets
    assert json.dumps(sent) == before
    assert asked(SystemPrompt(parts={"a": ""}, place=place), sent) == sent


CALLS = """
import httpx

async def rollout(policy, scenario):
    ask = {"model": policy.model, "messages": [{"role": "user", "content": "hi"}]}
    said = await policy.client.chat.completions.create(**ask)
    reply = said.choices[0].message.model_dump(exclude_none=True)
    more = [*ask["messages"], reply, {"role": "user", "content": "more"}]
    async for _ in await policy.client.chat.completions.create(model=policy.model, messages=more, stream=True):
        pass
    await policy.client.responses.create(model=policy.model, instructions="own", input="hi")
    async with httpx.AsyncClient() as client:
        body = {**ask, "system": "own", "max_tokens": 5}
        root, key = policy.base_url.removesuffix("/v1"), {"x-api-key": policy.api_key}
        (await client.post(f"{root}/v1/messages", json=body, headers=key)).raise_for_status()
    try:
        await policy.client.completions.create(model=policy.model, prompt="hi")
    except Exception as error:
        assert "plain completion" in str(error), error
        return 1.0
"""


async def test_a_call_of_every_protocol_gets_the_prompt_and_is_recorded_without_it(tmp_path: Path) -> None:
    """A whole reply, a second turn that is streamed, OpenAI's Responses, Anthropic's Messages; a plain completion is
    refused."""
    backend = ScriptedBackend()
    stage = Stage(tmp_path, backend)
    (tmp_path / "rollout.py").write_text(CALLS)
    prompt = SystemPrompt(parts={"a": "A"}, place="after")
    played: list[Trajectory] = []
    async with stage.open(processes=0) as runner:
        plans = [msgspec.structs.replace(plan, prompt=prompt) for plan in stage.plans(1)]
        await runner.run(plans, played.append)
    assert played[0].error is None and played[0].returned_reward == 1.0, played[0].error
    systems = [(request.messages or [{}])[0] for request in backend.requests]
    assert [each["role"] for each in systems] == ["system"] * 4
    assert [each["content"] for each in systems] == ["A", "A", "own\n\nA", "own\n\nA"]
    conversations = [*played[0].branches, played[0].messages]
    assert not any("A" in str(message.get("content")) for each in conversations for message in each)
    assert max(len(each) for each in conversations) == 4 and played[0].turns[1].parent == 0


def test_every_kind_of_ticket_has_a_rule() -> None:
    """The world that these tests measure in can be solved, and not by chance."""
    assert all(style != "plain" for style in HOUSE.values())
