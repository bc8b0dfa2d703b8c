"""`art plan --compare prompt`: the cost of a prompt search compared with training weights."""

import json
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from art_cli.config.compose import load_config
from art_cli.config.schema import PromptLearnerConfig
from art_cli.loop.prompt_plan import as_prompt
from art_cli.runs.run_dir import RunDir
from art_cli.runtime.errors import UsageError
from tests.support.paths import TESTS
from tests.support.servers.chat_server import ChatServer, Json, chatting

Art = Callable[..., tuple[int, str, str]]
CONFIG = TESTS / "planned" / "config.yaml"


@pytest.fixture
def reflector() -> Iterator[ChatServer]:
    """A model that answers with a new prompt each time; failed calls are not repeated."""

    def answer(body: Json, number: int) -> str:
        return f"```\nSay letters, and only letters: {number}.\n```"

    with chatting(ChatServer(answer)) as server:
        yield server


def learner(server: ChatServer) -> str:
    return f"{{name: prompt, model: m, base_url: '{server.api_base}', price: {{input: 1000, output: 4000}}}}"


@pytest.mark.slow
def test_both_are_planned_trained_and_compared_by_the_commands_that_a_plan_prints(
    art: Art, reflector: ChatServer, tmp_path: Path
) -> None:
    settings = [f"runs={tmp_path}", "train.learning_rate=1e-2", "train.steps=4", "eval.held_out=0.3", "eval.every=100"]
    words = ["plan", CONFIG, *settings, "--compare", learner(reflector)]
    code, out, err = art(*words)
    assert code == 0 and len(reflector.asked) == 1, err
    assert "Generated Outputs" in reflector.asked[0]["messages"][-1]["content"], "it is the question of a search"
    files = RunDir(tmp_path / "planned")
    promise, played = files.promise(), files.trajectories_path(0).read_bytes()
    assert promise is not None and promise.measured.reflection is not None
    assert art(*words)[1] == out and len(reflector.asked) == 1, "a plan that is asked again pays nothing"
    assert "128 attempts; the prompt search adds 4 questions to m" in out
    commands = [shlex.split(line.partition(": ")[2])[1:] for line in out.splitlines()[-3:]]
    assert [each[0] for each in commands] == ["train", "train", "eval"]
    for command in commands[:2]:
        code, _, err = art(*command)
        assert code == 0, err
    assert files.trajectories_path(0).read_bytes() == played

    search = RunDir(tmp_path / "planned-prompt")
    done = [line.metrics for line in search.metrics() if line.split == "train"]
    assert len(done) == 4 and len(reflector.asked) == 1 + 4 and "learning_rate" not in done[0]
    usd = sum(metrics["reflection_usd"] for metrics in done)
    assert promise.prompt["usd"].low / 1.2 < usd < 1.2 * promise.prompt["usd"].high  # a later prompt is in the question
    assert promise.expected["usd"].high == 0 and promise.prompt["tokens"] == promise.expected["tokens"]

    code, out, err = art(*commands[2], "--last", "--json")
    rows = {(row["policy"], row["metric"]): row for row in json.loads(out)["metrics"]}
    assert code == 0 and {policy for policy, _ in rows} == {str(files.root), str(search.root)}, err
    ours, theirs = (rows[str(run.root), "reward"] for run in (files, search))
    assert (ours["mean"], theirs["mean"]) == tuple(run.evaluations()[4]["reward"] for run in (files, search))
    assert theirs["difference"]["mean"] == pytest.approx(theirs["mean"] - ours["mean"])
    longer = rows[str(search.root), "tokens_in"]["mean"] - rows[str(files.root), "tokens_in"]["mean"]
    assert longer > 5, "the prompt is in front of the base model"


@pytest.mark.parametrize(
    ("compare", "settings", "said"),
    [
        ("prompt", [], "learner.model: judge 'rollout' cannot reflect, because it is not a language model; name one:"),
        ("torch", [], "expected prompt, or '{name: prompt, model: MODEL}'"),
        ("prompts", [], "no learner 'prompts'"),
        ("{name: prompt, model: m, parts: {a: nowhere.txt}}", [], "learner.parts.a: "),
        ("{name: prompt, model: m, api_key_env: ART_NO_SUCH_KEY}", [], "ART_NO_SUCH_KEY is not set"),
        ("{name: prompt, model: m}", ["stop=[{metric: kl, above: 1}]", "loss.kl=0.1"], "stop.0.metric"),
    ],
)
def test_what_cannot_be_searched_is_refused_in_one_line_before_anything_is_played(
    compare: str, settings: list[str], said: str, art: Art, tmp_path: Path
) -> None:
    code, out, err = art("plan", CONFIG, f"runs={tmp_path}", *settings, "--compare", compare)
    assert (code, out) == (2, "") and said in err and err.count("\n") == 1 and not list(tmp_path.iterdir())


def test_a_search_has_the_settings_of_the_run_but_those_of_weights(tmp_path: Path) -> None:
    """The file has an adapter and epochs; the command line takes a learner, a rate, a loss and fewer groups."""
    given = ["learner=torch", "learner.device=cpu", "train.learning_rate=1e-2", "+train.decay=linear", "loss=ppo",
             "rollout.groups_per_step=3", "train.seed=7", "name=mine"]  # fmt: skip
    loaded = load_config(CONFIG, given)
    found = as_prompt(loaded, "{name: prompt, model: m}")
    assert found.config.name == "mine-prompt" and isinstance(found.config.learner, PromptLearnerConfig)
    assert found.config.rollout == loaded.config.rollout and found.config.train.seed == 7
    assert load_config(CONFIG, found.overrides).config == found.config, "the command that is printed"


def test_the_judge_reflects_where_it_is_a_model() -> None:
    found = as_prompt(load_config(CONFIG, ["judge=ruler", "judge.model=openai/gpt-6.1-sol"]), "prompt")
    assert isinstance(found.config.learner, PromptLearnerConfig) and found.config.learner.model is None
    with pytest.raises(UsageError, match="cannot reflect"):
        as_prompt(load_config(CONFIG, ["judge=ruler", "judge.model=builtin:rule"]), "prompt")
