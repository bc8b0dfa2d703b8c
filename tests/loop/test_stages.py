"""Each stage alone, through its command: generate, judge, step, sft and eval hand files to each other."""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from art_cli.chat.chat_app import build_app
from art_cli.chat.http_server import serve
from art_cli.cli import app as cli
from art_cli.config.compose import load_config
from art_cli.engines import make_engine
from art_cli.loop.decide import decide_engine
from art_cli.loop.stage_policy import PolicySource, open_policy
from art_cli.loop.train import train
from art_cli.runs.durable import read_lines
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import ScoredTrajectory, Trajectory, has_signal
from tests.support.paths import LETTERS

CONFIG = str(LETTERS / "config.yaml")
ADAPTER = "adapter_model.safetensors"
LEARNS = ("train.learning_rate=0.07", "train.max_kl=null", "rollout.group_size=8", "eval=null")

Art = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that learned: reward 0.24 at the start, 0.85 at the end, however its rollouts met in a batch."""
    settings = [*LEARNS, "train.steps=20", "train.keep_checkpoints=99"]
    runs = tmp_path_factory.mktemp("trained")
    return asyncio.run(train(load_config(Path(CONFIG), [f"runs={runs}", *settings]))).root


@pytest.mark.slow
def test_the_stages_by_hand_make_the_checkpoint_of_the_loop(art: Art, tmp_path: Path) -> None:
    """generate -> judge -> step from the same start gives `art train`'s first adapter, bit for bit.

    One rollout at a time: what is sampled then does not depend on how rollouts meet in a batch.
    """
    settings = [f"runs={tmp_path}", "rollout.concurrency=1", "train.steps=1", "eval=null"]
    played, scored, out = tmp_path / "played.jsonl", tmp_path / "scored.jsonl", tmp_path / "step_0001"
    assert art("generate", CONFIG, *settings, "-o", played)[0] == 0
    assert art("judge", played, "-o", scored, "judge=rollout")[0] == 0
    assert art("step", CONFIG, scored, *settings, "-o", out)[0] == 0
    assert art("train", CONFIG, *settings)[0] == 0
    run = RunDir(tmp_path / "letters")
    by_hand = {t.id: t for t in read_lines(scored, ScoredTrajectory)}
    assert all(turn.policy for t in run.scored(0) for turn in t.turns)  # by hand, no learner left a proof of its start
    unnamed = {t.id: ([msgspec.structs.replace(turn, policy="") for turn in t.turns], t.reward) for t in run.scored(0)}
    assert unnamed == {i: (t.turns, t.reward) for i, t in by_hand.items()}
    assert (out / ADAPTER).read_bytes() == (run.checkpoint_path(1) / ADAPTER).read_bytes()


@pytest.mark.slow
def test_a_step_continues_from_the_checkpoint_that_sampled_its_attempts(
    art: Art, trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not from the newest one, whose ratios would be wrong. Another run's attempts are refused with their step."""
    run, out = RunDir(trained), tmp_path / "next"
    settings = [f"runs={trained.parent}", *LEARNS]
    code, _, said = art("step", CONFIG, run.scored_path(3), *settings, "-o", out)
    assert code == 0, said
    assert f"policy: {run.checkpoint_path(3)}" in said
    assert (out / ADAPTER).read_bytes() == (run.checkpoint_path(4) / ADAPTER).read_bytes()
    named = ["--checkpoint", run.checkpoint_path(19), "train.max_logprob_gap=1e-4"]
    code, _, said = art("step", CONFIG, run.scored_path(3), *settings, *named, "-o", out)
    assert code == 1 and "the attempts were sampled by step 3 (" in said and "this is step 19" in said, said
    scored = tmp_path / "of_another.jsonl"
    scored.write_text(run.scored_path(3).read_text().replace('"policy":"', '"policy":"0'))
    code, _, said = art("step", CONFIG, scored, *settings, "-o", out)
    assert code == 2 and "sampled by step 3 (0" in said and "no longer has; name another with --checkpoint" in said


@pytest.mark.slow
def test_a_step_by_hand_has_the_learning_rate_of_its_run(art: Art, tmp_path: Path) -> None:
    """`auto` means the run's initial value, as after `art plan`, even if the rule would now choose differently."""
    settings = [f"runs={tmp_path}", "train.steps=1", "train.learning_rate=auto", "eval=null"]
    assert art("train", CONFIG, *settings)[0] == 0
    run = RunDir(tmp_path / "letters")
    record = json.loads(run.config_path.read_text())
    record["train"]["learning_rate"] = 0.0123
    run.config_path.write_text(json.dumps(record))
    scored, out = tmp_path / "scored.jsonl", tmp_path / "step_0002"
    scored.write_bytes(run.scored_path(0).read_bytes())
    assert art("step", CONFIG, scored, *settings, "--checkpoint", run.checkpoint_path(1), "-o", out)[0] == 0
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["metrics"]["learning_rate"] == pytest.approx(0.0123)


@pytest.mark.slow
def test_generate_goes_on_with_what_is_owed(art: Art, tmp_path: Path) -> None:
    played = tmp_path / "played.jsonl"
    arguments = ("generate", CONFIG, f"runs={tmp_path}", "-o", played)
    assert art(*arguments)[0] == 0
    lines = played.read_bytes().splitlines(keepends=True)
    played.write_bytes(b"".join(lines[:7]) + lines[7][:50])
    code, _, err = art(*arguments)
    assert code == 0 and "has 7 of 12 attempts already" in err
    assert played.read_bytes().splitlines(keepends=True)[:7] == lines[:7]
    again = [t.id for t in read_lines(played, Trajectory)]
    assert len(again) == len(set(again)) == 12


@pytest.mark.slow
def test_generate_plays_another_step_beside_and_refuses_what_the_file_has_of_another(
    art: Art, trained: Path, tmp_path: Path
) -> None:
    """Steps 0 and 1 with the starting policy; then different scenarios, larger groups, and a trained policy."""
    played, others = tmp_path / "played.jsonl", tmp_path / "others.jsonl"
    arguments = ("generate", CONFIG, f"runs={tmp_path}", "-o", played)
    assert art(*arguments)[0] == 0
    assert art(*arguments, "--step", "1")[0] == 0
    ids = [each.id for each in read_lines(played, Trajectory)]
    assert len(ids) == len(set(ids)) == 24
    others.write_text("".join(f'{{"id": "other-{number}", "ask": "say 1 letters"}}\n' for number in range(3)))
    for words, what in (
        ([f"rollout.scenarios={others}"], "is at another scenario"),
        (["rollout.group_size=5"], "is one of 4 in its group"),
        (["--step", "0", "--checkpoint", RunDir(trained).checkpoint_path(20)], "was sampled by another policy"),
    ):
        code, _, err = art(*arguments, *words)
        assert code == 2 and f"{played}: its attempt s0000-g0000-a00 {what}; name another file" in err
    assert [each.id for each in read_lines(played, Trajectory)] == ids


@pytest.mark.slow
def test_a_trained_policy_beats_its_start_and_the_gate_knows(art: Art, trained: Path, tmp_path: Path) -> None:
    rewards = [line.metrics["reward_mean"] for line in RunDir(trained).metrics()]
    assert rewards[-1] > rewards[0] + 0.3
    first, last = (RunDir(trained).checkpoint_path(step) for step in (0, 20))
    arguments = ["eval", CONFIG, "eval.attempts=4", "--checkpoint", first, "--checkpoint", last, "--json"]
    code, out, _ = art(*arguments, "--gate", "reward>=0.5")
    assert code == 0
    reward = {row["policy"]: row for row in json.loads(out)["metrics"] if row["metric"] == "reward"}
    assert reward[str(first)]["difference"] is None
    assert reward[str(last)]["difference"]["low"] > 0.1
    assert reward[str(last)]["low"] <= reward[str(last)]["mean"] <= reward[str(last)]["high"]
    code, _, err = art(*arguments, "--gate", "reward>=0.999")
    assert code == 1
    assert "gate missed" in err


@pytest.mark.slow
async def test_an_endpoint_stands_in_for_a_checkpoint(trained: Path, tmp_path: Path) -> None:
    """The last checkpoint, served over HTTP as somebody else's model, plays like the last checkpoint."""
    last = RunDir(trained).checkpoint_path(20)
    loaded = decide_engine(load_config(Path(CONFIG), []))
    with open_policy(loaded, PolicySource(last, 20)) as weights:
        engine = make_engine(loaded.config.engine, weights, name="other", step=20, logs=tmp_path)
        await engine.start()
        try:
            async with serve(build_app(lambda key: engine.backend)) as root:
                code = await asyncio.to_thread(
                    cli.run,
                    ["eval", CONFIG, "--endpoint", f"other@{root}/v1", "-o", str(tmp_path), "--gate", "reward>=0.5"],
                )
                command = ["generate", CONFIG, "-o", str(tmp_path / "generated"), f"runs={tmp_path}"]
                there = ["engine=openai", f"engine.base_url={root}/v1", "engine.model=other"]
                codes = [await asyncio.to_thread(cli.run, [*command, *given]) for given in (there, there, [])]
        finally:
            await engine.close()
    assert code == 0
    assert codes == [0, 0, 2]  # the starting policy's attempts are others than the endpoint's
    [path] = tmp_path.glob("*.jsonl")
    assert all(t.messages and t.returned_reward is not None for t in read_lines(path, Trajectory))


@pytest.mark.slow
def test_sft_writes_a_checkpoint_that_says_what_it_was_shown(art: Art, tmp_path: Path) -> None:
    demos, out = tmp_path / "demos.jsonl", tmp_path / "warm"
    talk = {"messages": [{"role": "user", "content": "say 1 letters"}, {"role": "assistant", "content": "aaaa"}]}
    demos.write_text((json.dumps(talk) + "\n") * 16)
    settings = [f"runs={tmp_path}", "sft.epochs=6", "sft.learning_rate=3e-2", "sft.batch_size=4", f"sft.demos={demos}"]
    assert art("sft", CONFIG, demos, *settings, "-o", out)[0] == 0
    code, _, _ = art("eval", CONFIG, "--checkpoint", out, "--gate", "reward>=0.5")
    assert code == 0


@pytest.mark.slow
def test_the_transcripts_of_the_command_line_are_those_of_the_section_sft(art: Art, tmp_path: Path) -> None:
    """No section, an empty section and explicit settings give equal weights."""
    project = shutil.copytree(LETTERS, tmp_path / "letters")
    config, demos = project / "config.yaml", project / "demos.jsonl"
    talk = {"messages": [{"role": "user", "content": "say 1 letters"}, {"role": "assistant", "content": "aaaa"}]}
    demos.write_text((json.dumps(talk) + "\n") * 4)
    plain, written = config.read_text(), set()
    for section in ("", "sft: {epochs: 2}\n", "sft: {epochs: 2, demos: demos.jsonl}\n"):
        config.write_text(plain + section)
        settings = [f"runs={tmp_path}", *(["sft.epochs=2"] if not section else [])]
        code, _, err = art("sft", config, demos, *settings, "-o", tmp_path / f"out{len(section)}")
        assert code == 0, err
        written.add((tmp_path / f"out{len(section)}/adapter_model.safetensors").read_bytes())
    assert len(written) == 1


@pytest.mark.slow
def test_sft_learns_from_the_best_attempts_of_a_run(art: Art, trained: Path, tmp_path: Path) -> None:
    """Of each group with signal the one best attempt, a bare --best-of before the settings; its loss falls."""
    settings = [f"runs={tmp_path}", "sft.held_out=0.4", "sft.epochs=3", "sft.learning_rate=1e-2", "sft.patience=3"]
    code, out, _ = art("sft", CONFIG, trained, "--best-of", *settings, "-o", tmp_path / "warm", "--json")
    assert code == 0
    groups: dict[str, list[float]] = {}
    for step in range(20):
        for trajectory in RunDir(trained).scored(step):
            if trajectory.reward is not None:
                groups.setdefault(trajectory.group_id, []).append(trajectory.reward)
    found = json.loads(out)
    assert found["trained"] + found["evaluated"] == sum(has_signal(rewards) for rewards in groups.values())
    assert found["metrics"]["eval_loss"] < found["metrics"]["eval_loss_first"]
    code, _, err = art("sft", CONFIG, trained, "-o", tmp_path / "warm")
    assert code == 2
    assert "a run's scored attempts are learned from with --best-of" in err


@pytest.mark.slow
def test_check_finds_the_demo_ready_and_names_what_is_not(art: Art, tmp_path: Path) -> None:
    code, out, _ = art("check", CONFIG, "--json")
    findings = {finding["name"]: finding for finding in json.loads(out)}
    assert code == 0
    assert all(finding["is_good"] for finding in findings.values())
    assert set(findings) == {"config", "auto", "scenarios", "entries", "model", "rollout", "tokens", "update", "disk"}
    code, out, err = art("check", CONFIG, "rollout.timeout_s=0.001")
    assert code == 1
    assert "FAIL rollout    timeout" in out
    assert "not ready: rollout" in err
