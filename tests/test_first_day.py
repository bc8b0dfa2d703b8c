"""A new user's first day: what commands say when something is not as the user believes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from art_cli.loop.failures import count_failures
from art_cli.run_dir import read_lines
from art_cli.trajectory import Trajectory
from tests.judge_server import Conduct, serving

LETTERS = Path(__file__).parent / "letters"
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
    build = (
        (tmp_path / "build.py").read_text().replace("Path(__file__).parent.parent", f"Path({str(LETTERS.parent)!r})")
    )
    (tmp_path / "build.py").write_text(build)
    return tmp_path


# --- art generate: failures are told ----------------------------------------------------------------------------------


def test_generate_fails_where_every_attempt_failed_and_says_why(art: Art, project: Path) -> None:
    (project / "rollout.py").write_text(FAILING.format(spared=9))
    code, out, err = art("generate", project / "config.yaml", *SMALL, "-o", project / "out.jsonl")
    assert code == 1
    assert f"{project / 'out.jsonl'}: 4 trajectories; 4 of 4 failed, 3 of them with " in out
    assert "no tool 1" in out
    assert err.splitlines()[-1].startswith(f"error: {project / 'out.jsonl'}: every attempt failed: 4 of 4 failed, 3 of")


def test_generate_counts_the_failures_among_what_it_played(art: Art, project: Path) -> None:
    (project / "rollout.py").write_text(FAILING.format(spared=0))
    code, out, _ = art("generate", project / "config.yaml", *SMALL, "-o", project / "out.jsonl", "--json")
    row = json.loads(out)
    assert (code, row["trajectories"], row["failed"], row["num_alike"]) == (0, 4, 3, 3)
    assert "no tool 1" in row["commonest_cause"]
    code, out, _ = art("generate", project / "config.yaml", *SMALL, "-o", project / "out.jsonl")
    assert (code, "3 of 4 failed, 3 of them with" in out) == (0, True)


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


def test_check_finds_a_judge_that_does_not_answer(art: Art, project: Path) -> None:
    with serving(Conduct(misbehaviour="seven")) as server:
        code, out, err = art("check", project / "config.yaml", *judged_at(server.api_base), "--json")
    assert (code, findings(out)["judge"]["is_good"]) == (1, False)
    assert "not ready: judge" in err


def test_check_and_train_find_a_missing_key_before_anything_is_played(
    art: Art, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    for name in ("OPENAI_API_KEY", "MY_KEY"):
        monkeypatch.setenv(name, "")  # put back afterwards, whatever a .env file has set
        monkeypatch.delenv(name)
    code, out, _ = art("check", "config.yaml", "judge=ruler", "judge.model=openai/o3", "--json")
    assert code == 1
    assert str(findings(out)["judge"]["message"]).startswith("OPENAI_API_KEY is not set, and openai/o3 needs it")
    assert "rollout" not in findings(out)
    code, _, err = art("train", "config.yaml", *judged_at("http://127.0.0.1:1/v1"), "judge.api_key_env=MY_KEY")
    assert (code, err.splitlines()[-1]) == (
        2,
        "error: judge: MY_KEY is not set, and rule needs it; set it in the environment or in .env",
    )
    assert not (project / "runs").exists()
    Path(".env").write_text("OPENAI_API_KEY=sk-not-a-real-one\n")
    code, out, _ = art("check", "config.yaml", "judge=ruler", "judge.model=openai/o3", "--no-judge", "--json")
    assert (code, findings(out)["judge"]["is_good"]) == (0, True)


def test_check_tries_a_function_that_judges(art: Art, project: Path) -> None:
    (project / "judge.py").write_text("def judge(group):\n    return [t.metrics['nothing'] for t in group]\n")
    code, out, _ = art("check", project / "config.yaml", "judge=function", "judge.entry=judge.py:judge", "--json")
    assert (code, findings(out)["judge"]["is_good"]) == (1, False)
    assert "KeyError: 'nothing' (judge.py:2)" in str(findings(out)["judge"]["message"])


ASKING = """
async def rollout(policy, scenario):
    call = policy.client.chat.completions.create
    await call(model=policy.model, messages=[{{"role": "user", "content": "hi"}}], {settings})
    return 1.0
"""


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


def test_check_suspects_a_fixed_seed(art: Art, project: Path) -> None:
    (project / "rollout.py").write_text(ASKING.format(settings="seed=7"))
    code, out, _ = art("check", project / "config.yaml", "--json")
    assert code == 0
    assert "`seed`" in str(findings(out)["rollout"]["cure"])


def test_without_force_an_agent_samples_as_it_asks_and_nothing_is_noted(art: Art, project: Path) -> None:
    (project / "rollout.py").write_text(ASKING.format(settings="temperature=0.5"))
    played = project / "out.jsonl"
    assert art("generate", project / "config.yaml", *SMALL, "-o", played)[0] == 0
    turns = [turn for trajectory in read_lines(played, Trajectory) for turn in trajectory.turns]
    assert {(turn.temperature, turn.asked) for turn in turns} == {(0.5, None)}


TOOL = '{"type": "function", "function": {"name": "move", "parameters": {"type": "object", "properties": {}}}}'


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


def test_check_finds_an_engine_that_is_not_there(art: Art, project: Path) -> None:
    python = project / "python"
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(0o755)
    for settings in ([], [f"engine.python={python}"], ["engine.url=http://127.0.0.1:9"]):
        code, out, _ = art("check", project / "config.yaml", "engine=vllm", *settings, "--json")
        assert (code, list(findings(out)), findings(out)["engine"]["is_good"]) == (1, ["config", "engine"], False)
        assert findings(out)["engine"]["cure"]


def test_check_finds_a_clash_with_the_run_of_that_name(art: Art, project: Path) -> None:
    config = project / "config.yaml"
    assert art("train", config, *SMALL, "train.steps=1", "eval=null")[0] == 0
    code, out, _ = art("check", config, *SMALL, "train.steps=2", "eval=null", "--json")
    assert (code, findings(out)["run"]["is_good"]) == (0, True)
    assert "goes on from step 1" in str(findings(out)["run"]["message"])
    clashing = [config, *SMALL, "loss=dapo", "eval=null"]
    code, out, _ = art("check", *clashing, "--json")
    assert (code, findings(out)["run"]["is_good"]) == (1, False)
    assert "loss: grpo -> dapo" in str(findings(out)["run"]["message"])
    refusal = art("train", *clashing)[2].splitlines()[-1].removeprefix("error: ")
    assert str(findings(out)["run"]["message"]).startswith(refusal)
