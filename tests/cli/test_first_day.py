"""A new user's first day: what commands say when something is not as the user believes."""

import asyncio
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from art_cli.config.compose import load_config
from art_cli.judges import Judge, Verdict
from art_cli.judges.costs import Price
from art_cli.loop.evaluate import Gate, judge_contest, parse_gate, spent_by_scenario
from art_cli.loop.train import train
from art_cli.rollouts.rollout_gateway import OWN_CLIENT
from art_cli.runs import run_checkpoints as checkpoints
from art_cli.runs.durable import read_lines
from art_cli.runs.history import count_failures
from art_cli.runs.manifest import Manifest, manifest_digest
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import Trajectory, Turn
from art_cli.serving.served_model import find_source
from tests.support.judges.judge_server import Conduct, serving
from tests.support.paths import LETTERS
from tests.support.servers.served import make_run

SMALL = ["rollout.groups_per_step=1", "rollout.group_size=4", "rollout.concurrency=1"]

Art = Callable[..., tuple[int, str, str]]

FAILING = """
num = 0
async def rollout(policy, scenario):
    global num
    num += 1
    if num % 4 != {spared}:
        raise KeyError(f"no tool {{num}}" if num % 4 else "rare")
    await policy.client.chat.completions.create(model=policy.model, messages=[{{"role": "user", "content": "hi"}}])
    return 1.0
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The letters task in a directory of its own; a test puts another rollout there."""
    for name in ("build.py", "config.yaml", "rollout.py", "scenarios.jsonl"):
        shutil.copy(LETTERS / name, tmp_path)
    return tmp_path


# --- art generate: failures are told ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_generate_counts_the_failures_among_what_it_played(art: Art, project: Path) -> None:
    """One reward in a group has nothing to differ from, so that there is no signal either."""
    (project / "rollout.py").write_text(FAILING.format(spared=0))
    code, out, _ = art("generate", project / "config.yaml", *SMALL, "-o", project / "out.jsonl", "--json")
    row = json.loads(out)
    assert (code, row["trajectories"], row["failed"], row["num_alike"]) == (1, 4, 3, 3)
    assert "no tool 1" in row["commonest_cause"]
    code, out, err = art("generate", project / "config.yaml", *SMALL, "-o", project / "out.jsonl")
    assert (code, "3 of 4 failed, 3 of them with" in out) == (1, True)
    assert "mean reward 1.000, 1 of 1 groups without signal (equal rewards)" in out
    assert "no signal: rewards within the one group are equal" in err


def test_the_commonest_cause_is_found_whatever_numbers_it_names() -> None:
    errors = ["rare: x", "timeout: 600 s", "timeout: 601 s", None]
    played = [Trajectory(id=str(i), group_id="g", group_size=4, index=i, error=e) for i, e in enumerate(errors)]
    failures = count_failures(played)
    assert str(failures) == "3 of 4 failed, 2 of them with timeout: 600 s"
    assert not failures.is_all
    assert not count_failures([]).is_all
    assert str(count_failures(played[:1])) == "1 of 1 failed with rare: x"


# --- art check --------------------------------------------------------------------------------------------------------


def findings(out: str) -> dict[str, dict[str, object]]:
    return {finding["name"]: finding for finding in json.loads(out)}


def judged_at(api_base: str) -> list[str]:
    return ["judge=ruler", f"judge.api_base={api_base}", "judge.model=rule", "judge.cache=null"]


def is_four(conversations: list[list[tuple[str, str]]]) -> float:
    """1 where the assistant's last word is 4."""
    return float([text for role, text in conversations[-1] if role == "assistant"][-1].strip() == "4")


@pytest.mark.slow
def test_check_asks_the_judge_once_and_says_what_it_cost(art: Art, project: Path) -> None:
    with serving(Conduct(rule=is_four)) as server:
        settings = [*judged_at(server.api_base), "judge.votes=3", "judge.price={input: 1.0, output: 1.0}"]
        code, out, _ = art("check", project / "config.yaml", *settings, "--no-judge", "--json")
        assert (code, server.num_answered) == (0, 0)
        assert "would take 1 calls, about" in str(findings(out)["judge"]["message"])
        code, out, err = art("check", project / "config.yaml", *settings, "--json")
    message = str(findings(out)["judge"]["message"])
    assert (code, server.num_answered) == (0, 1)
    assert message.startswith("rule gave a right answer 1 and a wrong one 0: 1 calls, ")
    assert "$0.00" in message
    assert "judge: asking rule once about two short attempts: 1 calls, about " in err


@pytest.mark.slow
def test_check_finds_a_judge_that_does_not_answer(art: Art, project: Path) -> None:
    with serving(Conduct(misbehaviour="seven")) as server:
        code, out, err = art("check", project / "config.yaml", *judged_at(server.api_base), "--json")
    assert (code, findings(out)["judge"]["is_good"]) == (1, False)
    assert "not ready: judge" in err


@pytest.mark.slow
def test_check_and_train_find_a_missing_key_before_anything_is_played(
    art: Art, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    for name in ("OPENAI_API_KEY", "MY_KEY"):
        monkeypatch.setenv(name, "")  # put back afterwards, whatever a .env file has set
        monkeypatch.delenv(name)
    code, out, _ = art("check", "config.yaml", "judge=ruler", "judge.model=openai/gpt-6.1-sol", "--json")
    assert code == 1
    assert str(findings(out)["judge"]["message"]).startswith(
        "OPENAI_API_KEY is not set, and openai/gpt-6.1-sol needs it"
    )
    assert "rollout" not in findings(out)
    code, _, err = art("train", "config.yaml", *judged_at("http://127.0.0.1:1/v1"), "judge.api_key_env=MY_KEY")
    assert (code, err.splitlines()[-1]) == (
        2,
        "error: judge: MY_KEY is not set, and rule needs it; set it in the environment or in .env",
    )
    assert not (project / "runs").exists()
    Path(".env").write_text("OPENAI_API_KEY=sk-not-a-real-one\n")
    code, out, _ = art("check", "config.yaml", "judge=ruler", "judge.model=openai/gpt-6.1-sol", "--no-judge", "--json")
    assert (code, findings(out)["judge"]["is_good"]) == (0, True)


@pytest.mark.slow
def test_check_tries_a_function_that_judges(art: Art, project: Path) -> None:
    (project / "judge.py").write_text("def judge(group):\n    return [t.metrics['nothing'] for t in group]\n")
    code, out, _ = art("check", project / "config.yaml", "judge=function", "judge.entry=judge.py:judge", "--json")
    assert (code, findings(out)["judge"]["is_good"]) == (1, False)
    assert "KeyError: 'nothing' (judge.py:2)" in str(findings(out)["judge"]["message"])


ASKING = """
async def rollout(policy, scenario):
    call = policy.client.chat.completions.create
    reply = await call(model=policy.model, messages=[{{"role": "user", "content": "hi"}}], {settings})
    return hash(reply.id) % 1000 / 1000
"""


@pytest.mark.slow
def test_check_says_that_temperature_0_teaches_nothing_and_force_overrides_it(art: Art, project: Path) -> None:
    (project / "rollout.py").write_text(ASKING.format(settings="temperature=0, seed=7"))
    code, out, _ = art("check", project / "config.yaml", "--json")
    assert (code, findings(out)["rollout"]["is_good"]) == (1, False)
    assert "temperature 0" in str(findings(out)["rollout"]["message"])
    assert "rollout.sampling.force=true" in str(findings(out)["rollout"]["cure"])
    force = ["rollout.sampling.force=true", "rollout.sampling.temperature=0.9"]
    code, out, _ = art("check", project / "config.yaml", *force, "--json")
    assert (code, findings(out)["rollout"]["cure"]) == (0, "")
    played = project / "out.jsonl"
    assert art("generate", project / "config.yaml", *SMALL, *force, "-o", played)[0] == 0
    turns = [turn for trajectory in read_lines(played, Trajectory) for turn in trajectory.turns]
    assert {turn.temperature for turn in turns} == {0.9}
    assert all(turn.asked == {"temperature": 0.0, "seed": 7} for turn in turns)
    assert len({tuple(turn.sampled_ids) for turn in turns}) > 1


@pytest.mark.slow
def test_check_suspects_a_fixed_seed(art: Art, project: Path) -> None:
    (project / "rollout.py").write_text(ASKING.format(settings="seed=7"))
    code, out, _ = art("check", project / "config.yaml", "--json")
    assert code == 0
    assert "`seed`" in str(findings(out)["rollout"]["cure"])


@pytest.mark.slow
def test_without_force_an_agent_samples_as_it_asks_and_nothing_is_noted(art: Art, project: Path) -> None:
    (project / "rollout.py").write_text(ASKING.format(settings="temperature=0.5"))
    played = project / "out.jsonl"
    assert art("generate", project / "config.yaml", *SMALL, "-o", played)[0] == 0
    turns = [turn for trajectory in read_lines(played, Trajectory) for turn in trajectory.turns]
    assert {(turn.temperature, turn.asked) for turn in turns} == {(0.5, None)}


SHARING = """
import threading, openai
client, lock = None, threading.Lock()
def rollout(policy, scenario):
    global client
    with lock:
        headers = {"Connection": "close"}
        client = client or openai.OpenAI(base_url=policy.base_url, api_key=policy.api_key, default_headers=headers)
    client.chat.completions.create(model=policy.model, messages=[{"role": "user", "content": "hi"}])
    return 1.0
"""


@pytest.mark.slow
def test_check_finds_attempts_that_share_a_client(art: Art, project: Path) -> None:
    """One key for both: the first attempt is given both calls, or the second is refused when the first is over."""
    (project / "rollout.py").write_text(SHARING)
    code, out, _ = art("check", project / "config.yaml", "--json")
    rollout = findings(out)["rollout"]
    assert (code, rollout["is_good"]) == (1, False)
    assert OWN_CLIENT in f"{rollout['message']} {rollout['cure']}"


TOOL = '{"type": "function", "function": {"name": "move", "parameters": {"type": "object", "properties": {}}}}'


@pytest.mark.slow
def test_check_finds_tools_that_the_chat_template_never_shows(art: Art, project: Path) -> None:
    (project / "rollout.py").write_text(ASKING.format(settings=f"tools=[{TOOL}]"))
    code, out, _ = art("check", project / "config.yaml", "--json")
    assert (code, findings(out)["tools"]["is_good"]) == (0, True)
    (project / "plain.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "<|im_start|>assistant\n"
    )
    code, out, _ = art("check", project / "config.yaml", "model.chat_template=plain.jinja", "--json")
    assert (code, findings(out)["tools"]["is_good"]) == (1, False)
    assert "the model never sees move" in str(findings(out)["tools"]["message"])
    assert str(findings(out)["tools"]["cure"]).startswith("name 'builtin' (ChatML with tools")
    code, out, _ = art("check", project / "config.yaml", "model.chat_template=builtin", "--json")
    assert (code, findings(out)["tools"]["is_good"]) == (0, True)


@pytest.mark.slow
def test_check_finds_an_engine_that_is_not_there(art: Art, project: Path) -> None:
    python = project / "python"
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(0o755)
    for settings in ([], [f"engine.python={python}"], ["engine.url=http://127.0.0.1:9"]):
        code, out, _ = art("check", project / "config.yaml", "engine=vllm", *settings, "--json")
        assert (code, list(findings(out)), findings(out)["engine"]["is_good"]) == (1, ["config", "engine"], False)
        assert findings(out)["engine"]["cure"]


@pytest.mark.slow
def test_check_finds_a_clash_with_the_run_of_that_name(art: Art, project: Path) -> None:
    config = project / "config.yaml"
    assert art("train", config, *SMALL, "train.steps=1", "eval=null")[0] == 0
    code, out, _ = art("check", config, *SMALL, "train.steps=2", "eval=null", "--json")
    assert (code, findings(out)["run"]["is_good"]) == (0, True), out
    assert "resumes from step 1" in str(findings(out)["run"]["message"])
    clashing = [config, *SMALL, "loss=dapo", "eval=null"]
    code, out, _ = art("check", *clashing, "--json")
    assert (code, findings(out)["run"]["is_good"]) == (1, False)
    assert "loss: grpo -> dapo" in str(findings(out)["run"]["message"])
    refusal = art("train", *clashing)[2].splitlines()[-1].removeprefix("error: ")
    assert str(findings(out)["run"]["message"]).startswith(refusal)


# --- evaluation by a judge --------------------------------------------------------------------------------------------

SILENT = """
from art_cli import Outcome
from letters_rollout import rollout as scored

async def rollout(policy, scenario):
    outcome = await scored(policy, scenario)
    return Outcome(metrics=outcome.metrics)
"""


def share_of_letters(conversations: list[list[tuple[str, str]]]) -> float:
    """What tests/letters/rollout.py returns, told from the conversation."""
    said = "".join(text for role, text in conversations[-1] if role == "assistant")
    return sum(letter.isascii() and letter.isalpha() for letter in said) / max(len(said), 1)


def silence(project: Path) -> Path:
    """The config of the letters task whose rollout returns no reward."""
    (project / "rollout.py").rename(project / "letters_rollout.py")
    (project / "rollout.py").write_text(SILENT)
    return project / "config.yaml"


@pytest.mark.slow
def test_a_judge_that_only_compares_finds_the_best_checkpoint(art: Art, project: Path) -> None:
    """The judge stretches each answer from 0 to 1, so that only attempts judged together can be compared.

    The start is 0.5 by definition; the trained policy wins more than that against the start's attempts.
    """
    config = silence(project)
    settings = ["train.learning_rate=0.1", "rollout.group_size=8", "eval.attempts=2", "eval.every=6"]
    settings += ["train.keep_checkpoints=99"]
    with serving(Conduct(rule=share_of_letters, relative=True)) as server:
        judged = judged_at(server.api_base)
        assert art("train", config, *settings, *judged, "train.steps=6")[0] == 0
        run = RunDir(project / "runs" / "letters")
        rewards = {line.step: line.metrics["reward"] for line in run.metrics() if line.split == "eval"}
        assert rewards[0] == 0.5
        assert rewards[6] > 0.6
        assert checkpoints.wanted_steps(run, "offered")[0] == 6
        compared = [str(run.checkpoint_path(6)), "--checkpoint", str(run.checkpoint_path(0))]
        code, out, _ = art("eval", config, *settings, *judged, "--checkpoint", *compared, "--json")
    reward = {row["policy"]: row for row in json.loads(out)["metrics"] if row["metric"] == "reward"}
    assert code == 0
    assert reward[str(run.checkpoint_path(6))]["mean"] == 0.5
    assert reward[str(run.checkpoint_path(0))]["mean"] < 0.4


@pytest.mark.slow
def test_best_is_refused_where_no_evaluation_says_which_is(art: Art, project: Path) -> None:
    config = silence(project)
    with serving(Conduct(rule=share_of_letters)) as server:
        settings = [*judged_at(server.api_base), *SMALL, "train.steps=1", "eval.judge=false", "eval.every=1"]
        assert art("train", config, *settings)[0] == 0
    run = project / "runs" / "letters"
    assert all("reward" not in line.metrics for line in RunDir(run).metrics() if line.split == "eval")
    code, _, err = art("export", run, "--best", "-o", project / "out")
    assert (code, err.count("\n")) == (2, 1)
    assert "--best: its evaluations have no reward" in err
    assert not (project / "out").exists()


async def test_a_contest_counts_comparisons_won(project: Path) -> None:
    """Scores 3 and 1 against references of 2 and 1: the first wins both, the second loses one and ties with the other.

    A failed attempt loses to a reference that finished and ties with one that failed as well.
    """

    class Reader(Judge):
        async def judge(self, group: Sequence[Trajectory]) -> dict[str, Verdict]:
            return {t.id: Verdict(reward=t.metrics["score"]) for t in group}

    def attempts(*scores: float | None) -> list[Trajectory]:
        return [
            Trajectory(
                id=f"t{index}",
                group_id="g",
                group_size=len(scores),
                index=index,
                scenario={"id": "s"},
                metrics={} if score is None else {"score": score},
                error="x: y" if score is None else None,
            )
            for index, score in enumerate(scores)
        ]

    references = attempts(2.0, 1.0)
    assert await judge_contest(Reader(), references, references) == {"s": 0.5}
    assert await judge_contest(Reader(), attempts(3.0, 1.0), references) == {"s": 2.5 / 4}
    assert await judge_contest(Reader(), attempts(None), attempts(1.0, None)) == {"s": 0.25}
    stale = [msgspec.structs.replace(each, scenario={"id": "s", "ask": "as it was"}) for each in references]
    assert await judge_contest(Reader(), attempts(3.0, 1.0), stale) == {}, "answers to another question"
    assert await judge_contest(Reader(), attempts(3.0, 1.0), [*stale, *references]) == {"s": 2.5 / 4}


# --- art eval ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs of the letters task under one directory, with adapters of other ranks; one of them learns nothing."""
    runs = tmp_path_factory.mktemp("sweep")
    settings = [f"runs={runs}", "rollout.group_size=8", "eval=null", "train.keep_checkpoints=99", "train.max_kl=null"]
    for name, steps, rate, rank in (("a-still", 1, 1e-9, 4), ("b-fast", 24, 0.1, 4), ("c-wide", 6, 0.1, 8)):
        own = [f"name={name}", f"train.steps={steps}", f"train.learning_rate={rate}", f"model.lora.rank={rank}"]
        asyncio.run(train(load_config(LETTERS / "config.yaml", [*settings, *own])))
    return runs


EVAL = ("eval", LETTERS / "config.yaml", "eval.attempts=3")


def means(out: str, metric: str) -> dict[str, float]:
    return {row["policy"]: row["mean"] for row in json.loads(out)["metrics"] if row["metric"] == metric}


@pytest.mark.slow
def test_base_is_the_base_model_of_the_config_and_of_a_run(art: Art, sweep: Path, tmp_path: Path) -> None:
    """The adapter of step 0 changes nothing, so the base plays as step 0 does, one rollout at a time."""
    start = RunDir(sweep / "b-fast").checkpoint_path(0)
    named = [tmp_path / "played", f"runs={tmp_path}", "rollout.concurrency=1"]
    policies = ["--checkpoint", start, "--checkpoint", "base", "--checkpoint", sweep / "b-fast" / "base"]
    code, out, err = art(*EVAL, *named[1:], "-o", named[0], *policies, "--json")
    assert (code, err.count("error")) == (0, 0)
    rewards = means(out, "reward")
    assert list(rewards) == [str(start), "base", str(sweep / "b-fast" / "base")]
    assert len(set(rewards.values())) == 1


def test_base_of_a_hub_run_needs_no_directory_of_that_name(art: Art, tmp_path: Path) -> None:
    """`runs/x/base` also where the base lies elsewhere; art serve and art export understand it as well."""
    run = make_run(tmp_path / "runs" / "x", (1, 2))
    run.base.rename(tmp_path / "elsewhere")
    for step in (1, 2):
        path = run.checkpoint_path(step) / "manifest.json"
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
        manifest.base = str(tmp_path / "elsewhere")
        manifest.digest = manifest_digest(msgspec.json.encode(manifest))
        path.write_bytes(msgspec.json.encode(manifest))
    source = find_source(f"start={run.root}/base")
    assert (source.name, source.base, source.adapter) == ("start", str(tmp_path / "elsewhere"), None)
    assert source.defaults.max_tokens == 8
    code, _, err = art("export", f"{run.root}/base", "-o", tmp_path / "out")
    assert (code, (tmp_path / "out" / "model.safetensors").exists()) == (0, True), err
    code, _, err = art("export", f"{run.root}/base", "--best", "-o", tmp_path / "none")
    assert (code, err.count("\n")) == (2, 1)


@pytest.mark.slow
def test_another_base_on_the_command_line_is_refused_where_a_checkpoint_is_played(art: Art, sweep: Path) -> None:
    """It was silently left aside: the run's own base was taken."""
    code, _, err = art(*EVAL, "model.base=build.py:build_wide", "--checkpoint", sweep / "b-fast")
    assert (code, err.splitlines()[-1].startswith("error: command line: model.base: ")) == (2, True)
    assert 'was trained with another: model.base: "build.py:build" -> "build.py:build_wide"' in err


@pytest.mark.slow
def test_a_sweep_is_a_table_with_the_best_run_on_top(art: Art, sweep: Path) -> None:
    code, out, _ = art(*EVAL, "--checkpoint", sweep, "--json")
    rewards = means(out, "reward")
    assert (code, list(rewards)) == (0, [str(sweep / name) for name in ("a-still", "b-fast", "c-wide")])
    assert min(rewards, key=rewards.__getitem__) == str(sweep / "a-still")
    for metric in ("seconds", "tokens_in", "tokens_out"):
        assert all(value > 0 for value in means(out, metric).values())
    _, text, _ = art(*EVAL, "--checkpoint", sweep)
    summary = text.split("\n\n")[0].splitlines()
    assert summary[0].split() == ["policy", "reward", "failed", "seconds", "tokens_in", "tokens_out"]
    assert summary[-1].split()[0].endswith("a-still")


def test_tokens_and_cost_of_an_endpoint_are_its_own_counts(project: Path) -> None:
    """Two calls an attempt; each prompt counts whole."""
    calls = [
        Turn(parent=None, kept=0, prompt_ids=[1, 2], sampled_ids=[3], logprobs=[0.0], raw_logprobs=None, step=0,
             temperature=1.0),
        Turn(parent=0, kept=3, prompt_ids=[4], sampled_ids=[5, 6], logprobs=[0.0] * 2, raw_logprobs=None, step=0,
             temperature=1.0),
    ]  # fmt: skip
    common = {"group_id": "g", "group_size": 2, "scenario": {"id": "s"}}
    ours = Trajectory(id="a", index=0, turns=calls, duration_s=2.0, **common)
    theirs = Trajectory(id="b", index=1, metrics={"num_prompt": 16, "num_completion": 7}, duration_s=4.0, **common)
    price = Price(prompt=1.0, completion=10.0, cached=1.0)
    assert spent_by_scenario([ours], price) == {
        "seconds": {"s": 2.0},
        "tokens_in": {"s": 6.0},
        "tokens_out": {"s": 3.0},
        "cost_usd": {"s": 36.0},
    }
    both = spent_by_scenario([ours, theirs], None)
    assert both == {"seconds": {"s": 3.0}, "tokens_in": {"s": 11.0}, "tokens_out": {"s": 5.0}}


@pytest.mark.slow
def test_a_gate_holds_the_paired_difference_to_its_bound(art: Art, sweep: Path) -> None:
    still, fast = sweep / "a-still", sweep / "b-fast"
    policies = ["--checkpoint", "base", "--checkpoint", still, "--checkpoint", fast]
    code, out, err = art(*EVAL, *policies, "--gate", "reward>=baseline+0.05", "--gate", f"reward>={still}")
    assert code == 0, out + err
    code, _, err = art(*EVAL, "--checkpoint", fast, "--checkpoint", still, "--gate", "reward>=baseline-0.02")
    assert code == 1
    assert f"gate missed: {still}: reward differs from {fast} by -" in err
    assert "not >= -0.02" in err


@pytest.mark.parametrize(
    ("gate", "said"),
    [
        ("rewrad>=0.5", "no metric 'rewrad'; did you mean 'reward'?"),
        ("reward>=baseline-0.1", "is compared with itself"),
        ("reward>=nobody-0.1", "expected METRIC>=NUMBER"),
        ("lenght>=1", "no attempt reports 'lenght'; did you mean 'length'?"),
    ],
)
def test_a_gate_that_cannot_be_meant_is_refused_before_the_evaluation_is_over(
    art: Art, tmp_path: Path, gate: str, said: str
) -> None:
    place = tmp_path / "played"
    slow = ["eval.attempts=40", "rollout.concurrency=4", f"runs={tmp_path}"]
    code, out, err = art("eval", LETTERS / "config.yaml", *slow, "-o", place, "--gate", gate)
    assert (code, out) == (2, "")
    assert said in err.splitlines()[-1]
    assert sum(len(file.read_text().splitlines()) for file in place.glob("*.jsonl")) < 20


def test_a_name_that_no_attempt_reports_is_told_early(art: Art, tmp_path: Path) -> None:
    code, _, err = art("eval", LETTERS / "config.yaml", f"runs={tmp_path}", "--gate", "won>=1")
    assert code == 2
    assert "none of the first 4 attempts reports 'won'; there are " in err
    assert "no metric 'won'" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("text", "gate"),
    [
        ("reward>=baseline", Gate("reward", ">=", 0.0, "runs/a")),
        ("failed <= baseline + 0.1", Gate("failed", "<=", 0.1, "runs/a")),
        ("reward>=runs/a-2-0.5", Gate("reward", ">=", -0.5, "runs/a-2")),
        ("reward>=runs/a-2", Gate("reward", ">=", 0.0, "runs/a-2")),
        ("reward>=runs/a-3", Gate("reward", ">=", -3.0, "runs/a")),
        ("reward>=-1", Gate("reward", ">=", -1.0)),
    ],
)
def test_a_gate_on_a_difference_is_read_whatever_signs_the_names_have(text: str, gate: Gate) -> None:
    assert parse_gate(text, ["runs/a", "runs/a-2"]) == gate
