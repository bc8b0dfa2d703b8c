"""`art check`: when a finding is printed, what an interrupt leaves, and which row the trial update takes."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from art_cli.cli.preflight.model_checks import check_tokens, open_model
from art_cli.cli.preflight.opened import Opened, SourcePart
from art_cli.cli.preflight.rollout_checks import _sampling_note
from art_cli.config.compose import load_config
from art_cli.learners.processes.workers import ParallelLearner
from art_cli.loop import trial_update
from art_cli.loop.trial_update import Cost, estimate, second_length
from art_cli.models.policy_spec import PolicySpec
from art_cli.models.weights import Size
from art_cli.reports.pages.conversation_text import last_reply
from art_cli.runs.intervals import share_interval
from art_cli.runs.trajectory import Trajectory, Turn
from tests.support.models.tiny import tiny_tokenizer, tiny_weights
from tests.support.paths import LETTERS

Art = Callable[..., tuple[int, str, str]]
CONFIG = LETTERS / "config.yaml"
CHEAP = ["config", "auto", "scenarios", "entries"]  # findings that need no model


def names(out: str) -> list[str]:
    return [line.split()[1] for line in out.splitlines() if line.startswith(("ok ", "! "))]


def interrupt(opened: Opened) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_check_keeps_the_findings_that_were_made(art: Art, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("art_cli.cli.preflight.model_checks.open_model", interrupt)
    code, out, err = art("check", CONFIG)
    assert (code, names(out), err.splitlines()[-1]) == (130, CHEAP, "interrupted")
    code, out, _ = art("check", CONFIG, "--json")
    assert (code, [finding["name"] for finding in json.loads(out)]) == (130, CHEAP)


def test_a_finding_is_printed_before_the_next_check_begins(
    art: Art, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = []

    def look(opened: Opened) -> None:
        printed.append(capsys.readouterr().out)
        raise KeyboardInterrupt

    monkeypatch.setattr("art_cli.cli.preflight.model_checks.open_model", look)
    art("check", CONFIG)
    assert names(printed[0]) == CHEAP


def test_the_base_and_its_size_are_shown_without_the_adapter() -> None:
    """SmolLM2-135M has 134.5M parameters; its adapter comes on top."""
    assert str(Size(139_399_488, 4_884_480)) == "134.5M parameters, an adapter with 4.88M"
    assert str(Size(134_515_008, 134_515_008)) == "134.5M parameters, all trained"
    assert load_config(CONFIG, ["model.base=builtin:smollm2-135m"]).config.model.title == "builtin:smollm2-135m"


@pytest.mark.slow
def test_the_trial_update_is_as_long_as_the_attempts_were_and_not_as_the_context_is(art: Art) -> None:
    """The letters' context is far longer than their conversations; the longest allowed row is estimated."""
    code, out, err = art("check", CONFIG, "--json", "rollout.max_turns=500")
    findings = {finding["name"]: finding for finding in json.loads(out)}
    assert code == 0, out
    found = re.match(
        r"a row of (\d+) tokens forward and backward in [\d.]+ s; the longest row that the limits allow has ([\d,]+) "
        r"tokens and would take about \d+ s",
        findings["update"]["message"],
    )
    assert found, findings["update"]
    tried, longest = int(found[1]), int(found[2].replace(",", ""))
    context = int(re.search(r"(\d+) tokens of context", findings["model"]["message"])[1])  # type: ignore[index]
    sampled = int(re.search(r"(\d+) sampled tokens", findings["rollout"]["message"])[1])  # type: ignore[index]
    assert sampled < tried < sampled + 80 and longest == context > tried
    begun = [line.partition(":")[0] for line in err.splitlines()]
    assert [name for name in begun if name in ("rollout", "tokens", "update")] == [
        *("rollout", "tokens", "update", "update")
    ]
    assert sum(name.startswith("loading ") for name in begun) == 1


@pytest.mark.parametrize("knee", [500.0, 4000.0, float("inf")])
def test_an_estimate_from_two_rows_is_exact_where_the_cost_has_that_form(knee: float) -> None:
    """seconds = 0.3 + 2e-3 L (1 + L / knee), gigabytes = 1.2 + 1e-3 L, measured at 61 and 256 tokens."""

    def cost(length: int) -> Cost:
        return Cost(length, 0.3 + 2e-3 * length * (1 + length / knee), 1.2 + 1e-3 * length)

    assert second_length(61, 8192) == 256 and second_length(400, 8192) == 800 and second_length(61, 100) == 100
    found, expected = estimate(cost(61), cost(256), 8192, knee=knee), cost(8192)
    assert found == pytest.approx(expected)


def test_an_estimate_is_never_below_what_was_measured() -> None:
    found = estimate(Cost(60, 2.0, 1.5), Cost(256, 1.0, 1.4), 8192, knee=4000.0)
    assert (found.seconds, found.gigabytes) == (1.0, 1.4)
    assert estimate(Cost(60, 1.0, None), Cost(256, 2.0, None), 8192, knee=4000.0).gigabytes is None


def played(num_attempts: int, ids: list[int], logprob: float, **knobs: Any) -> list[Trajectory]:
    """Equal attempts of one turn, in which each token had that logprob under the model."""
    values = {"logprobs": [logprob] * len(ids), "raw_logprobs": [logprob] * len(ids), "temperature": 1.0} | knobs
    turn = Turn(parent=None, kept=0, prompt_ids=[1], sampled_ids=ids, step=0, **values)
    return [
        Trajectory(id=str(i), group_id="g", group_size=num_attempts, index=i, turns=[turn]) for i in range(num_attempts)
    ]


@pytest.mark.parametrize(
    ("logprob", "knobs", "cause"),
    [
        (-0.001, {}, "too sure"),  # probability 0.99 of the 10 tokens
        (-2.0, {}, "`seed`"),  # 2e-9
        (-0.3, {}, ""),  # 0.05: chance
        (-2.0, {"temperature": 0.0}, "temperature 0"),
        (-0.001, {"temperature": 0.0}, "temperature 0"),
        (-2.0, {"top_k": 1, "logprobs": [0.0] * 10}, "top_k"),
    ],
)
def test_equal_attempts_are_blamed_on_their_cause(logprob: float, knobs: dict[str, Any], cause: str) -> None:
    causes = ("too sure", "`seed`", "temperature 0", "top_k")
    note = _sampling_note(played(2, list(range(10)), logprob, **knobs))
    assert [each for each in causes if each in note] == ([cause] if cause else []), note
    assert _sampling_note(played(1, [1], 0.0)) == ""


@pytest.mark.parametrize(("device", "most_tokens", "most_gb", "lengths", "forecast"), [
    ("cpu", 0, 4.0, [100, 256], 1.2),  # both rows on the flat part: check takes no others
    ("cpu", 2000, 1.3, [100, 256, 512, 1024], 3.66),  # a line through 1.2 and 2.05
    ("cpu", 1024, 4.0, [100, 256, 512, 1024], 3.66),
    ("cpu", 2000, 4.0, [100, 256, 512, 1024, 2000], 4.0),  # all of it is measured
    ("cuda", 0, 4.0, [2000], 4.0),  # a row of two chunks of logits is the first, or the longest if it is shorter
])  # fmt: skip
def test_rows_are_tried_up_to_the_longest_that_is_expected_to_fit(
    monkeypatch: pytest.MonkeyPatch, device: str, most_tokens: int, most_gb: float, lengths: list[int], forecast: float
) -> None:
    """A peak of 1.2 GB from another part of the step, up to a length; from there on 2 GB for 1,000 tokens."""
    tried = list[int]()

    def measure(learner: object, weights: object, num_tokens: int, parts: object) -> Cost:
        tried.append(num_tokens)
        return Cost(num_tokens, 0.01 * num_tokens, max(1.2, 0.002 * num_tokens))

    monkeypatch.setattr(trial_update, "measure", measure)
    monkeypatch.setattr(trial_update, "knee_of", lambda weights: 4096.0)
    learner: Any = None
    weights: Any = SimpleNamespace(device=SimpleNamespace(type=device))
    found = trial_update.forecast(learner, weights, 100, 2000, most_tokens=most_tokens, most_gb=most_gb)
    assert tried == lengths and found.tokens == 2000
    assert found.gigabytes == pytest.approx(forecast, rel=0.01)


class Apart:
    """A learner with these logprobs."""

    def __init__(self, scores: list[float]) -> None:
        self.scores = scores

    def score(self, token_ids: Sequence[int], temperature: float) -> list[float]:
        return self.scores


@pytest.mark.parametrize(("num_apart", "passes"), [(1, True), (60, False)])
def test_the_engines_tokens_are_held_to_the_mean_that_training_is(tmp_path: Path, num_apart: int, passes: bool) -> None:
    """`train.max_logprob_gap` (0.1) is the largest mean; tokens are 0.2 nats apart, one of a hundred as in bfloat16."""
    loaded = load_config(LETTERS / "config.yaml")
    sampled = Turn(parent=None, kept=0, prompt_ids=[1], sampled_ids=[2] * 100, logprobs=[-1.0] * 100,
                   raw_logprobs=[-1.0] * 100, step=0, temperature=1.0, finish_reason="stop")  # fmt: skip
    learner: Any = Apart([-1.2] * num_apart + [-1.0] * (100 - num_apart))
    opened = Opened(loaded, tmp_path, policy=tiny_weights(), tokenizer=tiny_tokenizer(), learner=learner)
    played = [Trajectory(id="t", group_id="g", group_size=1, index=0, turns=[sampled])]
    found = check_tokens(opened, SourcePart("", loaded, played=played))
    assert found.is_good == passes and "2.0e-01 at most" in found.message


def test_the_weights_are_not_loaded_here_if_other_processes_hold_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several GPUs may hold a model that one GPU, where this process would put it, cannot."""

    def load_policy(*given: Any) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr("art_cli.loop.open_run.load_policy", load_policy)
    loaded = load_config(LETTERS / "config.yaml", ["engine=vllm", "learner=torch", "learner.processes=2"])
    opened, found = open_model(Opened(loaded, tmp_path))
    assert found.is_good and "tokens of context, on cpu in 2 processes of its own" in found.message
    assert opened.weights is None and opened.tokenizer.chat_template
    assert isinstance(opened.policy, PolicySpec) and opened.policy.learner_gpus == 2
    assert isinstance(opened.learner, ParallelLearner)
    opened.learner.close()


ZERO = """
async def rollout(policy, scenario):
    messages = [{"role": "user", "content": f"{scenario['ask']} <b>now</b>"}]
    await policy.client.chat.completions.create(model=policy.model, messages=messages)
    return 0.0
"""


@pytest.mark.slow
def test_a_reward_of_0_is_shown_with_what_the_model_said_and_what_to_do(art: Art, tmp_path: Path) -> None:
    """Two failures bound the base's success by 66 % (Wilson); --show prints whole conversations, the question too."""
    (tmp_path / "zero.py").write_text(ZERO)
    code, out, _ = art("check", CONFIG, f"rollout.entry={tmp_path}/zero.py:rollout", "--show")
    lines = out.splitlines()
    [(line, cure)] = [pair for pair in zip(lines, lines[1:], strict=False) if pair[0].startswith("!    rollout")]
    assert code == 0 and re.search(r'reward 0; the last reply is ".*"; 0 of 2 attempts got more than 0', line)
    assert "(95 % interval 0% to 66%)" in line and "docs/scenarios.md" in cure and "--show" in cure
    whole = out.split("\n\n")
    assert [part.splitlines()[0] for part in whole[1:]] == ["letters-1: reward 0"] * 2
    assert all("say 1 letters <b>now</b>" in part and "\n  assistant " in part for part in whole[1:])
    assert art("check", CONFIG, "--show", "--json")[0] == 2


def test_a_last_reply_is_cut_at_80_characters_and_has_no_control_characters() -> None:
    def replied(*said: Any) -> Trajectory:
        messages = [{"role": "assistant", "content": text} for text in said]
        return Trajectory(id="a", index=0, group_id="g", group_size=1, scenario={"id": "s"}, messages=messages)

    assert last_reply(replied("first", "x" * 81)) == "x" * 80 + "..."
    assert last_reply(replied("x" * 80)) == "x" * 80
    assert last_reply(replied("a\n\n b\x1b[2J")).isprintable()
    assert last_reply(replied(None)) == last_reply(replied()) == ""


@pytest.mark.parametrize(
    ("num_won", "num", "low", "high"), [(0, 2, 0.0, 0.658), (1, 10, 0.018, 0.404), (10, 10, 0.722, 1.0)]
)
def test_the_interval_of_a_share_is_that_of_wilson(num_won: int, num: int, low: float, high: float) -> None:
    """As in tables of Wilson's interval (Brown, Cai and DasGupta 2001); a share of 0 has a width."""
    assert share_interval(num_won / num, num) == pytest.approx((low, high), abs=1e-3)
