"""`art prove`: the chain covers every byte of a run, and updates can be repeated."""

import asyncio
import json
import math
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from art_cli.config.compose import load_config
from art_cli.loop.replay import Replayed, replay
from art_cli.loop.train import train
from art_cli.runs.chain import (
    CERTIFICATE,
    METRICS,
    NAME,
    FilePart,
    Flaw,
    Link,
    add_link,
    check_certificate,
    find_flaws,
    read_chain,
    write_certificate,
)
from art_cli.runs.durable import write_lines
from art_cli.runs.manifest import new_checkpoint, read_manifest
from art_cli.runs.run_dir import RunDir
from art_cli.runtime.errors import DataError, UsageError
from tests.support.paths import LETTERS
from tests.support.processes import forked

CONFIG = LETTERS / "config.yaml"
SETTINGS = ["eval.every=1"]

Art = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run of two steps, resumed after step 1."""
    runs = tmp_path_factory.mktemp("runs")
    for steps in (1, 2):
        root = asyncio.run(train(load_config(CONFIG, [f"runs={runs}", f"train.steps={steps}", *SETTINGS]))).root
    return RunDir(root)


@pytest.fixture
def run(trained: RunDir, tmp_path: Path) -> RunDir:
    return RunDir(shutil.copytree(trained.root, tmp_path / trained.root.name))


def replayed(run: RunDir, *settings: str) -> list[Replayed]:
    return list(replay(run, load_config(CONFIG, [*SETTINGS, *settings]), read_chain(run)))


def flaws(run: RunDir) -> list[Flaw]:
    return list(find_flaws(run, read_chain(run)))


def test_a_run_has_a_link_for_each_checkpoint_and_for_each_end_and_each_new_beginning(trained: RunDir) -> None:
    links = read_chain(trained)
    assert [(link.step, bool(link.files)) for link in links] == [
        (0, True),
        (1, True),
        (1, False),
        (1, False),
        (2, True),
        (2, False),
    ]
    assert [link.before for link in links] == ["", *(link.digest for link in links[:-1])]
    assert flaws(trained) == []
    named = {name for link in links for name in link.inputs}
    written = {f"{path.parent.name}/{path.name}" for path in trained.root.glob("step_*/*") if path.suffix != ".lock"}
    assert named == written | {"config.json", "metrics.jsonl"}


def test_a_link_of_a_step_that_was_done_again_names_its_files_anew(run: RunDir) -> None:
    """As after the loss of the newest checkpoint: the step's files are others, and so is the checkpoint."""
    path = run.learned_path(1)
    path.write_bytes(path.read_bytes() + b"\n")
    assert [flaw.place for flaw in flaws(run)] == ["step_0001/learned.jsonl"]
    manifest = read_manifest(run.checkpoint_path(2))
    add_link(run, msgspec.structs.replace(manifest, files=manifest.files | {"of_another": "0" * 64}))
    assert not any("learned" in flaw.place for flaw in flaws(run))


@pytest.mark.parametrize("name", [
    "config.json", "metrics.jsonl", "step_0000/trajectories.jsonl", "step_0001/scored.jsonl", "step_0002/eval.jsonl",
    "step_0001/evaluation.json", "checkpoints/step_0002/adapter_model.safetensors",
    "checkpoints/step_0000/manifest.json", "base/config.json", "base/hashes.json",
])  # fmt: skip
def test_a_changed_byte_is_found_with_its_place(art: Art, run: RunDir, name: str) -> None:
    path = run.root / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    code, out, err = art("prove", run.root, "--json")
    assert out, err
    places = [flaw["place"] for flaw in json.loads(out)["flaws"]]
    assert code == 1 and all(name.startswith(place) for place in places) and places


def test_added_bytes_are_found_but_in_the_metrics_which_grow(run: RunDir) -> None:
    for name in ("metrics.jsonl", "step_0001/scored.jsonl", "config.json"):
        with (run.root / name).open("ab") as file:
            file.write(b"\n")
    assert {(flaw.place, flaw.what[:13]) for flaw in flaws(run)} == {
        ("step_0001/scored.jsonl", "has more than"),
        ("config.json", "has more than"),
    }


def test_a_link_that_was_changed_or_taken_out_is_found(run: RunDir) -> None:
    path = run.root / NAME
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:1] + lines[2:]))
    assert flaws(run)[0] == Flaw(f"{NAME}:2", "does not follow the link before it")
    path.write_bytes(b"".join([*lines[:-1], lines[-1].replace(b'"step":2', b'"step":3')]))
    assert flaws(run)[0] == Flaw(f"{NAME}:6", "was changed")
    path.write_bytes(b"".join([lines[0].replace(b"schema_version", b"schema_wersion"), *lines[1:]]))
    assert flaws(run)[0] == Flaw(f"{NAME}:1", "is not written as it was")
    path.write_bytes(b"{}\n")
    with pytest.raises(DataError):
        read_chain(run)


def truncated(run: RunDir, size: int, lines: list[bytes]) -> list[Link]:
    """Returns the links of a chain whose last line was cut off after `size` bytes."""
    (run.root / NAME).write_bytes(b"".join(lines[:-1]) + lines[-1][:size])
    return read_chain(run)


@pytest.mark.slow
@pytest.mark.parametrize("num_lines", [5, 6])  # the last line belongs to a checkpoint or to the end of training
def test_a_link_that_a_kill_tore_at_any_byte_is_a_flaw_until_the_run_goes_on(run: RunDir, num_lines: int) -> None:
    lines = (run.root / NAME).read_bytes().splitlines(keepends=True)[:num_lines]
    whole, manifest = [msgspec.json.decode(line, type=Link) for line in lines], read_manifest(run.checkpoint_path(2))
    no_link = ["checkpoints/step_0002"] if num_lines == 5 else []
    last = len(lines[-1]) - 1  # but for its newline
    for size in range(last + 1):
        links = truncated(run, size, lines)
        assert links == (whole if size == last else whole[:-1])
        if size % 20 and size not in (1, last - 1, last):
            continue  # the other ones take long, and are no different
        if size in (0, 1, last // 40 * 20, last - 1):
            places = [flaw.place for flaw in find_flaws(run, links)]
            assert places == ([f"{NAME}:{num_lines}"] if size > 0 else []) + no_link
        add_link(run, manifest, rest=3)
        healed = read_chain(run)
        assert healed[: len(links)] == links
        assert [(link.step, bool(link.files)) for link in healed[4:]] == [(2, True), (2, False)], size
    assert flaws(run) == []


def test_a_torn_chain_proves_the_steps_before_it_and_the_same_command_mends_it(art: Art, run: RunDir) -> None:
    lines = (run.root / NAME).read_bytes().splitlines(keepends=True)
    base = truncated(run, 100, lines[:5])[0].origin.base
    code, out, err = art("prove", run.root)
    assert code == 1 and f"4 links, from base {base[:12]} to step 1, " in out
    assert f"{NAME}:5: is torn" in out and "checkpoints/step_0002: has no link" in out
    assert err.splitlines()[-1].endswith(f"its chain does not prove {NAME}:5, checkpoints/step_0002")
    settings = [f"runs={run.root.parent}", "train.steps=2", "eval.every=1"]
    assert asyncio.run(train(load_config(CONFIG, settings))).was_finished
    assert flaws(run) == [] and [link.step for link in read_chain(run)] == [0, 1, 1, 1, 2, 2]


def test_a_finished_run_that_is_asked_for_again_with_another_setting_is_proven(run: RunDir) -> None:
    settings = [f"runs={run.root.parent}", "train.steps=2", "eval.every=2"]
    assert asyncio.run(train(load_config(CONFIG, settings))).was_finished
    assert json.loads(run.config_path.read_text())["eval"]["every"] == 2 and flaws(run) == []


def test_a_checkpoint_in_the_place_of_another_is_found(run: RunDir) -> None:
    """Its hashes fit, because it is complete, but the chain lists a different checkpoint."""
    path = run.checkpoint_path(2)
    manifest = msgspec.structs.replace(read_manifest(run.checkpoint_path(1)), step=2)
    shutil.rmtree(path)
    with new_checkpoint(path, manifest) as new:
        shutil.copytree(run.checkpoint_path(1), new, dirs_exist_ok=True, ignore=shutil.ignore_patterns("manifest.json"))
    assert [flaw.what for flaw in flaws(run)] == ["is not the one that the step made"]


@pytest.mark.parametrize("name", ["../secret", "/dev/zero", "step_0000/pipe", "a\0b", "checkpoints"])
def test_a_chain_of_a_stranger_reads_nothing_but_the_run(run: RunDir, name: str) -> None:
    (run.root.parent / "secret").write_bytes(b"secret")
    os.mkfifo(run.root / "step_0000" / "pipe")
    [*before, last] = read_chain(run)
    hostile = msgspec.structs.replace(last, inputs={name: FilePart(2**60, "0" * 64)})
    write_lines(run.root / NAME, [*before, hostile])
    assert [flaw.place for flaw in flaws(run)] == [f"{NAME}:6", name]


@pytest.mark.slow
def test_each_policy_computed_again_from_base_and_seed_has_the_same_bytes(run: RunDir) -> None:
    """This includes pruned checkpoints, because the run's weights are not loaded."""
    assert [(each.step, each.changed, each.gap) for each in replayed(run)] == [(0, [], 0), (1, [], 0), (2, [], 0)]
    shutil.rmtree(run.checkpoint_path(0))
    shutil.rmtree(run.checkpoint_path(1))
    assert [each.is_same for each in replayed(run)] == [True] * 3


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["learner.micro_batch_tokens=64"])
def test_sums_in_another_order_are_far_within_the_bound(run: RunDir, setting: str) -> None:
    """As on another machine: other bytes. Pruned checkpoints cannot be compared."""
    shutil.rmtree(run.checkpoint_path(1))
    first, pruned, last = replayed(run, setting)
    assert first.changed == [] and "adapter_model.safetensors" in last.changed
    assert math.isnan(pruned.gap) and 0 < last.gap < last.bound / 100


def test_a_run_that_went_on_with_another_rate_is_refused_in_words(run: RunDir) -> None:
    """Its updates used several rates, but a replay uses a single rate."""
    settings = ["train.steps=3", "train.learning_rate=1e-3"]
    asyncio.run(train(load_config(CONFIG, [f"runs={run.root.parent}", *SETTINGS, *settings])))
    assert flaws(run) == []
    with pytest.raises(UsageError, match="train's settings changed during the run"):
        replayed(run, *settings)
    with pytest.raises(UsageError, match=r"train.learning_rate: 0.001 -> 0.01; use the run's settings"):
        replayed(run, "train.steps=3")


@pytest.mark.slow
def test_an_update_from_other_rewards_gives_other_weights(run: RunDir) -> None:
    """Additional groups played by `art plan` make no difference."""
    path, scored = run.scored_path(0), run.scored(0)
    further = [msgspec.structs.replace(each, group_id="s0000-g0003", reward=float(each.index)) for each in scored[:4]]
    write_lines(path, [*scored, *further])
    assert replayed(run)[1].changed == []
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**line, "reward": 1 - line["reward"]}) + "\n" for line in lines))
    policies = replay(run, load_config(CONFIG, SETTINGS), read_chain(run))
    start, first = next(policies), next(policies)
    assert start.is_same and first.step == 1 and not first.is_same and "adapter_model.safetensors" in first.changed


@pytest.mark.parametrize("damage", ["no config", "record", "another config", "torn", "scored"])
def test_a_replay_that_cannot_begin_is_one_line(art: Art, run: RunDir, damage: str) -> None:
    """Flaws are reported before computing, so a run that contradicts its chain is not replayed."""
    config, settings, says, code = CONFIG, list(SETTINGS), f"error: {run.root}: its chain does not prove ", 1
    match damage:
        case "no config":
            config, says, code = Path("gone.yaml"), "error: gone.yaml: ", 2
        case "record":
            run.config_path.write_text("{")
            says += "config.json"
        case "another config":
            settings, code = [*SETTINGS, "rollout.group_size=8"], 2
            says = f"error: {run.config_path}: has other settings than {CONFIG}: rollout.group_size: 4 -> 8; use"
        case "torn":
            with run.scored_path(0).open("r+b") as file:
                file.truncate(10)
            says += "step_0000/scored.jsonl"
        case "scored":
            run.scored_path(0).write_text("{}\n")
            says += "step_0000/scored.jsonl"
    found, _, err = art("prove", run.root, "--replay", config, *settings)
    assert found == code and err.startswith(says) and err.count("\n") == 1, err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["metrics.jsonl", "step_0002/eval.jsonl"])
def test_training_that_goes_on_launders_no_changed_evaluation(run: RunDir, name: str) -> None:
    """S2: the flaw persists, because later links must name the same bytes as earlier links."""
    path = run.root / name
    path.write_text(path.read_text().replace("e", "o", 1) if name == METRICS else path.read_text().replace("a", "b", 1))
    found = [(flaw.place, flaw.what) for flaw in flaws(run)]
    assert found == [(name, "was changed")]
    asyncio.run(train(load_config(CONFIG, [f"runs={run.root.parent}", *SETTINGS, "train.steps=3"])))
    assert [flaw.place for flaw in flaws(run)] == [name]


@pytest.mark.slow
def test_a_step_that_was_made_again_after_a_loss_is_proven_and_said(art: Art, run: RunDir) -> None:
    path = run.checkpoint_path(2) / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    settings = [f"runs={run.root.parent}", *SETTINGS, "train.steps=3", "learner.micro_batch_tokens=64"]
    asyncio.run(train(load_config(CONFIG, settings)))
    assert flaws(run) == []
    code, out, _ = art("prove", run.root)
    assert code == 0 and "  step 2 was made again after a loss" in out


def test_the_certificate_of_a_step_that_was_done_again_is_whole(trained: RunDir, tmp_path: Path) -> None:
    """Steps 1 and 2 were done twice: the first step 2 comes before the second step 1, whose export needs it."""
    run = RunDir(tmp_path / "run")
    shutil.copytree(trained.root, run.root)
    for step in (1, 2):
        add_link(run, read_manifest(run.checkpoint_path(step)))
    for step in (1, 2):
        (export := tmp_path / str(step)).mkdir()
        write_certificate(export, run, step)
        certificate, found = check_certificate(export)
        assert found == [] and [link for link in certificate.links if link.files][-1].step == step


@pytest.mark.slow
def test_ctrl_c_during_a_replay_is_one_line_and_changes_nothing(run: RunDir) -> None:
    before = {path: path.read_bytes() for path in run.root.rglob("*") if path.is_file()}
    words = ["prove", run.root, "--replay", CONFIG, *SETTINGS]
    with forked.Forked(words, stdout=forked.PIPE, stderr=forked.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(str(run.root)) and "whole chain" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "interrupted\n")
    assert {path: path.read_bytes() for path in run.root.rglob("*") if path.is_file()} == before


def test_a_certificate_goes_with_an_exported_model(art: Art, trained: RunDir, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    write_certificate(tmp_path, trained, 2)
    certificate, found = check_certificate(tmp_path)
    assert certificate.links == read_chain(trained) and found == []
    code, out, _ = art("prove", tmp_path)
    assert code == 0 and f"whole certificate: {certificate.digest}" in out
    (tmp_path / "model.safetensors").write_bytes(b"others")
    assert check_certificate(tmp_path)[1] == [Flaw("model.safetensors", "is not the exported file")]
    (tmp_path / "adapter_config.json").write_text("{}")
    assert check_certificate(tmp_path)[1][1:] == [Flaw("adapter_config.json", "was added to the export")]
    (tmp_path / "adapter_config.json").unlink()
    text = (tmp_path / CERTIFICATE).read_text()
    (tmp_path / CERTIFICATE).write_text(text.replace('"step": 1', '"step": 7', 1))
    assert Flaw(CERTIFICATE, "was changed") in check_certificate(tmp_path)[1]
    (tmp_path / CERTIFICATE).write_text("[" * 100_000)
    assert art("prove", tmp_path)[0] == 1


def test_a_digest_leads_to_its_run(art: Art, trained: RunDir) -> None:
    digest = read_chain(trained)[1].policy
    code, out, _ = art("prove", digest[:10], "--runs", trained.root.parent)
    assert code == 0 and f"step 1 of {trained.root}" in out
    assert art("prove", "0" * 64, "--runs", trained.root.parent)[0] == 1
    assert art("prove", "nowhere")[0] == 2
