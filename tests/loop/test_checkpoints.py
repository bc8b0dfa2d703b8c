"""`art checkpoints`: lists and prunes checkpoints, and makes runs from checkpoints and adapters."""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from art_cli.config.compose import load_config
from art_cli.loop.stage_policy import find_policy
from art_cli.loop.train import train
from art_cli.models.saved_weights import save_weights
from art_cli.runs import run_checkpoints as checkpoints
from art_cli.runs.manifest import verify_checkpoint
from art_cli.runs.run_dir import RunDir
from art_cli.runtime.errors import CheckpointError, RunError, UncertainCheckpoint, UsageError
from art_cli.serving.served_model import find_source
from tests.support.models.tiny import tiny_weights
from tests.support.paths import LETTERS
from tests.support.servers.served import add_checkpoint, make_run

CONFIG = LETTERS / "config.yaml"
ADAPTER = "adapter_model.safetensors"

Art = Callable[..., tuple[int, str, str]]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def test_the_list_says_step_validity_evaluation_and_size(art: Art, tmp_path: Path) -> None:
    run = make_run(tmp_path / "mine", (1, 2, 3), rewards={1: 0.25, 2: 0.5})
    flip(run.checkpoint_path(3) / ADAPTER)
    code, out, _ = art("checkpoints", run.root, "--json")
    rows = json.loads(out)
    assert code == 0
    assert [(row["step"], row["is_valid"], row["is_best"]) for row in rows] == [
        (1, True, False),
        (2, True, True),
        (3, False, False),
    ]
    assert [row["evaluation"] for row in rows] == [{"reward": 0.25}, {"reward": 0.5}, {}]
    sizes = [sum(file.stat().st_size for file in run.checkpoint_path(step).iterdir()) for step in (1, 2, 3)]
    assert [row["num_bytes"] for row in rows] == sizes
    _, text, _ = art("checkpoints", run.root)
    assert "reward 0.500  best" in text
    assert "adapter_model.safetensors does not match its hash" in text


def test_an_invalid_checkpoint_is_never_the_best(tmp_path: Path) -> None:
    """Rewards 0.9 (broken), 0.5, 0.5: the best is the later of the two equals."""
    run = make_run(tmp_path / "mine", (1, 2, 3, 4), rewards={1: 0.9, 2: 0.5, 3: 0.5, 4: 0.1})
    flip(run.checkpoint_path(1) / ADAPTER)
    assert [entry.step for entry in checkpoints.listed(run) if entry.is_best] == [3]
    assert checkpoints.choose(run, "best").step == 3
    assert checkpoints.choose(run, "newest").step == 4


def test_prune_keeps_the_newest_valid_ones_and_the_best(art: Art, tmp_path: Path) -> None:
    """Of 1 to 6, 5 broken and 2 the best, --keep 2 leaves 2, 4 and 6; the run's own configuration says 2 as well."""
    run = make_run(tmp_path / "mine", range(1, 7), rewards={2: 1.0, 6: 0.5})
    flip(run.checkpoint_path(5) / ADAPTER)
    copy = RunDir(tmp_path / "copy")
    shutil.copytree(run.root, copy.root)
    code, out, _ = art("checkpoints", run.root, "--prune", "--keep", 2, "--json")
    assert code == 0
    assert json.loads(out)["removed"] == [1, 3, 5]
    assert run.checkpoint_steps() == [2, 4, 6]
    assert [entry.step for entry in checkpoints.prune(copy, keep=None)] == [1, 3, 5]


def test_prune_removes_nothing_where_nothing_is_valid_or_training_runs(tmp_path: Path) -> None:
    run = make_run(tmp_path / "mine", (1, 2))
    with run.lock(), pytest.raises(RunError, match="in use"):
        checkpoints.prune(run, keep=1)
    for step in (1, 2):
        flip(run.checkpoint_path(step) / ADAPTER)
    with pytest.raises(RunError, match="none was removed"):
        checkpoints.prune(run, keep=1)
    assert run.checkpoint_steps() == [1, 2]


@pytest.mark.slow
def test_a_fork_begins_where_the_checkpoint_stands_and_trains_on(art: Art, tmp_path: Path) -> None:
    """From step 1 of 2, with a different learning rate: step 1's adapter is equal bit for bit, step 2 differs."""
    settings = [f"runs={tmp_path}", "train.steps=2", "eval.every=1", "rollout.groups_per_step=1"]
    asyncio.run(train(load_config(CONFIG, settings)))
    old, new = RunDir(tmp_path / "letters"), RunDir(tmp_path / "again")
    code, out, _ = art("checkpoints", old.root, "--fork", "again", "--step", 1)
    assert code == 0
    assert "forked from step 1" in out
    assert new.checkpoint_steps() == [1]
    assert [(line.step, line.split) for line in new.metrics()] == [(0, "eval"), (0, "train"), (1, "eval")]
    asyncio.run(train(load_config(CONFIG, [*settings, "name=again", "train.learning_rate=1e-3"])))
    assert (new.checkpoint_path(1) / ADAPTER).read_bytes() == (old.checkpoint_path(1) / ADAPTER).read_bytes()
    assert (new.checkpoint_path(2) / ADAPTER).read_bytes() != (old.checkpoint_path(2) / ADAPTER).read_bytes()
    assert [line.step for line in new.metrics() if line.split == "train"] == [0, 1]


def test_a_fork_never_writes_over_anything(art: Art, tmp_path: Path) -> None:
    run = make_run(tmp_path / "mine", (1, 2))
    (tmp_path / "there").mkdir()
    code, _, err = art("checkpoints", run.root, "--fork", "there")
    assert (code, err) == (2, f"error: {tmp_path}/there: there is something already; choose another name\n")
    with pytest.raises(UsageError, match="no checkpoint of step 7; there are: 1, 2"):
        checkpoints.fork(run, tmp_path / "new", step=7)
    flip(run.checkpoint_path(1) / ADAPTER)
    with pytest.raises(CheckpointError, match="does not match its hash"):
        checkpoints.fork(run, tmp_path / "new", step=1)
    assert not (tmp_path / "new").exists()


def test_an_imported_adapter_is_the_run_it_trains_on_from(art: Art, tmp_path: Path) -> None:
    """A plain PEFT directory of the letters' shape, made elsewhere, becomes step 0: `art train` starts from it."""
    adapter = tmp_path / "adapter"
    save_weights(tiny_weights(), adapter)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "org/tiny"}))
    run = RunDir(tmp_path / "letters")
    code, out, _ = art("checkpoints", run.root, "--import", adapter)
    assert (code, out) == (0, f"{run.checkpoint_path(0)}: step 0, from {adapter}\n")
    assert verify_checkpoint(run.checkpoint_path(0)).base == "org/tiny"
    asyncio.run(train(load_config(CONFIG, [f"runs={tmp_path}", "train.steps=1", "eval=null"])))
    before, after = load_file(adapter / ADAPTER), load_file(run.checkpoint_path(1) / ADAPTER)
    moved = max(float((after[name] - before[name]).abs().max()) for name in before)
    assert 0 < moved <= 1.01e-2  # one Adam step of learning rate 1e-2 moves no weight further than that
    code, _, err = art("checkpoints", run.root, "--import", adapter)
    assert code == 2
    assert "imported into a new one" in err


@pytest.mark.slow
def test_a_checkpoint_of_whole_weights_is_imported(tmp_path: Path) -> None:
    """Step 0 of the new run has the weights of the old run's step 1, and training continues there."""
    whole = ["model.lora=null", "eval=null", "train.steps=1", f"runs={tmp_path}"]
    asyncio.run(train(load_config(CONFIG, [*whole, "name=first"])))
    source = RunDir(tmp_path / "first").checkpoint_path(1)
    run = RunDir(tmp_path / "second")
    made = checkpoints.import_start(source, run.root)
    old, new = load_file(source / "model.safetensors"), load_file(made.path / "model.safetensors")
    assert all(torch.equal(old[name], new[name]) for name in old)
    base = checkpoints.base_of(made)
    asyncio.run(train(load_config(CONFIG, [*whole, "name=second", f"model.base={base}"])))
    assert run.checkpoint_steps() == [0, 1]


def test_what_is_no_lora_adapter_is_not_imported(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint .*, PEFT adapter"):
        checkpoints.import_start(tmp_path, tmp_path / "run")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    with pytest.raises(CheckpointError, match="a IA3 adapter; only LoRA"):
        checkpoints.import_start(tmp_path, tmp_path / "run")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    torch.save({}, tmp_path / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="save the adapter as safetensors"):
        checkpoints.import_start(tmp_path, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prune", "--fork", "x"], "one at a time"),
        (["--keep", "2"], "--keep goes with --prune"),
        (["--step", "2"], "--step goes with --fork"),
    ],
)
def test_options_that_do_not_go_together_are_a_usage_error(
    art: Art, tmp_path: Path, arguments: list[str], message: str
) -> None:
    code, _, err = art("checkpoints", tmp_path, *arguments)
    assert code == 2
    assert message in err


def test_what_is_no_run_is_one_line(art: Art, tmp_path: Path) -> None:
    code, _, err = art("checkpoints", tmp_path / "nothing")
    assert (code, err) == (2, f"error: {tmp_path}/nothing: not a run (no checkpoints/)\n")
    assert not (tmp_path / "nothing").exists()


# --- find -------------------------------------------------------------------------------------------------------------


def test_a_path_means_a_checkpoint_a_run_an_adapter_or_a_model(tmp_path: Path) -> None:
    run = make_run(tmp_path / "mine", (1, 2), rewards={1: 0.9, 2: 0.1})
    newest = checkpoints.find(run.root, which="newest")
    best = checkpoints.find(run.root, which="best")
    one = checkpoints.find(run.checkpoint_path(1))
    assert newest and best and one
    assert (newest.step, best.step, one.step) == (2, 1, 1)
    assert one.run is not None and one.run.root == run.root.resolve()
    assert checkpoints.base_of(one) == str(run.base)
    plain = tmp_path / "plain"
    save_weights(tiny_weights(), plain)
    adapter, model = checkpoints.find(plain), checkpoints.find(run.base)
    assert adapter and model
    assert (adapter.is_adapter, adapter.manifest, model.is_adapter) == (True, None, False)
    assert checkpoints.find(tmp_path / "nowhere") is None
    with pytest.raises(UsageError, match="--best picks among"):
        checkpoints.find(run.checkpoint_path(1), which="best")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        checkpoints.find(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rewards", "which", "step", "why"),
    [
        ({0: 0.3, 1: 0.9, 2: 0.1}, "offered", 1,
         "step 1, the best evaluated: reward 0.900; the newest, step 3, is not evaluated (--last takes it)"),
        ({1: 0.9, 3: 0.1}, "offered", 1,
         "step 1, the best evaluated: reward 0.900; the newest, step 3, has 0.100 (--last takes it)"),
        ({1: 0.9, 3: 0.9}, "offered", 3, "step 3, the best evaluated: reward 0.900; it is the newest"),
        ({0: 0.9, 3: 0.1}, "offered", 0,
         "step 0, the best evaluated: reward 0.900; the newest, step 3, has 0.100 (--last takes it)"),
        ({0: 0.9}, "offered", 3, "step 3, the newest; no policy after step 0 was evaluated"),
        ({}, "offered", 3, "step 3, the newest; no policy after step 0 was evaluated"),
        ({1: 0.9, 3: 0.1}, "newest", 3, "step 3, the newest (--last)"),
    ],
)  # fmt: skip
def test_a_run_offers_its_best_evaluated_checkpoint_and_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rewards: dict[int, float], which: checkpoints.Which, step: int,
    why: str
) -> None:  # fmt: skip
    """`art serve` and `art export` find it by find_source, and all others by find_policy."""
    caplog.set_level("INFO")
    run = make_run(tmp_path / "mine", (0, 1, 2, 3), rewards=rewards)
    assert find_source(str(run.root), which=which).step == step
    said = [f"policy: {run.checkpoint_path(step)}: {why}"]
    assert caplog.messages == said
    run.config_path.unlink()  # a config of another model would be refused
    loaded = load_config(CONFIG, ["runs=nowhere"])
    assert find_policy(loaded, run.root, which=which).step == step
    assert caplog.messages == said + said


def test_a_run_without_keep_best_offers_its_newest_and_prunes_the_best(tmp_path: Path) -> None:
    run = make_run(tmp_path / "mine", (0, 1, 2, 3), rewards={1: 0.9, 3: 0.1})
    config = json.loads(run.config_path.read_text())
    run.config_path.write_text(json.dumps({**config, "train": {"keep_checkpoints": 1, "keep_best": False}}))
    assert find_source(str(run.root)).step == 3
    assert find_source(str(run.root), which="best").step == 1
    assert [entry.step for entry in checkpoints.prune(run, keep=None)] == [1, 2]


def test_a_damaged_best_checkpoint_gives_way_to_the_next_best(tmp_path: Path) -> None:
    run = make_run(tmp_path / "mine", (1, 2, 3), rewards={1: 0.9, 2: 0.5, 3: 0.1})
    flip(run.checkpoint_path(1) / ADAPTER)
    assert find_source(str(run.root)).step == 2


def test_a_checkpoint_with_an_added_file_is_neither_removed_nor_put_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be complete: the user removes the file, and training continues from it."""
    run = make_run(tmp_path / "mine", (0, 1, 2, 3, 4))
    (run.checkpoint_path(4) / "model.onnx").write_text("a converter's")
    flip(run.checkpoint_path(3) / ADAPTER)
    with pytest.raises(UncertainCheckpoint, match=r"model\.onnx was put there by hand; remove it"):
        run.set_aside(above=2)
    assert run.checkpoint_steps() == [0, 1, 2, 3, 4]
    assert [entry.step for entry in checkpoints.prune(run, keep=1)] == [1, 3]
    assert "remove it; it stays" in caplog.text and run.checkpoint_steps() == [0, 2, 4]


def test_links_that_lead_out_of_a_run_are_neither_copied_nor_written_through(tmp_path: Path) -> None:
    secret, other = tmp_path / "secret", make_run(tmp_path / "other", (1,))
    secret.write_text("key")
    run = make_run(tmp_path / "mine", (1,))
    for place in (run.checkpoint_path(1) / "notes.md", run.checkpoint_path(1) / ".x", run.base / "extra.json"):
        place.parent.mkdir(exist_ok=True)
        place.symlink_to(secret)
    (run.checkpoint_path(1) / ".zero").symlink_to("/dev/zero")
    forked = checkpoints.fork(run, tmp_path / "forked", step=1)
    assert verify_checkpoint(forked.path).step == 1
    assert not [path for path in (tmp_path / "forked").rglob("*") if path.is_file() and path.read_bytes() == b"key"]
    shutil.rmtree(run.checkpoints)
    run.checkpoints.symlink_to(other.checkpoints)
    with pytest.raises(RunError, match="checkpoints: a link that leads out of the run"):
        checkpoints.prune(run, keep=1)
    adapter = tmp_path / "adapter"
    shutil.copytree(other.checkpoint_path(1), adapter)
    (adapter / "manifest.json").unlink()
    (adapter / "extra.json").symlink_to(secret)
    made = checkpoints.import_start(adapter, tmp_path / "imported", base=lambda _: "base")
    assert (made.path / ADAPTER).exists() and not (made.path / "extra.json").exists()


def test_best_and_last_exclude_each_other(art: Art, tmp_path: Path) -> None:
    for command in (("serve", tmp_path), ("export", tmp_path, "-o", tmp_path / "out")):
        code, _, err = art(*command, "--best", "--last")
        assert (code, err) == (2, "error: --best and --last: one at a time\n")


def test_a_run_that_was_moved_finds_its_base(tmp_path: Path) -> None:
    make_run(tmp_path / "mine", (1,))
    shutil.move(tmp_path / "mine", tmp_path / "elsewhere")
    found = checkpoints.find(tmp_path / "elsewhere")
    assert found
    assert checkpoints.base_of(found) == str(tmp_path / "elsewhere" / "base")


def test_a_base_that_is_gone_is_told_with_its_cure(tmp_path: Path) -> None:
    run = make_run(tmp_path / "mine", (1,))
    shutil.rmtree(run.base)
    found = checkpoints.find(run.root)
    assert found
    with pytest.raises(CheckpointError, match=r"its base model \.\./\.\./base is not there; give --base"):
        checkpoints.base_of(found)


def test_a_relative_base_is_looked_up_beside_the_checkpoint_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From another run's checkpoint, "../../base" is that run's base."""
    run, other = make_run(tmp_path / "mine", (1,)), make_run(tmp_path / "other", (1,))
    shutil.rmtree(run.base)
    monkeypatch.chdir(other.checkpoint_path(1))
    found = checkpoints.find(run.root)
    assert found
    with pytest.raises(CheckpointError, match=r"its base model \.\./\.\./base is not there; give --base"):
        checkpoints.base_of(found)


def test_a_checkpoint_in_the_making_is_none(tmp_path: Path) -> None:
    """A killed writer leaves files with a leading dot and a random name."""
    run = make_run(tmp_path / "mine", (1,))
    shutil.copytree(run.checkpoint_path(1), run.checkpoints / ".step_0009.abcd.tmp")
    add_checkpoint(run, 2)
    assert [entry.step for entry in checkpoints.listed(run)] == [1, 2]


@pytest.mark.parametrize(
    ("steps", "rewards", "keep", "removed"),
    [
        ([0, 1, 2, 3, 4], {1: 0.5, 4: 0.2}, 2, {2}),  # 0 is the start, 1 the best, 3 and 4 the newest
        ([0, 1, 2, 3], {}, 1, {1, 2}),
        ([0, 1, 2, 3], {2: 0.5, 3: 0.5}, 1, {1, 2}),  # of equals the latest
        ([1, 2, 3], {0: 0.9, 1: 0.1}, 1, {2}),  # the best existing checkpoint
        ([0], {}, 3, set()),
        ([], {}, 3, set()),
    ],
)
def test_pruning_keeps_the_start_the_best_and_the_newest(
    steps: list[int], rewards: dict[int, float], keep: int, removed: set[int]
) -> None:
    assert checkpoints.to_remove(steps, rewards, keep=keep) == removed


def test_training_and_the_command_prune_alike(tmp_path: Path) -> None:
    one = make_run(tmp_path / "one", range(5), rewards={1: 1.0, 4: 0.5})
    other = RunDir(tmp_path / "other")
    shutil.copytree(one.root, other.root)
    checkpoints.prune(one, keep=2)
    checkpoints.prune_trained(other, keep=2)
    assert one.checkpoint_steps() == other.checkpoint_steps() == [0, 1, 3, 4]
