"""A whole run of the smallest size, through the real gateway, engine, judge and learner."""

import asyncio
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
from safetensors.torch import load_file

from art_cli.config.compose import LoadedConfig, load_config, load_sweep
from art_cli.engines.embedded.embedded_engine import EmbeddedEngine
from art_cli.formats.traces.saved import run_id
from art_cli.learners.torch_learner import TorchLearner
from art_cli.loop.interrupts import resume_command
from art_cli.loop.record import claim_config, find_clash
from art_cli.loop.stages import take_step
from art_cli.loop.train import TrainResult, train
from art_cli.reports.pages.conversation_text import last_reply
from art_cli.reports.pages.report_text import closing_text
from art_cli.reports.run_report import read_report
from art_cli.runs.manifest import verify_checkpoint
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import Trajectory, prompt
from art_cli.runtime.errors import ArtError, ConfigError, DriftError, Interrupted, RunError
from tests.support.paths import LETTERS
from tests.support.processes import forked

ADAPTER = "adapter_model.safetensors"


def run(runs: Path, *overrides: str, is_fresh: bool = False, project: Path = LETTERS) -> TrainResult:
    loaded = load_config(project / "config.yaml", [f"runs={runs}", *overrides])
    return asyncio.run(train(loaded, is_fresh=is_fresh))


def adapter(root: Path, step: int) -> bytes:
    return (RunDir(root).checkpoint_path(step) / ADAPTER).read_bytes()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("runs"), "train.keep_checkpoints=9").root


@pytest.mark.slow
def test_every_step_leaves_its_whole_record(finished: Path) -> None:
    """4 steps of 3 groups of 4: 12 trajectories and 12 scored lines each, every place once, 2 turns each."""
    files = RunDir(finished)
    lines = [(line.step, line.split) for line in files.metrics()]
    assert [step for step, split in lines if split == "train"] == [0, 1, 2, 3]
    assert [step for step, split in lines if split == "eval"] == [0, 2, 4]
    for step in range(4):
        played, scored = files.trajectories(step), files.scored(step)
        assert len({t.id for t in played}) == len(played) == 12
        assert {t.id for t in scored} == {t.id for t in played}
        assert all(t.reward == t.returned_reward for t in scored)
        assert all(len(t.turns) == 2 and turn.step == step for t in played for turn in t.turns)
    for step in range(5):
        assert verify_checkpoint(files.checkpoint_path(step)).step == step


def test_the_log_says_how_long_the_start_took_and_what_it_consisted_of(finished: Path) -> None:
    """The consecutive parts add up to the total, apart from rounding to two digits."""
    [line] = [line for line in RunDir(finished).log_path.read_text().splitlines() if "first reply after" in line]
    whole, parts = line.split("first reply after ")[1].split(" s: ")
    seconds = {part.rsplit(" ", 1)[0]: float(part.rsplit(" ", 1)[1]) for part in parts.split(", ")}
    assert float(whole) == pytest.approx(sum(seconds.values()), abs=0.05) and float(whole) > 0
    assert {"torch and transformers", "model", "learner", "engine and agent", "first reply"} <= set(seconds)


def test_the_log_has_the_last_reply_of_the_first_evaluations_worst_attempt(finished: Path) -> None:
    lines = [line for line in RunDir(finished).log_path.read_text().splitlines() if "with the last reply" in line]
    played = RunDir(finished).lines(RunDir(finished).eval_path(0), Trajectory)
    worst = min(played, key=lambda each: each.returned_reward or 0.0)
    [line] = lines
    assert f"eval at step 0: the lowest is reward {worst.returned_reward:g}, of {worst.scenario_id}" in line
    assert line.endswith(f'with the last reply "{last_reply(worst)}"')


def test_the_second_turn_continues_the_first_ones_prompt(finished: Path) -> None:
    """The reply is retokenized from its text, because it hit the length limit and this project's rollout sends text.

    Replies that end are continued to their last token (tests/rollouts/test_gateway.py).
    """
    for trajectory in RunDir(finished).trajectories(0):
        first, second = trajectory.turns
        assert second.parent == 0 and second.kept >= len(first.prompt_ids)
        whole = [*first.prompt_ids, *first.sampled_ids]
        assert prompt(trajectory.turns, 1)[: second.kept] == whole[: second.kept]


def test_engine_and_learner_agree_on_every_sampled_token(finished: Path) -> None:
    """Contracts 2 and 5 in fp32: the gaps of sampled tokens and probe are rounding errors."""
    for line in RunDir(finished).metrics():
        if line.split == "train":
            assert line.metrics["logprob_gap_max"] < 1e-4
            assert line.metrics["probe_gap"] < 1e-5


@pytest.mark.slow
def test_a_policy_that_loops_until_its_limit_learns_to_stop(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A rollout gets reward 1 if a reply starts with a letter; otherwise it hits the limit of 2 turns.

    Seen in 8 steps of two seeds: 0.27 -> 0.94 and 0.19 -> 0.96.

    Without `limit_reward`, all rewards would be equal, and nothing would be learned.
    """
    caplog.set_level("INFO")
    project = tmp_path / "project"
    shutil.copytree(LETTERS, project)
    (project / "rollout.py").write_text(LOOPING)
    settings = ["train.steps=8", "train.learning_rate=0.1", "train.max_kl=null", "rollout.group_size=16", "eval=null"]
    others = ["rollout.max_turns=2", "rollout.sampling.max_tokens=2", "loss.scale_advantages=true"]
    run_dir = RunDir(run(tmp_path, *settings, *others, project=project).root)
    lines = [line.metrics for line in run_dir.metrics()]
    assert lines[0]["num_failed"] == 0 and lines[0]["num_limited"] > 20
    assert lines[0]["reward_mean"] == pytest.approx(1 - lines[0]["num_limited"] / 48)
    assert sum(line["reward_mean"] for line in lines[-3:]) / 3 > lines[0]["reward_mean"] + 0.3
    assert f"failed 0  limited {lines[0]['num_limited']:.0f}" in caplog.text


LOOPING = """
async def rollout(policy, scenario):
    messages = [{"role": "user", "content": scenario["ask"]}]
    while True:
        reply = await policy.client.chat.completions.create(model=policy.model, messages=messages)
        text = reply.choices[0].message.content or ""
        if text[:1].isascii() and text[:1].isalpha():
            return 1.0
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
"""


@pytest.mark.slow
def test_the_event_loop_turns_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large one takes seconds, and the replies of rollouts that are under way must not wait for it."""
    save, loops, turned = TorchLearner.save, [], []

    def save_and_look(learner: TorchLearner, directory: Path) -> None:
        save(learner, directory)
        beat = threading.Event()
        loops[0].call_soon_threadsafe(beat.set)
        turned.append(beat.wait(20))

    async def whole() -> None:
        loops.append(asyncio.get_running_loop())
        await train(load_config(LETTERS / "config.yaml", [f"runs={tmp_path}", "train.steps=2", "eval=null"]))

    monkeypatch.setattr(TorchLearner, "save", save_and_look)
    asyncio.run(whole())
    assert turned == [True, True, True]


def test_a_run_ends_with_the_text_that_its_report_gives(tmp_path: Path) -> None:
    """New, resumed and finished: the closing lines come from the loop's numbers, the report's from the files."""
    for steps in (1, 2, 2):
        result = run(tmp_path, "rollout.groups_per_step=1", "eval.every=1", f"train.steps={steps}")
        files = RunDir(result.root)
        report = msgspec.to_builtins(read_report(files))
        assert result.closing == {name: report[name] for name in result.closing}
        assert closing_text(result.closing) == closing_text(report) and "art serve" in closing_text(report)
        assert result.evaluations == files.evaluations() and len(result.evaluations) == steps + 1
    assert result.was_finished


@pytest.mark.slow
def test_a_finished_run_says_so_and_more_steps_go_on_from_it(finished: Path) -> None:
    before = adapter(finished, 4)
    assert run(finished.parent, "train.keep_checkpoints=9").was_finished
    result = run(finished.parent, "train.keep_checkpoints=9", "train.steps=5")
    assert (result.was_finished, result.step) == (False, 5)
    assert adapter(finished, 4) == before


@pytest.mark.slow
def test_a_changed_configuration_is_refused_by_name_and_fresh_starts_beside(finished: Path) -> None:
    with pytest.raises(RunError, match=r"train\.seed: 0 -> 7.*--fresh"):
        run(finished.parent, "train.seed=7", "train.learning_rate=0.02")
    result = run(finished.parent, "train.seed=7", "train.steps=1", is_fresh=True)
    assert result.root == finished.with_name("letters-2")


@pytest.mark.slow
def test_a_run_of_an_older_version_goes_on_where_its_record_lacks_a_newer_key(tmp_path: Path) -> None:
    """A record without `rollout.limit_reward` and `eval.judge` has their defaults, and another value clashes."""
    small = ["rollout.group_size=2", "rollout.groups_per_step=1"]
    files = RunDir(run(tmp_path, *small, "train.steps=1").root)
    record = json.loads(files.config_path.read_text())
    del record["rollout"]["limit_reward"], record["eval"]["judge"]
    files.config_path.write_text(json.dumps(record))
    assert run(tmp_path, *small, "train.steps=2").step == 2
    with pytest.raises(RunError, match="rollout.limit_reward: 0.0 -> -1.0"):
        run(tmp_path, *small, "train.steps=3", "rollout.limit_reward=-1")


@pytest.mark.slow
def test_a_run_goes_on_with_another_learning_rate_and_records_from_which_step(tmp_path: Path) -> None:
    """Two steps at 0.01, one at 0.02, one at 0.005: metrics have each step's rate, config.json where it changed."""
    small = ["eval=null", "rollout.group_size=2", "rollout.groups_per_step=1", "+train.weight_decay=0.1"]
    small.append("train.max_kl=null")  # each step of these four has signal
    files = RunDir(run(tmp_path, *small, "train.steps=2").root)
    run(tmp_path, *small, "train.steps=3", "train.learning_rate=0.02", "rollout.timeout_s=77")
    run(tmp_path, *small, "train.steps=3", "train.learning_rate=0.02", "rollout.timeout_s=77")
    run(tmp_path, *small, "train.steps=4", "train.learning_rate=0.005", "rollout.timeout_s=77")
    assert [line.metrics["learning_rate"] for line in files.metrics()] == [0.01, 0.01, 0.02, 0.005]
    record = json.loads(files.config_path.read_text())
    assert record["changes"] == [
        {"step": 2, "key": "rollout.timeout_s", "old": 600.0, "new": 77.0},
        {"step": 2, "key": "train.learning_rate", "old": 0.01, "new": 0.02},
        {"step": 3, "key": "train.learning_rate", "old": 0.02, "new": 0.005},
    ]
    assert record["train"]["learning_rate"] == 0.005


@pytest.mark.slow
@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_run_of_an_older_version_keeps_the_learning_rate_that_was_the_default(
    tmp_path: Path, is_recorded: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A new run chooses by its model. If the record has 1e-5 or no rate, the run continues with 1e-5."""
    project = tmp_path / "project"
    shutil.copytree(LETTERS, project)
    text = (project / "config.yaml").read_text()
    (project / "config.yaml").write_text(text.replace("learning_rate: 1.0e-2, ", ""))
    small = ["eval=null", "rollout.group_size=2", "rollout.groups_per_step=4", "sft=null"]
    with caplog.at_level("INFO"):
        files = RunDir(run(tmp_path, *small, "train.steps=1", project=project).root)
    assert "; baseline shrunk (auto: a step has 4 groups of 2)" in caplog.text
    assert "; learning rate 0.001 (auto: an adapter on a model of width 32)" in caplog.text
    assert "; a step's KL at most 0.05 (auto: one step must not freeze the policy)" in caplog.text
    record = json.loads(files.config_path.read_text())
    assert record["train"].pop("learning_rate") == 1e-3
    assert record["auto"].pop("learning_rate") == "an adapter on a model of width 32"
    if is_recorded:
        record["train"]["learning_rate"] = 1e-5
    del record["loss"]["baseline"], record["auto"]["baseline"]  # older versions compared with the group alone
    files.config_path.write_text(json.dumps(record))
    run(tmp_path, *small, "train.steps=2", project=project)
    record = json.loads(files.config_path.read_text())
    assert (record["train"]["learning_rate"], record["loss"]["baseline"], record["changes"]) == (1e-5, "group", [])


@pytest.mark.slow
def test_steps_without_signal_change_no_weight_and_say_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Contract 4: every rollout returns 0.1, whose mean over 4 is off by 1e-17."""
    project = tmp_path / "project"
    shutil.copytree(LETTERS, project)
    (project / "rollout.py").write_text(
        (LETTERS / "rollout.py").read_text().replace("letters / max(len(said), 1)", "0.1")
    )
    root = run(tmp_path, "train.steps=2", "train.weight_decay=0.1", "eval=null", project=project).root
    assert adapter(root, 0) == adapter(root, 1) == adapter(root, 2)
    assert "step 1/2: no signal" in caplog.text and "step 2/2: no signal" in caplog.text
    assert all(line.metrics["no_signal_share"] == 1.0 for line in RunDir(root).metrics())


def test_an_evaluation_file_that_is_edited_during_a_run_changes_no_evaluation_of_it(tmp_path: Path) -> None:
    """The first rollout replaces the file by another scenario. Every evaluation plays the run's first two."""
    project = tmp_path / "project"
    shutil.copytree(LETTERS, project)
    (project / "held.jsonl").write_text('{"id": "a", "ask": "say 1 letters"}\n{"id": "b", "ask": "say 2 letters"}\n')
    code = (
        (project / "rollout.py")
        .read_text()
        .replace(
            '    said = ""\n',
            '    said = ""\n    with open(__file__.replace("rollout.py", "held.jsonl"), "w") as file:\n'
            '        file.write(\'{"id": "c", "ask": "say 3 letters"}\\n\')\n',
        )
    )
    (project / "rollout.py").write_text(code)
    files = RunDir(run(tmp_path / "runs", "eval.scenarios=held.jsonl", "train.steps=2", project=project).root)
    assert (project / "held.jsonl").read_text() == '{"id": "c", "ask": "say 3 letters"}\n'
    for step in (0, 2):
        played = files.lines(files.eval_path(step), Trajectory)
        assert sorted({str(trajectory.scenario["id"]) for trajectory in played}) == ["a", "b"]


@pytest.mark.slow
def test_an_engine_that_does_not_load_the_step_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract 5: the engine scores the probe with a fixed adapter."""
    stale: dict[str, list[float]] = {}
    honest = EmbeddedEngine.score

    async def score(self: EmbeddedEngine, token_ids: list[int]) -> list[float]:
        return stale.setdefault("first", await honest(self, token_ids))

    monkeypatch.setattr(EmbeddedEngine, "score", score)
    with pytest.raises(DriftError, match=r"does not sample from the learner's weights.*engine.*learner"):
        run(tmp_path, "train.learning_rate=0.1")


@pytest.mark.slow
def test_a_step_taken_from_files_is_the_step_of_the_run_bit_for_bit(finished: Path, tmp_path: Path) -> None:
    files = RunDir(finished)
    output = tmp_path / "step_0003"
    command = ["step", LETTERS / "config.yaml", files.scored_path(2), "--checkpoint", files.checkpoint_path(2)]
    done = forked.run([*command, "-o", output, "--json"], timeout=240)
    assert done.returncode == 0, done.stderr
    assert (output / ADAPTER).read_bytes() == adapter(finished, 3)
    assert json.loads(done.stdout)["step"] == 3
    tensors = load_file(files.checkpoint_path(2) / ADAPTER)
    assert any((tensors[name] != other).any() for name, other in load_file(output / ADAPTER).items())


@pytest.mark.slow
def test_a_step_of_several_updates_is_the_same_in_whatever_order_the_verdicts_came(
    finished: Path, tmp_path: Path
) -> None:
    files = RunDir(finished)
    loaded = load_config(LETTERS / "config.yaml", ["train.updates_per_step=3", "train.max_kl=null"])
    scored, start = files.scored(2), files.checkpoint_path(2)
    for name, lines in (("first", scored), ("last", scored[::-1])):
        assert take_step(loaded, lines, tmp_path / name, checkpoint=start).metrics["num_updates"] > 1
    assert (tmp_path / "first" / ADAPTER).read_bytes() == (tmp_path / "last" / ADAPTER).read_bytes()


@pytest.mark.slow
def test_ctrl_c_says_how_to_go_on_and_what_it_says_finishes(tmp_path: Path) -> None:
    runs = tmp_path / "my runs"
    command = ["train", LETTERS / "config.yaml", f"runs={runs}", "train.steps=6"]
    with forked.Forked(command, stderr=forked.PIPE, stdout=forked.PIPE) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("step 2/6"):
                break
        os.kill(process.pid, signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(timeout=240) == 130
    assert "Traceback" not in rest
    program, *hint = shlex.split(rest.partition("continue with: ")[2])
    assert program == "art"
    done = forked.run(hint, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "training continues from it" in done.stderr
    assert [line.step for line in RunDir(runs / "letters").metrics() if line.split == "train"] == list(range(6))


@pytest.mark.slow
def test_what_goes_on_is_the_whole_sweep_and_never_begins_anew(tmp_path: Path) -> None:
    """A --fresh run next to `letters` is found again by name, also in a sweep."""
    path = LETTERS / "config.yaml"
    start = ["art", "train", str(path)]
    sweep = ["train.steps=1,2", "judge.name=rollout"]
    _, second = load_sweep(path, sweep)
    name = second.config.name
    assert shlex.split(resume_command(second, RunDir(tmp_path / name))) == [*start, "-m", *sweep]
    alone = [*start, "train.steps=2", "judge.name=rollout", f"name={name}-2"]
    assert shlex.split(resume_command(second, RunDir(tmp_path / f"{name}-2"))) == alone
    once = load_config(path, ["name=mine"])
    assert shlex.split(resume_command(once, RunDir(tmp_path / "mine"))) == [*start, "name=mine"]
    fresh = resume_command(once, RunDir(tmp_path / "mine-2"))
    assert load_config(path, shlex.split(fresh)[3:]).config.name == "mine-2"


@pytest.mark.slow
def test_ctrl_c_while_the_first_checkpoint_is_written_ends_the_run_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = TorchLearner.save

    def save_interrupted(learner: TorchLearner, directory: Path) -> None:
        if "step_0000" in directory.name:
            os.kill(os.getpid(), signal.SIGINT)
        save(learner, directory)

    monkeypatch.setattr(TorchLearner, "save", save_interrupted)
    with pytest.raises(Interrupted, match="continue with: art train"):
        run(tmp_path, "train.steps=1", "eval=null")
    files = RunDir(tmp_path / "letters")
    verify_checkpoint(files.checkpoint_path(0))
    assert files.trajectories(0) == []


@pytest.mark.slow
def test_a_run_in_the_place_of_a_removed_one_is_another(tmp_path: Path) -> None:
    """A tracker and the judge's budget count it anew. A resumed run keeps its identity, even after moving."""
    root = run(tmp_path, "train.steps=1", "eval=null").root
    first, tracked = RunDir(root).id(), run_id(root)
    run(tmp_path, "train.steps=2", "eval=null")
    assert RunDir(root).id() == first != "" and run_id(root) == tracked
    shutil.rmtree(root)
    run(tmp_path, "train.steps=1", "eval=null")
    assert RunDir(root).id() not in ("", first) and run_id(root) != tracked
    (root / "id").unlink()  # as an older version leaves it
    run(tmp_path, "train.steps=2", "eval=null")
    assert RunDir(root).id() == ""


def test_a_key_in_the_judges_params_makes_no_other_run_and_is_shown_to_nobody(tmp_path: Path) -> None:
    def given(key: str, top_p: float) -> LoadedConfig:
        judge = f"judge={{name: ruler, model: openai/gpt-6.1-sol, params: {{api_key: {key}, top_p: {top_p}}}}}"
        return load_config(LETTERS / "config.yaml", [f"runs={tmp_path}", judge])

    files = RunDir(tmp_path / "letters")
    claim_config(files, given("sk-hidden-1", 1.0))
    assert find_clash(files, given("sk-hidden-2", 1.0)) == ""
    clash = find_clash(files, given("sk-hidden-2", 0.5))
    assert "judge.params.top_p" in clash and "sk-hidden" not in clash


@pytest.mark.slow
def test_a_run_that_never_began_takes_another_configuration(tmp_path: Path) -> None:
    with pytest.raises(ArtError, match=r"model\.base"):
        run(tmp_path, "model.base=nothing/such", "train.steps=1")
    result = run(tmp_path, "train.steps=1", "eval=null")
    with pytest.raises(RunError, match=r"made by another configuration: model\.base"):
        run(tmp_path, "model.base=nothing/such", "train.steps=1", "eval=null")
    assert json.loads(RunDir(result.root).config_path.read_text())["model"]["base"] == "build.py:build"


def test_an_interrupt_while_the_loop_is_blocked_does_not_break_off_what_is_closed() -> None:
    """As while a model is loaded: asyncio cancels the task, and the loop hears of the same signal once more later."""
    program = """
import asyncio, os, signal, time
from art_cli.loop.interrupts import Interrupts
from art_cli.runtime import threads
from art_cli.runtime.errors import Interrupted

async def main():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.1)
    try:
        with Interrupts("stopped").handled():
            await asyncio.sleep(0)
    finally:
        for _ in range(5):
            await asyncio.gather(asyncio.sleep(0.01))
        print("closed")

try:
    threads.run(main())
except Interrupted as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("closed\nstopped\n", "")


ROLLOUT = """
from pathlib import Path

from art_cli import Outcome


async def rollout(policy, scenario):
    messages = [{"role": "user", "content": scenario["ask"]}]
    await policy.client.chat.completions.create(model=policy.model, messages=messages)
    with Path(__file__).with_name("played").open("a") as played:
        played.write(".")
    return MENDED if Path(__file__).with_name("mended").exists() else BROKEN
"""


@pytest.mark.parametrize(
    ("broken", "mended", "judge"),
    [
        ("None", "0.5", []),
        ("Outcome()", "Outcome(metrics={'own': 1.0})", ["judge.name=metric", "judge.metric=own"]),
    ],
)
def test_attempts_without_what_the_judge_reads_are_played_again_once_the_rollout_is_mended(
    tmp_path: Path, broken: str, mended: str, judge: list[str]
) -> None:
    project = tmp_path / "project"
    shutil.copytree(LETTERS, project)
    settings = ["train.steps=1", "eval=null", "rollout.entry=mine.py:rollout", *judge]
    (project / "mine.py").write_text(ROLLOUT.replace("BROKEN", broken).replace("MENDED", mended))
    with pytest.raises(RunError, match="repair the judge or rollout and run the same command again"):
        run(tmp_path / "runs", *settings, project=project)
    (project / "mended").touch()
    files = RunDir(run(tmp_path / "runs", *settings, project=project).root)
    assert len(files.scored(0)) == len({each.id for each in files.trajectories(0)}) == 12
    assert len((project / "played").read_text()) == 24, "each attempt twice"
    run(tmp_path / "runs", *settings, project=project)
    assert len((project / "played").read_text()) == 24


def test_a_directory_that_cannot_be_written_is_named_with_its_key() -> None:
    with pytest.raises(ConfigError, match="runs: /proc/none cannot be written: .*; name another directory"):
        run(Path("/proc/none"))


def test_a_rollout_that_changed_under_a_run_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    project = tmp_path / "project"
    shutil.copytree(LETTERS, project)
    for steps in (1, 2):
        run(tmp_path / "runs", f"train.steps={steps}", "eval=null", project=project)
        assert "rollout.py changed" not in caplog.text
    with (project / "rollout.py").open("a") as file:
        file.write("\n# another reward\n")
    run(tmp_path / "runs", "train.steps=3", "eval=null", project=project)
    assert caplog.text.count("rollout.py changed; attempts that this run has played keep the rewards they got") == 1
