"""Teachers: per-token advantages by hand, from a directory and over HTTP; the judge's words as a teacher."""

import asyncio
import gc
import math
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from art_cli.config.compose import load_config
from art_cli.config.schema import DistillConfig, LoraConfig, TeacherConfig
from art_cli.learners.algorithms.distillation import Distill, teacher_advantages
from art_cli.learners.algorithms.sdpo import Feedback, Sdpo, SdpoConfig
from art_cli.learners.teachers import teacher_server as server_module
from art_cli.loop.references import check_ready
from art_cli.loop.train import train
from art_cli.models.adapters import with_adapter
from art_cli.models.saved_weights import save_merged
from art_cli.models.weights import Weights
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import Score, ScoredTrajectory, Turn
from art_cli.runtime.errors import ConfigError, LearnerError, RunError, UsageError
from tests.support.models.gradients import Caught, distance, learner, leaves, two_answers
from tests.support.models.tiny import tiny_weights
from tests.support.paths import LETTERS
from tests.support.records.trees import logprobs_of, sampled, scored, turn
from tests.support.servers.backend_server import serving, tiny_base
from tests.support.servers.teacher_server import TeacherServer, teaching

BIG = {"layers": 3, "hidden": 48}  # the shape of the teacher, which is another than the student's


@pytest.fixture(scope="module")
def teacher() -> Weights:
    return tiny_weights(seed=7, lora_rank=None, **BIG)


@pytest.fixture(scope="module")
def directory(teacher: Weights, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("teacher")
    save_merged(teacher, path, "float32")
    return path


def distill(model: object, **knobs: Any) -> DistillConfig:
    server = {name: knobs.pop(name) for name in list(knobs) if name in TeacherConfig.model_fields}
    return DistillConfig(name="distill", teacher=TeacherConfig(model=str(model), **server), **knobs)


def two_turns(weights: Weights) -> list[ScoredTrajectory]:
    """Two attempts of two turns, the second's last turn at another temperature and on a branch."""
    first = [turn([1, 2, 3], [20, 21]), turn([5], [22, 23, 24], parent=0, kept=5)]
    second = [turn([1, 2, 3], [30]), turn([6, 7], [31, 32], parent=0, kept=2, temperature=0.7)]
    rewards = (1.0, 0.0)
    return [
        scored(sampled(weights, turns), reward, index=index)
        for index, (turns, reward) in enumerate(zip((first, second), rewards, strict=True))
    ]


# --- on-policy distillation -------------------------------------------------------------------------------------------


def expected_gradient(
    student: Weights,
    teacher: Weights,
    group: list[ScoredTrajectory],
    *,
    reward_weight: float,
    divergence: str = "reverse_kl",
) -> dict[str, torch.Tensor]:
    """-mean of A log p, one sequence at a time: A = w * (+-1 / sqrt 2) + f(log t - log s).

    f(r) is r, or log((1 + exp r) / 2) for the Jensen-Shannon divergence.
    """
    sequences = [(trajectory.reward, *leaf) for trajectory in group for leaf in leaves(trajectory.turns)]
    num_tokens = sum(len(places) for _, _, places in sequences)
    student.model.zero_grad()
    for reward, ids, places in sequences:
        ours, theirs = chosen(student, ids, places), chosen(teacher, ids, places).detach()
        ratio = theirs - ours.detach()
        said = ratio if divergence == "reverse_kl" else ((1 + ratio.exp()) / 2).log()
        advantage = said + reward_weight * (1 if reward else -1) / math.sqrt(2)
        (-(advantage * ours).sum() / num_tokens).backward()
    gradient = {n: p.grad.clone() for n, p in student.model.named_parameters() if p.grad is not None}
    student.model.zero_grad()
    return gradient


def chosen(weights: Weights, ids: list[int], places: list[tuple[int, Turn, int]]) -> torch.Tensor:
    rows = {each.temperature: logprobs_of(weights, ids, each.temperature) for _, each, _ in places}
    return torch.stack([rows[each.temperature][place - 1] for place, each, _ in places])


@pytest.mark.slow
@pytest.mark.parametrize("shape", [{"micro_batch_tokens": 1}, {"packing": "rows"}, {"packing": "tree"}], ids=str)
@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"reward_weight": 0.5},
        {"divergence": "jensen_shannon"},
    ],
    ids=str,
)
def test_gradient_is_that_of_the_log_ratio_of_each_token_in_every_packing(
    knobs: dict[str, Any], shape: dict[str, object], teacher: Weights, directory: Path
) -> None:
    """Contract 1, with a tree of turns and two temperatures."""
    student = tiny_weights()
    group = two_turns(student)
    caught = Caught(learner(student, distill(directory, **knobs), max_grad_norm=1e9, **shape))
    caught.learner.step([group])
    given = {"reward_weight": 0.0} | knobs
    expected = expected_gradient(student, teacher, group, **given)
    assert distance(caught.gradient, expected) < 1e-5


def test_a_step_reports_the_distance_to_the_teacher_and_comes_nearer(teacher: Weights, directory: Path) -> None:
    """Equal rewards, which GRPO would learn nothing from. The metric is the mean of log student - log teacher."""
    student = tiny_weights()
    group = two_answers(student, good=0.0, bad=0.0)
    with torch.no_grad():
        gaps = [
            logprobs_of(student, [1, 2, 3, *each.turns[0].sampled_ids])[2:]
            - logprobs_of(teacher, [1, 2, 3, *each.turns[0].sampled_ids])[2:]
            for each in group
        ]
    trained = learner(student, distill(directory), learning_rate=1e-2)
    metrics = trained.step([group])
    assert metrics.teacher_kl == pytest.approx(float(torch.cat(gaps).mean()), abs=1e-5)
    assert (metrics.taught_share, metrics.no_signal_share, metrics.num_updates) == (1.0, 0.0, 1)
    for trajectory in group:
        trajectory.turns = sampled(student, trajectory.turns)
    assert abs(trained.step([group]).teacher_kl) < abs(metrics.teacher_kl)


def test_a_teacher_that_agrees_changes_nothing(tmp_path: Path) -> None:
    """Contract 4: the log ratios are exactly zero where the student's logprobs are read by the policy itself."""
    student = tiny_weights(lora_rank=None)
    save_merged(student, tmp_path, "float32")
    group = [scored([turn([1, 2, 3], [20, 21], top_k=2)], 0.0)]
    metrics = learner(student, distill(tmp_path)).step([group])
    assert (metrics.num_updates, metrics.teacher_kl) == (0, 0.0)


def test_tokens_of_a_cut_distribution_are_compared_by_the_policys_own_logprobs(
    teacher: Weights, directory: Path
) -> None:
    student = tiny_weights()
    group = two_turns(student)
    cut = [
        scored([turn(t.prompt_ids, t.sampled_ids, parent=t.parent, kept=t.kept, top_k=5) for t in each.turns[:1]], 0.0)
        for each in group[:1]
    ]
    caught = Caught(learner(student, distill(directory), max_grad_norm=1e9))
    caught.learner.step([cut])
    expected = expected_gradient(student, teacher, cut, reward_weight=0)
    assert distance(caught.gradient, expected) < 1e-5


def test_the_advantages_lower_the_divergence_that_they_are_named_after() -> None:
    """The mean of A over the student's own tokens, times the gradient of log p, is minus the divergence's gradient."""
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(7, generator=generator, dtype=torch.float64)).requires_grad_()
    q = torch.softmax(3 * torch.randn(7, generator=generator, dtype=torch.float64), 0)
    p = torch.softmax(logits, 0)
    middle = (p + q) / 2
    divergences = {
        "reverse_kl": (p * (p / q).log()).sum(),
        "jensen_shannon": (p * (p / middle).log()).sum() + (q * (q / middle).log()).sum(),
    }
    for name, divergence in divergences.items():
        (wanted,) = torch.autograd.grad(divergence, logits, retain_graph=True)
        ratios = (q / p).log().detach().numpy()
        found = torch.from_numpy(teacher_advantages(ratios, name))  # type: ignore[arg-type]
        (given,) = torch.autograd.grad((p.detach() * found * p.log()).sum(), logits, retain_graph=True)
        assert torch.allclose(given, -wanted, rtol=0, atol=1e-12), name
    far = teacher_advantages(np.array([-5.0, 0.0, 2.0, -1e4, 1e4]), "jensen_shannon")
    assert far == pytest.approx([-0.6864, 0.0, 1.4338, -0.6931, 1e4 - 0.6931], abs=1e-4)


# --- a teacher behind a server ----------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "FIRST_DELAY_S", 0.01)


def test_a_server_and_a_directory_give_the_same_step(
    teacher: Weights, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To 1e-5, though the server is busy, drops a connection and wants a key. Equal sequences are asked for once."""
    monkeypatch.setenv("TEACHER_KEY", "sk-teacher-1234")
    student = tiny_weights()
    groups = [two_answers(student, group="a"), two_answers(student, group="b")]
    here = Caught(learner(student, distill(directory), max_grad_norm=1e9))
    first = here.learner.step(groups)
    with teaching(TeacherServer(teacher, key="sk-teacher-1234", faults=[503, 0, 429])) as server:
        loss = distill("big", base_url=server.url, api_key_env="TEACHER_KEY")
        there = Caught(learner(student, loss, max_grad_norm=1e9))
        second = there.learner.step(groups)
    assert distance(there.gradient, here.gradient) < 1e-5
    assert second.teacher_kl == pytest.approx(first.teacher_kl, abs=1e-5)
    assert sorted(server.asked) == [[1, 2, 3, 20, 21, 22], [1, 2, 3, 20, 31, 32]]


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ({"faults": [400]}, r"answered 400: the key \*\*\* is tired \(1 tries\)"),
        ({"faults": [500] * 6}, r"answered 500: .* \(3 tries\)"),
        ({"spoil": lambda given: None}, "no prompt_logprobs in its answer; it must be a vLLM server"),
        ({"spoil": lambda given: given[:-1]}, "has no logprob for some of 6 tokens"),
        ({"spoil": lambda given: [{"9": {"logprob": 0.0}}] * 6}, "has no logprob for some of 6 tokens"),
        ({"spoil": lambda given: "x"}, "not an answer from vLLM"),
    ],
    ids=["refused", "failing", "no logprobs", "too few", "other tokens", "no list"],
)
def test_a_server_that_cannot_be_used_ends_the_step_and_keeps_the_key_secret(
    server: dict[str, Any], message: str, teacher: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEACHER_KEY", "sk-teacher-1234")
    student = tiny_weights()
    with teaching(TeacherServer(teacher, key="sk-teacher-1234", can_tokenize=False, **server)) as there:
        loss = distill("big", base_url=there.url, api_key_env="TEACHER_KEY", retries=2)
        trained = learner(student, loss)
        before = {name: parameter.detach().clone() for name, parameter in trained.parameters.items()}
        with pytest.raises(LearnerError, match=f"loss.teacher 'big' at http.*{message}") as raised:
            trained.step([two_answers(student)])
    assert "sk-teacher" not in str(raised.value)
    assert all(torch.equal(parameter, before[name]) for name, parameter in trained.parameters.items())


def test_a_server_cannot_teach_what_was_sampled_at_another_temperature(teacher: Weights) -> None:
    student = tiny_weights()
    with teaching(TeacherServer(teacher)) as server:
        trained = learner(student, distill("big", base_url=server.url))
        with pytest.raises(LearnerError, match=r"trajectory g/1, turn 1: sampled at another temperature than 1"):
            trained.step([two_turns(student)])


def test_a_key_that_is_not_set_and_a_server_that_is_not_there_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEACHER_KEY", raising=False)
    with pytest.raises(UsageError, match=r"loss.teacher.api_key_env: the environment variable TEACHER_KEY is not set"):
        learner(tiny_weights(), distill("big", base_url="http://127.0.0.1:9/v1", api_key_env="TEACHER_KEY"))
    with pytest.raises(LearnerError, match=r"'big' at http://127.0.0.1:9/v1: cannot be reached: .* \(1 tries\)"):
        learner(tiny_weights(), distill("big", base_url="http://127.0.0.1:9/v1", retries=0))


# --- the same vocabulary ----------------------------------------------------------------------------------------------


def test_a_teacher_with_another_vocabulary_is_refused(teacher: Weights, tmp_path: Path) -> None:
    other = tiny_weights(seed=7, lora_rank=None)
    other.tokenizer.add_tokens(["<move>"])
    save_merged(other, tmp_path, "float32")
    with pytest.raises(
        UsageError, match=r"its vocabulary is not the policy's \(266 and 265 tokens; token 265 is '<move>' and none\)"
    ):
        learner(tiny_weights(), distill(tmp_path))
    other.tokenizer.add_tokens(["Straße"])
    with (
        teaching(TeacherServer(other)) as server,
        pytest.raises(UsageError, match=r"its tokenizer is not the policy's \(.*; token \d+ of a probe text is 266"),
    ):
        learner(tiny_weights(), distill("big", base_url=server.url))


def test_a_teacher_with_a_shorter_context_is_told(directory: Path) -> None:
    student = tiny_weights()
    long = scored([turn(list(range(200)) * 6, [3])], 0.0)
    with pytest.raises(LearnerError, match="trajectory g/0 has 1201 tokens, and the teacher's context holds 1024"):
        learner(student, distill(directory)).step([[long]])


# --- the judge's words ------------------------------------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def explained(
    weights: Weights, reply: str, reward: float, explanation: str | None, *, index: int = 0
) -> ScoredTrajectory:
    """An attempt of two turns at one task, with the judge's explanation."""
    tokenizer = weights.tokenizer
    asked = [{"role": "system", "content": "play"}, {"role": "user", "content": "one of a b c?"}]
    said = {"role": "assistant", "content": reply}
    again = {"role": "user", "content": "and?"}
    first = render(weights, asked)
    reply_ids = [*tokenizer.encode(reply), tokenizer.eos_token_id]
    more = render(weights, [*asked, said, again])[len(first) + len(reply_ids) :]
    turns = [turn(first, reply_ids), turn(more, reply_ids, parent=0, kept=len(first) + len(reply_ids))]
    messages = [*asked, said, again, said]
    made = scored(sampled(weights, turns), reward, index=index, messages=messages, tools=[TOOL])
    return msgspec.structs.replace(made, scores=[Score(judge="ruler", score=reward, explanation=explanation)])


def render(weights: Weights, messages: list[dict[str, str]]) -> list[int]:
    text = weights.tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False, add_generation_prompt=True)
    ids: list[int] = weights.tokenizer.encode(text)
    return ids


def whole(trajectory: ScoredTrajectory) -> list[int]:
    return [token for each in trajectory.turns for token in [*each.prompt_ids, *each.sampled_ids]]


def test_the_words_stand_in_the_first_user_message_and_nothing_else_moves() -> None:
    """The tokens are those of the whole conversation rendered with the words; every reply keeps its ids."""
    weights = tiny_weights()
    good, bad = explained(weights, "a", 1.0, "took a"), explained(weights, "zz", 0.25, "not {score}\nof them", index=1)
    feedback = Feedback(weights.tokenizer, " [{score}, {rank} of {attempts}: {explanation}]")
    from art_cli.learners.algorithms.distillation import sampled_tokens

    samples = sampled_tokens(bad)
    [told] = feedback.insert(bad, samples, [good, bad]) or []
    edited = [dict(message) for message in bad.messages]
    edited[1]["content"] += " [0.25, 2 of 2: not {score}\nof them]"
    expected = render(weights, edited[:-1]) + bad.turns[1].sampled_ids
    assert told.token_ids.tolist() == expected
    assert told.token_ids[told.targets].tolist() == samples[0].token_ids[samples[0].targets].tolist()
    assert feedback.insert(msgspec.structs.replace(bad, messages=[]), samples, [good, bad]) is None


def sdpo(**knobs: Any) -> SdpoConfig:
    return SdpoConfig(name="sdpo", feedback=" [{explanation}]", **knobs)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [{"micro_batch_tokens": 1}, {"packing": "rows"}, {"packing": "tree"}], ids=str)
def test_the_policy_with_the_words_teaches_the_policy_without_them(shape: dict[str, object]) -> None:
    """-mean of (log p(y | x, words) - log p(y | x)) log p(y | x), which is TRL's sampled-token SDPO."""
    weights = tiny_weights()
    group = [explained(weights, "a", 1.0, "took a"), explained(weights, "zz", 0.0, "none of them", index=1)]
    caught = Caught(learner(weights, sdpo(), max_grad_norm=1e9, **shape))
    metrics = caught.learner.step([group])
    weights.model.zero_grad()
    num_tokens = sum(len(each.sampled_ids) for trajectory in group for each in trajectory.turns)
    for trajectory in group:
        edited = [dict(message) for message in trajectory.messages]
        edited[1]["content"] += f" [{trajectory.scores[0].explanation}]"
        ids = whole(trajectory)
        told = render(weights, edited[:-1]) + trajectory.turns[1].sampled_ids
        [(_, places)] = leaves(trajectory.turns)
        at = torch.tensor([place for place, _, _ in places])
        ours = logprobs_of(weights, ids)[at - 1]
        theirs = logprobs_of(weights, told)[at - 1 + len(told) - len(ids)]
        (-((theirs - ours).detach() * ours).sum() / num_tokens).backward()
    expected = {n: p.grad.clone() for n, p in weights.model.named_parameters() if p.grad is not None}
    weights.model.zero_grad()
    assert distance(caught.gradient, expected) < 1e-5
    assert metrics.taught_share == 1.0


def test_an_attempt_without_an_explanation_is_left_out_or_learns_from_its_reward_alone() -> None:
    weights = tiny_weights()
    group = [explained(weights, "a", 1.0, "took a"), explained(weights, "zz", 0.0, None, index=1)]
    alone = learner(weights, sdpo()).step([group])
    assert (alone.taught_share, alone.num_samples) == (0.5, 1)
    mixed = learner(tiny_weights(), sdpo(reward_weight=1.0)).step([group])
    assert (mixed.taught_share, mixed.num_samples) == (0.5, 2)
    silent = [explained(weights, "a", 1.0, None), explained(weights, "zz", 0.0, None, index=1)]
    assert learner(tiny_weights(), sdpo()).step([silent]).num_updates == 0


def test_the_teacher_is_the_average_of_the_policy_over_its_steps() -> None:
    """After two steps at rate r it is (1 - r) ((1 - r) w0 + r w1) + r w2. The policy's weights do not move by it."""
    weights, rate = tiny_weights(), 0.25
    group = [explained(weights, "a", 1.0, "took a"), explained(weights, "zz", 0.0, "none of them", index=1)]
    made = learner(weights, sdpo(teacher_rate=rate))
    path = [{name: p.detach().clone() for name, p in made.parameters.items()}]
    for _ in range(2):
        made.step([group])
        path.append({name: p.detach().clone() for name, p in made.parameters.items()})
    average = {
        name: (1 - rate) * ((1 - rate) * p + rate * path[1][name]) + rate * path[2][name] for name, p in path[0].items()
    }
    assert isinstance(made.algorithm, Sdpo)
    with made.algorithm.teacher.installed():
        assert any(not torch.equal(p, path[2][name]) for name, p in made.parameters.items())
        for name, parameter in made.parameters.items():
            assert torch.allclose(parameter, average[name], rtol=0, atol=1e-7), name
    for name, parameter in made.parameters.items():
        assert torch.equal(parameter, path[2][name]), name


def test_a_lesson_compares_the_average_with_words_to_the_policy_without() -> None:
    """With a rate of nearly 0 the teacher of the second step is the policy before the first."""
    first = tiny_weights()
    group = [explained(first, "a", 1.0, "took a"), explained(first, "zz", 0.0, "none of them", index=1)]
    made = learner(tiny_weights(), sdpo(teacher_rate=1e-9), learning_rate=1e-2)
    made.step([group])
    assert isinstance(made.algorithm, Sdpo)
    now = made.weights
    group = [explained(now, "a", 1.0, "took a"), explained(now, "zz", 0.0, "none of them", index=1)]
    lessons = made.algorithm.lessons([group])
    for trajectory in group:
        edited = [dict(message) for message in trajectory.messages]
        edited[1]["content"] += f" [{trajectory.scores[0].explanation}]"
        ids = whole(trajectory)
        told = render(first, edited[:-1]) + trajectory.turns[1].sampled_ids
        [(_, places)] = leaves(trajectory.turns)
        at = torch.tensor([place for place, _, _ in places])
        expected = logprobs_of(first, told)[at - 1 + len(told) - len(ids)] - logprobs_of(now, ids)[at - 1]
        found = lessons[trajectory.id]
        assert np.allclose(found.log_ratios, expected.detach().numpy(), rtol=0, atol=1e-5)
        assert np.array_equal(found.advantages[~np.isnan(found.advantages)], found.log_ratios)


# --- a server of the Tinker protocol ----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # sockets that the SDK leaves open
def test_a_server_of_the_tinker_protocol_teaches_as_a_directory_does(tmp_path: Path) -> None:
    base = tiny_base(tmp_path / "base")
    weights = with_adapter(base.weights, LoraConfig(rank=4), 0)
    with torch.no_grad():
        for name, parameter in weights.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    group = two_turns(weights)[:1]
    save_merged(base.weights, tmp_path / "same", "float32")
    near = learner(weights, distill(tmp_path / "same")).algorithm
    with serving(base, tmp_path / "server") as address:
        far = learner(weights, distill("tiny", base_url=address, protocol="tinker", concurrency=2)).algorithm
        assert isinstance(near, Distill) and isinstance(far, Distill)
        [expected], [found] = near.lessons([group]).values(), far.lessons([group]).values()
        with pytest.raises(LearnerError, match="temperature than 1"):
            far.lessons([two_turns(weights)])
        with pytest.raises(LearnerError, match="has no base model 'other'; it has: 'tiny'"):
            learner(weights, distill("other", base_url=address, protocol="tinker"))
    assert np.nanmax(np.abs(expected.advantages)) > 0.01
    assert np.allclose(found.advantages, expected.advantages, rtol=0, atol=1e-5, equal_nan=True)
    gc.collect()


# --- a run ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path: Path, directory: Path) -> Path:
    """tests/letters, whose rollouts return no reward here."""
    project = tmp_path / "project"
    shutil.copytree(LETTERS, project)
    source = (project / "rollout.py").read_text()
    (project / "rollout.py").write_text(source.replace("reward=letters / max(len(said), 1), ", ""))
    shutil.copytree(directory, project / "big")
    with (project / "config.yaml").open("a") as file:
        file.write("loss: {name: distill, teacher: {model: big}}\n")
    return project


def run(project: Path, name: str, *overrides: str) -> RunDir:
    loaded = load_config(project / "config.yaml", [f"name={name}", "eval=null", *overrides])
    return RunDir(asyncio.run(train(loaded)).root)


@pytest.mark.slow
def test_a_run_without_rewards_or_judge_distils_and_goes_on_where_it_was(project: Path) -> None:
    run(project, "a", "train.steps=1")
    lines = [line.metrics for line in run(project, "a", "train.steps=2").metrics()]
    assert [line["taught_share"] for line in lines] == [1.0, 1.0]
    assert [line["no_signal_share"] for line in lines] == [0.0, 0.0]
    assert lines[1]["teacher_kl"] < lines[0]["teacher_kl"]
    with pytest.raises(RunError, match=r"loss\.teacher\.model: \"big\" -> \"other\""):
        shutil.copytree(project / "big", project / "other")
        run(project, "a", "train.steps=3", "loss.teacher.model=other")


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["distill", "sdpo"])
def test_saved_and_loaded_the_next_step_is_bit_identical(loss: str, directory: Path, tmp_path: Path) -> None:
    """Contract 6: a teacher is the same model, or an average that the checkpoint holds."""
    weights, other = tiny_weights(), tiny_weights()
    config = distill(directory) if loss == "distill" else sdpo(reward_weight=0.5)
    group = [explained(weights, "a", 1.0, "took a"), explained(weights, "zz", 0.0, "none of them", index=1)]
    first, second = learner(weights, config), learner(other, config)
    first.step([group])
    first.save(tmp_path)
    first.step([group])
    second.load(tmp_path)
    second.step([group])
    for name, parameter in first.parameters.items():
        assert torch.equal(parameter, second.parameters[name]), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        (["judge=none", "loss=grpo"], "judge", "'none' gives no rewards, which this loss learns from"),
        (["loss=sdpo"], "loss", "judge 'rollout' gives no reasons; choose judge=ruler"),
        (["loss=sdpo", "judge=ruler", "loss.feedback=x"], "loss.feedback", r"has no \{explanation\}"),
        (["rollout.refill=0.5"], "rollout.refill", "goes by rewards, and this loss learns from none"),
        (["loss.scale_advantages=false"], "loss.scale_advantages", "with loss.reward_weight above 0 only"),
        (["loss.teacher.retries=2"], "loss.teacher.retries", "used with loss.teacher.base_url only"),
        (
            ["loss.teacher.base_url=http://127.0.0.1:1", "loss.teacher.protocol=tinker", "loss.teacher.retries=2"],
            "loss.teacher.retries",
            "used with protocol=vllm only",
        ),
        (
            ["loss.teacher.base_url=http://127.0.0.1:1/v1", "rollout.sampling.temperature=0.5"],
            "rollout.sampling.temperature",
            "gives logprobs at temperature 1 only",
        ),
    ],
    ids=str,
)
def test_settings_that_contradict_each_other_are_told_at_load(
    project: Path, overrides: list[str], key: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"{key}: .*{message}"):
        load_config(project / "config.yaml", overrides)


def test_a_teacher_that_is_not_there_is_told_before_the_run(project: Path) -> None:
    for override, message in (
        ("loss.teacher.model=./bog", r"loss.teacher.model: './bog': no such directory"),
        ("loss.teacher.base_url=nowhere", "loss.teacher.base_url: 'nowhere' is not an address"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_ready(load_config(project / "config.yaml", [override]), ("algorithm",))


def test_one_attempt_of_each_scenario_is_enough_without_rewards(project: Path) -> None:
    loaded = load_config(project / "config.yaml", ["rollout.group_size=1"])
    check_ready(loaded, ("algorithm",), is_training=True)
    assert loaded.config.judge.name == "none"
