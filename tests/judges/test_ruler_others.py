"""What stands beside RULER behind the same protocol: blends, a local reward model, litellm, and the Python call."""

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from pydantic import BaseModel
from transformers import Qwen3Config, Qwen3ForSequenceClassification

import art_cli
from art_cli.cli import app as cli
from art_cli.config.schema import BlendJudgeConfig, RewardModelJudgeConfig, RulerJudgeConfig, ShadowConfig
from art_cli.config.sections.judge_config import DEFAULT_JUDGE
from art_cli.judges import costs, make_judge, trial
from art_cli.judges.costs import find_price
from art_cli.judges.reward_model import RewardModelJudge
from art_cli.judges.ruler.ruler_judge import RulerJudge
from art_cli.judges.shadow_judges import ShadowJudges
from art_cli.runtime import gpus
from art_cli.runtime.errors import JudgeError, JudgeStopped, UsageError
from tests.support.judges.judge_server import Conduct, JudgeServer
from tests.support.judges.ruler_cases import SYSTEM, attempt, rated
from tests.support.models.tiny import tiny_tokenizer
from tests.support.paths import ROOT


@pytest.fixture
async def server() -> AsyncIterator[JudgeServer]:
    async with JudgeServer() as running:
        yield running


# --- blend ------------------------------------------------------------------------------------------------------------


def blend(server: JudgeServer, weights: dict[str, float]) -> BlendJudgeConfig:
    ruler = RulerJudgeConfig(name="ruler", model="m", api_base=server.api_base, cache=None)
    return BlendJudgeConfig(name="blend", blend=weights, judges={"ruler": ruler} if "ruler" in weights else {})


async def test_a_blend_is_the_weighted_mean_of_its_judges(server: JudgeServer) -> None:
    """Weights 7 and 3, RULER's score q, the rollout's own reward 2: (7 q + 3 * 2) / 10, above 1 and kept so."""
    judge = make_judge(blend(server, {"ruler": 7, "rollout": 3}), Path("."))
    verdicts = await judge.judge(rated([0.2, 0.9], returned_reward=2.0))
    await judge.close()
    for index, quality in enumerate([0.2, 0.9]):
        verdict = verdicts[f"g-{index}"]
        assert verdict.reward == pytest.approx((7 * quality + 3 * 2) / 10)
        assert [(score.judge, score.score) for score in verdict.scores] == [("ruler", quality), ("rollout", 2.0)]


async def test_attempts_that_are_all_the_same_have_the_error_of_one(server: JudgeServer) -> None:
    """RULER asks about one of the identical attempts; the votes show no differences."""
    config = blend(server, {"ruler": 7, "rollout": 3})
    config.judges["ruler"] = config.judges["ruler"].model_copy(update={"votes": 4})
    judge = make_judge(config, Path("."))
    same = rated([0.5])[0]
    group = [msgspec.structs.replace(same, id=f"g-{n}", index=n, group_size=2, returned_reward=n) for n in (0.0, 1.0)]
    verdicts = await judge.judge(group)
    await judge.close()
    assert [verdict.variance for verdict in verdicts.values()] == [0.0, 0.0]


async def test_a_blend_with_one_judge_missing_is_no_blend(server: JudgeServer) -> None:
    judge = make_judge(blend(server, {"ruler": 7, "rollout": 3}), Path("."))
    with pytest.raises(JudgeError, match="the rollout returned no reward"):
        await judge.judge(rated([0.2, 0.9]))
    await judge.close()


# --- reward model -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["right", "left"])
def reward_model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A seeded two-layer classifier with two outputs, over bytes, whose tokenizer pads at that side."""
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=256, num_labels=2, pad_token_id=0,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("reward") / "model"
    Qwen3ForSequenceClassification(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**settings, "padding_side": request.param}))
    return path


async def score(path: Path, group: list[Any], **settings: Any) -> list[float]:
    judge = make_judge(RewardModelJudgeConfig(name="reward_model", model=path.name, **settings), path.parent)
    verdicts = await judge.judge(group)
    await judge.close()
    return [verdicts[trajectory.id].reward for trajectory in group]


@pytest.mark.parametrize("activation", ["none", "sigmoid", "softmax"])
async def test_batched_scores_equal_those_of_each_conversation_alone(reward_model: Path, activation: str) -> None:
    """Conversations of 2 to 5 messages in batches of 3, padded, against one forward pass each without any padding."""
    start = [SYSTEM, {"role": "user", "content": "a start that all share, of more than 32 tokens"}]
    group = [attempt(i, [*start, *[{"role": "user", "content": "go on " * i}] * (i % 4)]) for i in range(7)]
    found = await score(reward_model, group, label=1, activation=activation, batch_size=3)
    model = Qwen3ForSequenceClassification.from_pretrained(reward_model).eval()
    tokenizer = tiny_tokenizer()
    for trajectory, value in zip(group, found, strict=True):
        ids = tokenizer.apply_chat_template(trajectory.messages, tokenize=True, return_dict=False)[-256:]
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0]
        wanted = {"none": logits[1], "sigmoid": logits[1].sigmoid(), "softmax": logits.softmax(-1)[1]}[activation]
        assert value == pytest.approx(float(wanted), abs=1e-5)


@pytest.mark.parametrize(
    ("room", "error"), [(2, ""), (0, "no memory for a conversation of .* tokens; set judge.device")]
)
async def test_a_batch_that_the_gpu_has_no_memory_for_is_halved(
    reward_model: Path, monkeypatch: pytest.MonkeyPatch, room: int, error: str
) -> None:
    group = [attempt(i, [SYSTEM, {"role": "user", "content": "word " * i}]) for i in range(1, 8)]
    alone = [(await score(reward_model, [each]))[0] for each in group]
    forward, sizes = Qwen3ForSequenceClassification.forward, list[int]()

    def bounded(self: Any, input_ids: torch.Tensor, **others: Any) -> Any:
        sizes.append(len(input_ids))
        if len(input_ids) > room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, input_ids, **others)

    monkeypatch.setattr(Qwen3ForSequenceClassification, "forward", bounded)
    if error:
        with pytest.raises(JudgeError, match=error):
            await score(reward_model, group)
    else:
        assert await score(reward_model, group, batch_size=5) == pytest.approx(alone, abs=1e-5)
        assert sizes == [5, 2, 2, 2, 1]


async def test_equal_conversations_of_a_group_get_equal_scores(reward_model: Path) -> None:
    """Exactly equal, also in batches of other shapes, because a loss may scale any difference up."""
    texts = ["short", "longer " * 9, "short", "other", "short"]
    found = await score(
        reward_model, [attempt(i, [SYSTEM, {"role": "user", "content": t}]) for i, t in enumerate(texts)], batch_size=2
    )
    assert found[0] == found[2] == found[4] != found[3]


async def test_of_a_conversation_that_is_too_long_the_end_counts(reward_model: Path) -> None:
    tails = [
        attempt(i, [{"role": "user", "content": start * 400 + "the same end" * 10}]) for i, start in enumerate("ab")
    ]
    one, other = await score(reward_model, tails, max_length=100)
    assert one == pytest.approx(other, abs=1e-6)


async def test_a_reward_model_is_loaded_on_opening_where_an_engine_would_take_the_gpus_memory(
    reward_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and in a blend. Without a GPU, and with device=cpu, the first group loads it."""

    async def is_loaded(**settings: Any) -> bool:
        config = RewardModelJudgeConfig(name="reward_model", model=reward_model.name, **settings)
        blend = BlendJudgeConfig(name="blend", blend={"own": 1.0}, judges={"own": config})
        alone, among = make_judge(config, reward_model.parent), make_judge(blend, reward_model.parent)
        await alone.open()
        await among.open()
        assert all(isinstance(each, RewardModelJudge) for each in (alone, *among.parts))
        found = {each._loaded is not None for each in (alone, *among.parts)}  # type: ignore[attr-defined]
        return found == {True}

    monkeypatch.setattr(gpus, "has_gpu", lambda environment: False)
    assert not await is_loaded()
    monkeypatch.setattr(gpus, "has_gpu", lambda environment: True)
    assert await is_loaded() and not await is_loaded(device="cpu")


async def test_shadow_judges_are_opened_too_and_one_that_cannot_be_loaded_does_not_stop_the_run(
    reward_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "has_gpu", lambda environment: True)
    (tmp_path / "damaged").mkdir()
    models = {"own": str(reward_model), "damaged": str(tmp_path / "damaged")}
    config = {name: {"judge": {"name": "reward_model", "model": model}} for name, model in models.items()}
    shadows = ShadowJudges({name: ShadowConfig.model_validate(each) for name, each in config.items()}, tmp_path)
    await shadows.open()
    assert [each._loaded is not None for each in shadows.judges.values()] == [True, False]  # type: ignore[attr-defined]
    scores = await shadows.score(rated([1.0, 0.0]))
    assert {score.judge for each in scores.values() for score in each} == {"own"}


async def test_a_reward_model_that_is_not_there_stops_and_a_label_that_is_not_there_too(
    reward_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "nothing").mkdir()
    with pytest.raises(JudgeStopped, match="judge.model: nothing cannot be loaded"):
        await score(tmp_path / "nothing", rated([0.1]))
    with pytest.raises(JudgeStopped, match="judge.label 5: .* has 2 outputs"):
        await score(reward_model, rated([0.1]), label=5)


async def test_the_hub_is_asked_once_for_a_reward_model_that_it_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading would retry for half a minute, for every group."""
    asked = []

    def model_info(self: object, name: str, **_: object) -> None:
        asked.append(name)
        raise ConnectionError("no network")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    judge = make_judge(RewardModelJudgeConfig(name="reward_model", model="no-such-model"), tmp_path)
    for _ in range(3):
        with pytest.raises(
            JudgeStopped, match=r"judge\.model: no-such-model is not a directory here, and the hub could not"
        ):
            await judge.judge(rated([0.1]))
    assert asked == ["no-such-model"]


async def test_code_that_a_reward_model_brings_is_never_run(
    reward_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model directory with custom code is rejected, even if transformers' trust prompt would be answered with yes."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the question sets an alarm, which only a main thread can
    monkeypatch.setattr(signal, "alarm", lambda *_: 0)
    path = tmp_path / "model"
    shutil.copytree(reward_model, path)
    config = json.loads((path / "config.json").read_text())
    names = {"AutoConfig": "own.Config", "AutoModelForSequenceClassification": "own.Model"}
    (path / "config.json").write_text(json.dumps(config | {"model_type": "own", "auto_map": names}))
    (path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(JudgeStopped, match="judge.model: model cannot be loaded"):
        await score(path, rated([0.1]))
    assert not (tmp_path / "ran").exists()


# --- the Python call --------------------------------------------------------------------------------------------------


async def test_one_call_scores_a_group_and_keeps_what_failed(server: JudgeServer) -> None:
    group = rated([0.2, 0.9, 0.4])
    group[1].error = "timeout: 3 s"
    judged = await art_cli.ruler_score_group(group, "m", api_base=server.api_base, cache=None)
    assert [(each.id, each.reward) for each in judged] == [("g-0", 0.2), ("g-1", None), ("g-2", 0.4)]


async def test_one_call_takes_plain_conversations_a_rubric_and_parameters(server: JudgeServer) -> None:
    group = [{"messages": trajectory.messages} for trajectory in rated([0.2, 0.9])]
    judged = await art_cli.ruler_score_group(
        group, "m", {"temperature": 0}, "Shorter is better.", api_base=server.api_base, cache=None, votes=2
    )
    assert [each.reward for each in judged] == [0.2, 0.9]
    assert "Shorter is better." in server.asked[0]["messages"][0]["content"] and server.asked[0]["temperature"] == 0


class ForeignTrajectory(BaseModel):
    """As a program written for OpenPipe ART holds them."""

    messages_and_choices: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    reward: float = 0.0
    metrics: dict[str, float] = {}
    logs: list[str] = []

    def messages(self) -> list[dict[str, Any]]:
        return self.messages_and_choices

    def log(self, message: str) -> None:
        self.logs.append(message)


class ForeignGroup(BaseModel):
    trajectories: list[ForeignTrajectory]
    metadata: dict[str, str] = {}


async def test_a_foreign_group_comes_back_as_a_copy_with_its_rewards_set(server: JudgeServer) -> None:
    rows = [ForeignTrajectory(messages_and_choices=each.messages, reward=0.5) for each in rated([0.2, 0.9])]
    group = ForeignGroup(trajectories=rows, metadata={"a": "b"})
    before = copy.deepcopy(group)
    judged = await art_cli.ruler_score_group(group, "m", api_base=server.api_base, cache=None)
    assert group == before
    assert isinstance(judged, ForeignGroup) and judged.metadata == {"a": "b"}
    assert [each.reward for each in judged.trajectories] == [0.2, 0.9]
    assert [each.metrics for each in judged.trajectories] == [
        {"independent_reward": 0.5, "ruler_score": 0.2},
        {"independent_reward": 0.5, "ruler_score": 0.9},
    ]
    assert all(each.logs[0].startswith("RULER explanation: place ") for each in judged.trajectories)


async def test_a_failure_is_raised_or_swallowed_as_asked_and_a_wrong_setting_is_named(server: JudgeServer) -> None:
    server.conduct = Conduct(misbehaviour="seven")
    settings = {"api_base": server.api_base, "cache": None, "attempts": 1}
    with pytest.raises(JudgeError):
        await art_cli.ruler_score_group(rated([0.2, 0.9]), "m", **settings)
    assert await art_cli.ruler_score_group(rated([0.2, 0.9]), "m", swallow_exceptions=True, **settings) is None
    with pytest.raises(UsageError, match="vote: Extra inputs"):
        await art_cli.ruler_score_group(rated([0.2, 0.9]), "m", vote=2)


# --- prices and litellm -----------------------------------------------------------------------------------------------


def test_prices_come_from_litellms_table_without_importing_it() -> None:
    """openai/o3: 2 and 8 dollars a million, 0.50 for what OpenAI had cached."""
    price = find_price(RulerJudgeConfig(name="ruler", model="openai/o3"))
    assert price is not None
    assert price.cost(1_000_000, 1_000_000) == pytest.approx(10.0)
    assert price.cost(1_000_000, 0, 1_000_000) == pytest.approx(0.5)
    assert find_price(RulerJudgeConfig(name="ruler", model="nobody/knows")) is None


@pytest.fixture
def no_litellm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As where it is not installed."""
    monkeypatch.setitem(sys.modules, "litellm", None)
    costs.model_table.cache_clear()
    yield
    costs.model_table.cache_clear()


@pytest.mark.parametrize("variable", ["OPENAI_BASE_URL", "OPENAI_API_BASE"])
async def test_openai_is_asked_without_litellm(
    no_litellm: None, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """Its address and key are read as OpenAI's client reads them; without a table its price is unknown, not zero."""
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-canary-0011223344")
    async with JudgeServer(Conduct(key="sk-canary-0011223344")) as server:
        monkeypatch.setenv(variable, server.api_base)
        judge = RulerJudge(RulerJudgeConfig(name="ruler", model="openai/gpt-4.1", cache=None), Path("."))
        verdicts = await judge.judge(rated([0.2, 0.9]))
        await judge.close()
    assert [verdicts[name].reward for name in ("g-0", "g-1")] == [0.2, 0.9]
    assert server.asked[0]["model"] == "gpt-4.1" and "response_format" in server.asked[0]
    assert (judge.usage.calls, judge.usage.cost_usd) == (1, None)


def test_a_key_of_openai_that_is_not_set_is_told_without_litellm(
    no_litellm: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)
    config = RulerJudgeConfig(name="ruler")
    assert trial.missing_keys(config, tmp_path) == {"OPENAI_API_KEY": DEFAULT_JUDGE}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["anthropic/claude-sonnet-5", "gpt-6-luna", "openai/responses/o1-pro"])
def test_a_judge_that_needs_litellm_says_so_before_anything_runs(
    no_litellm: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    with pytest.raises(UsageError, match=r"pip install 'art-cli\[litellm\]'"):
        RulerJudge(RulerJudgeConfig(name="ruler", model=model, cache=None), tmp_path)
    (tmp_path / "r.py").write_text("def r(policy, scenario): return 1\n")
    (tmp_path / "s.jsonl").write_text('{"id": 1}\n')
    (tmp_path / "config.yaml").write_text(
        "model: {base: m}\nrollout: {entry: 'r.py:r', scenarios: s.jsonl}\n"
        f"judge: {{name: ruler, model: {model}}}\n"
    )
    assert cli.run(["train", str(tmp_path / "config.yaml")]) == 2
    said = capsys.readouterr().err
    assert f"config.yaml:3: judge.model: {model} is asked through litellm, which is not installed: pip install" in said


LITELLM = """
import asyncio, gzip, json, os, resource, sys
from pathlib import Path
from tests.support.judges.judge_server import Conduct, JudgeServer
from tests.support.judges.ruler_cases import rated
from art_cli.config.schema import RulerJudgeConfig
from art_cli.runtime import gpus
from art_cli.runtime.errors import JudgeError, JudgeStopped
from art_cli.judges.costs import find_price
from art_cli.judges.reward_model import RewardModelJudge
from art_cli.judges.ruler.ruler_judge import RulerJudge

async def main():
    async with JudgeServer(Conduct(misbehaviour="429", times=1, key=os.environ["DEEPSEEK_API_KEY"])) as server:
        os.environ["DEEPSEEK_API_BASE"] = server.api_base
        config = RulerJudgeConfig(name="ruler", model="deepseek/deepseek-chat", cache=None)
        judge = RulerJudge(config, Path("."), first_delay_s=0.01)
        assert "litellm" not in sys.modules
        verdicts = await judge.judge(rated([0.2, 0.9]))
        assert [verdicts[name].reward for name in ("g-0", "g-1")] == [0.2, 0.9], verdicts
        usage = judge.usage
        wanted = find_price(config).cost(usage.prompt_tokens, usage.completion_tokens)
        assert usage.calls == 1 and abs(usage.cost_usd - wanted) < 1e-9
        assert server.asked[0]["model"] == "deepseek-chat" and "response_format" in server.asked[0]
        assert len(server.asked) == 2
        server.conduct = Conduct(key="another")
        try:
            await judge.judge(rated([0.3, 0.8]))
        except JudgeStopped as stopped:
            assert os.environ["DEEPSEEK_API_KEY"] not in str(stopped) and "***" in str(stopped), str(stopped)
        else:
            raise AssertionError("a wrong key was accepted")
        await judge.close()
        bomb = gzip.compress(b" " * (1 << 20), 9) * 1000
        right = os.environ["DEEPSEEK_API_KEY"]
        large = b" " * (1 << 23)
        for change, encoding, said in ((bomb, "gzip", "not asked for"), (large, "identity", "larger than 4 MiB")):
            server.conduct = Conduct(
                key=right, change_body=lambda data: change, headers={"Content-Encoding": encoding}
            )
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            judge = RulerJudge(config, Path("."), first_delay_s=0.01)
            try:
                await judge.judge(rated([0.1, 0.7]))
            except JudgeError as owed:
                assert said in str(owed), str(owed)
            else:
                raise AssertionError("a bomb was read")
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000
        server.conduct = Conduct(key=right, usage={"prompt_tokens": 10**30, "completion_tokens": -4, "total_tokens": 1})
        judge = RulerJudge(config, Path("."), first_delay_s=0.01)
        await judge.judge(rated([0.1, 0.7]))
        assert 0 < judge.usage.tokens < 10_000 and 0 < judge.usage.cost_usd < 0.1, judge.usage
        server.conduct = Conduct(key=right, misbehaviour="429", retry_after="86400")
        try:
            await judge.judge(rated([0.3, 0.7]))
        except JudgeStopped as stopped:
            assert "quota is used up until" in str(stopped), str(stopped)
        else:
            raise AssertionError("a day was waited")
        failed = {"error": {"code": 502, "message": "overloaded"}, "message": {"role": "assistant", "content": ""}}
        odd = {"role": "assistant", "content": [{"type": "thinking"}]}
        for choice, said in ((failed, "overloaded"), ({"message": odd}, "")):
            body = json.dumps({"choices": [{**choice, "finish_reason": "stop"}]}).encode()
            server.conduct = Conduct(key=right, change_body=lambda data: body)
            judge = RulerJudge(config.model_copy(update={"retries": 1}), Path("."), first_delay_s=0.01)
            before = len(server.asked)
            try:
                await judge.judge(rated([0.3, 0.6]))
            except JudgeError as owed:
                assert said in str(owed) and not isinstance(owed, JudgeStopped), str(owed)
            else:
                raise AssertionError("an answer without a verdict was read")
            assert len(server.asked) - before == 2
    judge = RulerJudge(config.model_copy(update={"retries": 1}), Path("."), first_delay_s=0.01)
    try:
        await judge.judge(rated([0.3, 0.5]))
    except JudgeStopped as stopped:
        assert "start it" in str(stopped), str(stopped)
    else:
        raise AssertionError("a server that is gone has answered")

asyncio.run(main())
print("done")
"""


@pytest.mark.slow
def test_litellm_reaches_a_provider_waits_out_its_limits_and_keeps_its_key() -> None:
    """Runs in a separate process, because litellm takes seconds to import and must not load before the first call."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DEEPSEEK_API_KEY": "sk-canary-0011223344"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LITELLM)], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("done")
    assert "sk-canary-0011223344" not in done.stdout + done.stderr
