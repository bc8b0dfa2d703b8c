"""`art reward`: what it reads, the agreement it reaches on planted preferences, and the judge that loads its result."""

import copy
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from art_cli.cli import app
from art_cli.config.schema import RewardModelJudgeConfig, TorchLearnerConfig
from art_cli.config.sections.model_config import ModelConfig
from art_cli.config.sections.reward_config import RewardConfig
from art_cli.judges import make_judge
from art_cli.judges.agreement import pairwise
from art_cli.judges.cascade import FIRST, THEN
from art_cli.judges.files.person_labels import Pair, PersonLabels
from art_cli.judges.reward_model import conversation_ids
from art_cli.learners.reward.preferences import PreferenceGroup, Taught, divide, read_preferences
from art_cli.learners.reward.reward_report import ComparedPair, measure
from art_cli.learners.reward.reward_trainer import RewardTrainer, preference_loss
from art_cli.loop.reward_run import base_settings
from art_cli.runs.durable import write_lines
from art_cli.runs.trajectory import Json, Score, ScoredTrajectory, by_group
from art_cli.runtime.errors import DataError, UsageError
from tests.support.models.tiny import save_tiny_base, tiny_tokenizer, tiny_weights

MODEL = ModelConfig(base="tiny")
ASK: Json = {"role": "user", "content": "a word?"}


def attempt(group: str, index: int, text: str, reward: float | None, size: int = 4, **fields: Any) -> ScoredTrajectory:
    return ScoredTrajectory(
        id=f"{group}-{index}", group_id=group, group_size=size, index=index,
        messages=[ASK, {"role": "assistant", "content": text}], reward=reward, **fields,
    )  # fmt: skip


def planted(num: int, seed: int = 0) -> list[ScoredTrajectory]:
    """Groups of four answers of 4 to 12 letters; the share of the letter a is the reward."""
    draw, rows = random.Random(seed), []
    for group in range(num):
        for index in range(4):
            text = "".join(draw.choices("az", weights=(index + 0.5, 3.5 - index), k=draw.randint(4, 12)))
            rows.append(attempt(f"{seed}-{group}", index, text, text.count("a") / len(text)))
    return rows


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_base(tmp_path_factory.mktemp("base") / "tiny", hidden=32)


def art(*words: object) -> int:
    return app.run([str(word) for word in words])


async def test_it_learns_planted_preferences_and_the_loaded_judge_scores_alike(
    tmp_path: Path, base: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """At least 0.9 of the held-out pairs; on other groups the judge agrees with the teacher as often as was said."""
    write_lines(tmp_path / "scored.jsonl", planted(32))
    write_lines(tmp_path / "now.jsonl", others := planted(8, seed=1))
    words = ["reward", tmp_path / "scored.jsonl", "-o", tmp_path / "own", "--base", base, "reward.epochs=5"]
    more = ["--present", tmp_path / "now.jsonl", "--next", 3, "--gate", "agreement>=0.9", "--gate", "present.low>=0.8"]
    assert art(*words, "reward.learning_rate=1e-2", *more, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["groups"] == {"trained": 26, "agreement": 6, "present": 8} and len(result["next"]) == 3
    assert json.loads((tmp_path / "own" / "reward.json").read_text())["measures"] == result["measures"]
    assert set(result["measures"]["present"]) == {"all", "reward", "shorter half", "longer half"}
    judge = make_judge(RewardModelJudgeConfig(name="reward_model", model="own"), tmp_path)
    verdicts = await judge.judge(others)
    ratios = [
        pairwise([verdicts[each.id].reward for each in group], [each.reward or 0.0 for each in group])
        for group in by_group(others).values()
    ]
    assert sum(each.numerator for each in ratios) / sum(each.denominator for each in ratios) == pytest.approx(
        result["measures"]["present"]["all"]["value"]
    )
    [score] = verdicts[others[0].id].scores
    assert score.model_returned is not None and score.model_returned.startswith("own@")


def test_a_missed_gate_fails_and_no_directory_is_replaced(
    tmp_path: Path, base: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not even an earlier judge, which took a while to train."""
    write_lines(tmp_path / "scored.jsonl", planted(4))
    words = ["reward", tmp_path / "scored.jsonl", "--base", base, "reward.epochs=1"]
    assert art(*words, "-o", tmp_path / "own", "--gate", "agreement>=1.01") == 1
    assert (tmp_path / "own" / "reward.json").is_file()
    before = (tmp_path / "own" / "reward.json").stat()
    capsys.readouterr()
    assert art(*words, "-o", tmp_path / "own") == art(*words, "-o", tmp_path) == 2
    assert f"{tmp_path}/own: there is something already; name another directory with -o" in capsys.readouterr().err
    assert (tmp_path / "own" / "reward.json").stat() == before
    assert art(*words, "-o", tmp_path / "x", "--gate", "present>=0.9") == 2 and not (tmp_path / "x").exists()


def test_the_gradient_is_the_same_in_one_pack_and_in_many(tmp_path: Path) -> None:
    write_lines(tmp_path / "scored.jsonl", [*planted(2), attempt("one", 0, "az", 0.3, size=1)])
    groups = read_preferences([tmp_path / "scored.jsonl"]).groups
    assert [len(group.values) for group in groups] == [4, 4, 1]
    gradients = []
    for tokens in (16, 100_000):
        weights = tiny_weights(seed=1)
        trainer = RewardTrainer(weights, MODEL, TorchLearnerConfig(micro_batch_tokens=tokens), RewardConfig())
        with torch.no_grad():
            trainer.head.weight.copy_(torch.randn(32, generator=torch.Generator().manual_seed(0)))
        trainer.reader.packing.probe(trainer.samples(groups)[0][0])
        trainer._learn(groups, trainer.samples(groups))
        trained = [p for p in weights.model.parameters() if p.requires_grad]
        gradients.append(torch.cat([p.grad.flatten() for p in [trainer.head.weight, *trained] if p.grad is not None]))
    assert gradients[0].norm() > 1e-3
    assert torch.allclose(*gradients, rtol=1e-4, atol=1e-6)


def test_the_written_model_pads_as_its_tokenizer_does() -> None:
    """Also with token 0. transformers' head reads the last token that is no padding."""
    weights = tiny_weights()
    weights.tokenizer = copy.deepcopy(weights.tokenizer)
    weights.tokenizer.pad_token = weights.tokenizer.convert_ids_to_tokens(0)
    trainer = RewardTrainer(weights, MODEL, TorchLearnerConfig(), RewardConfig())
    assert trainer._classifier.config.pad_token_id == weights.tokenizer.pad_token_id == 0


@pytest.mark.parametrize("template", ["its own", "without calls", "refuses calls", "none"])
def test_the_judge_reads_the_calls_of_an_attempt_whatever_the_template_writes(template: str) -> None:
    """SmolLM2's writes contents only, so two answers that are calls would look alike."""
    tokenizer = tiny_tokenizer()
    written = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
    refusing = (
        "{% for m in messages %}{{ m.content }}{% if m.tool_calls %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
    )
    tokenizer.chat_template = {
        "its own": tokenizer.chat_template, "without calls": written, "refuses calls": refusing, "none": None
    }[template]  # fmt: skip

    def read(city: str) -> str:
        call = {"id": "c", "type": "function", "function": {"name": "answer", "arguments": f'{{"text": "{city}"}}'}}
        talk = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
        text: str = tokenizer.decode(conversation_ids(tokenizer, talk, 10**6, name="m"))
        return text

    assert "answer" in read("Rome") and "Rome" in read("Rome") and "Geneva" in read("Geneva")


def test_the_loss_by_hand() -> None:
    """A pair with a lead of 2: log(1 + e^-2) = 0.1269. A value of 1 at score 0: log 2 = 0.6931. The sum; then with the
    pair's own values, 0 at score 1: 1.3133, and 1 at score 3: 0.0486; the mean of three is 0.6850."""
    pair = PreferenceGroup("g", "s", "", ["a", "b"], [[], []], [Taught(1, 0, "ruler")])
    single = PreferenceGroup("h", "s", "", ["c"], [[]], values={0: 1.0})
    assert float(preference_loss([pair, single], torch.tensor([1.0, 3.0, 0.0]))) == pytest.approx(0.82008, abs=1e-4)
    pair.values = {0: 0.0, 1: 1.0}
    assert float(preference_loss([pair, single], torch.tensor([1.0, 3.0, 0.0]))) == pytest.approx(0.81193, abs=1e-4)


def test_a_persons_label_replaces_the_rewards_order(tmp_path: Path) -> None:
    path = tmp_path / "scored.jsonl"
    write_lines(path, [attempt("g", index, text, float(index), size=3) for index, text in enumerate("abc")])
    labels = PersonLabels(path)
    by_ids = {frozenset(pair[1:]): pair for pair in labels._pairs}
    for (one, other), better in ((("g-0", "g-2"), "g-0"), (("g-1", "g-2"), None)):
        pair = by_ids[frozenset((one, other))]
        labels.answer(pair, "equal" if better is None else "left" if pair.left == better else "right")
    with (tmp_path / "labels.jsonl").open("a") as file:
        file.write('{"group_id":"other","left":"x","right":"y","verdict":"left"}\n')
    found = read_preferences([path, tmp_path / "labels.jsonl"])
    assert sorted(found.groups[0].pairs) == [Taught(0, 2, "labels"), Taught(1, 0, "reward")]
    assert found.counts["unknown_labels"] == 1


def test_a_file_that_is_named_twice_counts_once(tmp_path: Path) -> None:
    """As itself and in its run; the label would replace the order of one of two copies."""
    path = tmp_path / "step_0000" / "scored.jsonl"
    write_lines(path, [attempt("g", index, text, float(index)) for index, text in enumerate("ab")])
    PersonLabels(path).answer(Pair("g", "g-0", "g-1"), "left")
    assert [group.pairs for group in read_preferences([path, tmp_path]).groups] == [[Taught(0, 1, "labels")]]


def test_labels_of_files_with_the_same_ids_are_told_apart(tmp_path: Path) -> None:
    files = [tmp_path / name / "scored.jsonl" for name in ("first", "second")]
    for file, verdict in zip(files, ("right", "left"), strict=True):
        write_lines(file, [attempt("g", index, f"{file.parent.name} {index}", 0.5) for index in range(2)])
        labels = PersonLabels(file)
        labels.answer(Pair("g", "g-0", "g-1"), verdict)  # type: ignore[arg-type]
    found = read_preferences([path for file in files for path in (file, file.with_name("labels.jsonl"))])
    assert [group.pairs for group in found.groups] == [[Taught(1, 0, "labels")], [Taught(0, 1, "labels")]]


def test_a_label_counts_in_every_file_with_its_attempts(tmp_path: Path) -> None:
    """As when `art judge` has scored a file again."""
    files = [tmp_path / name for name in ("scored.jsonl", "again.jsonl")]
    for file in files:
        write_lines(file, [attempt("g", index, text, float(index)) for index, text in enumerate("ab")])
    PersonLabels(files[0]).answer(Pair("g", "g-0", "g-1"), "left")
    found = read_preferences([*files, tmp_path / "labels.jsonl"])
    assert [group.pairs for group in found.groups] == [[Taught(0, 1, "labels")]] * 2


@pytest.mark.parametrize(
    "rows",
    [
        [attempt("g", 0, "a", 1.0), attempt("g", 1, "b", 1.0)],
        [attempt("g", 0, "a", 0.0), attempt("g", 1, "b", math.nan)],
        [attempt("g", 0, "a", 7.0, size=1), attempt("h", 0, "b", None, size=1)],
        [attempt("g", 0, "a", 0.0), attempt("g", 1, "b", 1.0, error="timeout: 3 s")],
    ],
)
def test_data_without_a_preference_are_refused_in_one_line(
    tmp_path: Path, rows: Sequence[ScoredTrajectory], base: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps(msgspec.to_builtins(row)) for row in rows]
    (tmp_path / "scored.jsonl").write_text("\n".join(lines) + "\n")
    assert art("reward", tmp_path / "scored.jsonl", "-o", tmp_path / "own", "--base", base) == 1
    assert "no two attempts of a group differ" in capsys.readouterr().err and not (tmp_path / "own").exists()


@pytest.mark.parametrize("text", ["", '{"schema_version": 1, "group_id": "g", "rew'], ids=["empty", "torn"])
def test_a_file_without_a_whole_line_has_no_attempts(
    tmp_path: Path, text: str, base: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "scored.jsonl").write_text(text)
    assert art("reward", tmp_path / "scored.jsonl", "-o", tmp_path / "own", "--base", base) == 1
    assert f"{tmp_path / 'scored.jsonl'}: no attempts found" in capsys.readouterr().err


def test_attempts_that_teach_nothing_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [*planted(2), attempt("g", 0, "a", 7.0, size=2), attempt("g", 1, "b", 0.0, size=2)]
    rows[-1].messages = []
    write_lines(tmp_path / "scored.jsonl", rows)
    found = read_preferences([tmp_path / "scored.jsonl"])
    assert len(found.groups) == 2 and found.counts["without_messages"] == 1
    trained, held_out = divide(found.groups, 0.01, seed=3)
    assert len(trained) == len(held_out) == 1
    with pytest.raises(DataError, match="one scenario"):
        divide(trained, 0.2, seed=0)


def test_rewards_on_one_scale_teach_their_value_also_in_a_group_without_a_difference(tmp_path: Path) -> None:
    """Not RULER's, which compare within the group, not those that a person corrected, and none if any is beyond 1."""
    path, ruler = tmp_path / "scored.jsonl", [Score(judge="ruler", score=0.0)]
    rows = [attempt("g", index, text, 1.0, size=2) for index, text in enumerate("ab")]
    rows += [attempt("h", index, text, index / 2, size=3) for index, text in enumerate("abc")]
    rows += [attempt("r", index, text, float(index), size=2, scores=ruler) for index, text in enumerate("ab")]
    write_lines(path, rows)
    (tmp_path / "labels.jsonl").write_text('{"group_id":"h","left":"h-0","right":"h-1","verdict":"left"}\n')
    found = read_preferences([path, tmp_path / "labels.jsonl"])
    assert [group.values for group in found.groups] == [{0: 1.0, 1: 1.0}, {2: 1.0}, {}]
    assert found.counts["values"] == 3 and found.counts["without_difference"] == 0
    rows[0].reward = 1.5
    write_lines(path, rows)
    assert [group.values for group in read_preferences([path]).groups] == [{}, {}, {}]


def test_a_cascade_teaches_what_its_second_judge_scored(tmp_path: Path) -> None:
    """Not what the first judge scored alone, because the first judge learns here. A person's label still counts."""
    first, then, ruler = (Score(judge=name, score=0.0) for name in (FIRST, THEN, "ruler"))
    rows = []
    for name, scores in (("alone", [first]), ("asked", [first, then]), ("ranked", [first, ruler]), ("said", [first])):
        rows += [attempt(name, index, text, float(index), size=2, scores=scores) for index, text in enumerate("ab")]
    write_lines(tmp_path / "scored.jsonl", rows)
    (tmp_path / "labels.jsonl").write_text('{"group_id":"said","left":"said-0","right":"said-1","verdict":"left"}\n')
    found = read_preferences([tmp_path / "scored.jsonl", tmp_path / "labels.jsonl"])
    pairs = {group.ids[0]: (group.pairs, group.values) for group in found.groups}
    assert pairs == {
        "asked-0": ([Taught(1, 0, "reward")], {0: 0.0, 1: 1.0}),
        "ranked-0": ([Taught(1, 0, "ruler")], {}),
        "said-0": ([Taught(0, 1, "labels")], {}),
    }
    assert found.counts["cascade_not_asked"] == 4


def test_the_default_base_is_the_runs_and_code_that_a_run_names_is_not_called(tmp_path: Path) -> None:
    step = tmp_path / "mine" / "step_0000"
    step.mkdir(parents=True)
    data = [step / "scored.jsonl"]
    for recorded, found in (("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"), ("own.py:build", None)):
        (tmp_path / "mine" / "config.json").write_text(json.dumps({"model": {"base": recorded}}))
        if found is not None:
            assert base_settings(data, None, []) == [f'model.base="{found}"']
        else:
            with pytest.raises(UsageError, match="--base"):
                base_settings(data, None, [])
    (tmp_path / "mine" / "base").mkdir()
    assert base_settings([tmp_path / "mine"], None, []) == [f'model.base="{tmp_path / "mine" / "base"}"']
    assert base_settings([tmp_path / "x.jsonl"], "other", []) == ['model.base="other"']


def test_a_file_that_is_measured_is_not_trained_on(
    tmp_path: Path, base: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in range(3):
        (tmp_path / f"step_{step}").mkdir()
        write_lines(tmp_path / f"step_{step}" / "scored.jsonl", planted(2, seed=step))
    last = tmp_path / "step_2" / "scored.jsonl"
    words = ["reward", tmp_path, "-o", tmp_path / "own", "--base", base, "reward.epochs=1", "--present"]
    assert art(*words, last, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["groups"] == {"trained": 3, "agreement": 1, "present": 2}
    assert [*result["present"]] == [str(last)] and str(last) not in result["data"]
    words[3] = tmp_path / "another"
    assert art(*words, tmp_path) == 2 and "the only data" in capsys.readouterr().err


def test_agreement_counts_pairs_in_the_teachers_order_and_ties_as_half() -> None:
    """4 pairs of one group: 2 in order, 1 tie, 1 against: 2.5 / 4. The longer half: 1.5 of 2."""
    pairs = [ComparedPair("g", "a", "b", margin, length, "k") for margin, length in ((1, 1), (-1, 2), (0, 3), (2, 4))]
    found = {name: each.value for name, each in measure(pairs).items()}
    assert found == {"all": 0.625, "k": 0.625, "shorter half": 0.5, "longer half": 0.75}
