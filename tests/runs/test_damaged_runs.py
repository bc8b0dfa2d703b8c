"""Damaged run directories: every file of a small real run is corrupted, and each reader goes on or stops in words.

Nothing is ever loaded whose hash differs: a reader that accepts a checkpoint or a built base accepts its exact bytes.
"""

import asyncio
import functools
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from art_cli.cli import app as cli
from art_cli.config.compose import LoadedConfig, load_config
from art_cli.formats.traces.saved import saved_attempts
from art_cli.loop.record import claim_config
from art_cli.loop.train import train
from art_cli.models import adapter_config
from art_cli.models.adapters import on_base
from art_cli.models.base_files import check_base
from art_cli.models.loading import load_weights
from art_cli.models.policy_spec import read_spec
from art_cli.reports.pages.report_page import report_page
from art_cli.reports.pages.report_text import report_text
from art_cli.reports.run_report import read_report
from art_cli.runs import json_lines
from art_cli.runs import run_checkpoints as checkpoints
from art_cli.runs.durable import read_object
from art_cli.runs.manifest import hash_files, verify_checkpoint
from art_cli.runs.run_dir import RunDir
from art_cli.runtime.errors import ArtError, CheckpointError, DataError, RunError
from art_cli.serving.merged_export import saved_prompts
from art_cli.serving.served_model import base_config, find_source
from art_cli.serving.served_policies import engine_config
from art_cli.view import index
from art_cli.view.drawing import drawing_page
from art_cli.view.page_answers import Answers
from art_cli.view.page_file import write_page
from art_cli.view.sources import Sources, ViewSource
from tests.support.attacks.hostile import NUM_MUTATIONS, MemoryBound, assert_in_words, mutations
from tests.support.paths import LETTERS

CONFIG = LETTERS / "config.yaml"
CHECKPOINT = "checkpoints/step_0002"
BASE_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
              "generation_config.json")  # fmt: skip
SETTINGS = ("train.steps=2", "rollout.groups_per_step=1", "rollout.group_size=2", "eval.every=2")

Art = Callable[..., tuple[int, str, str]]


@functools.cache
def loaded_config(root: Path) -> LoadedConfig:
    return load_config(CONFIG, [f"runs={root.parent}", *SETTINGS])


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two steps."""
    runs = tmp_path_factory.mktemp("good")
    return asyncio.run(train(load_config(CONFIG, [f"runs={runs}", *SETTINGS]))).root


@pytest.fixture
def run(good: Path, tmp_path: Path) -> RunDir:
    """A copy of it to spoil."""
    shutil.copytree(good, tmp_path / "letters")
    return RunDir(tmp_path / "letters")


# --- what reads a run, without what takes seconds ---------------------------------------------------------------------


def resume(run: RunDir) -> None:
    """What `art train` reads before it plays: the configuration, the newest checkpoint, the files of its steps."""
    with run.lock():
        claim_config(run, loaded_config(run.root))
        run.clean()
        run.newest_checkpoint()
        run.metrics()
        check_base(run.base)
        for step in range(2):
            run.trajectories(step)
            run.scored(step)


def list_and_prune(run: RunDir) -> None:
    checkpoints.listed(run)
    checkpoints.prune(run, keep=None)


def serve(run: RunDir) -> None:
    """What `art serve` reads before it loads tensors."""
    whiches: tuple[checkpoints.Which, ...] = ("offered", "best", "newest")
    for which in whiches:
        source = find_source(str(run.root), which=which)
        base_config(source)
        check_base(Path(source.base), source.named)
        section = checkpoints.run_config(source.run).get("engine", {})
        engine_config("embedded", {}, section)


def export(run: RunDir) -> None:
    find_source(str(run.root))
    saved_prompts(run)


def report(run: RunDir) -> None:
    """What `art report` prints and draws."""
    plain = msgspec.to_builtins(read_report(run))
    json.dumps(plain, allow_nan=False)
    report_text(plain)
    report_page(plain)


def view(run: RunDir) -> None:
    """What `art view` answers, all of it, in one page."""
    write_page(Answers(Sources([run.root])), run.root.parent / "page.html", max_bytes=10**8)


def log(run: RunDir) -> None:
    """What `art log` sends."""
    for part in saved_attempts(run.root).parts:
        list(part.attempts())


READERS = (resume, list_and_prune, serve, export, report, view, log)


def goes_on_or_says_why(reader: Callable[[RunDir], None], run: RunDir) -> None:
    try:
        reader(run)
    except (ArtError, OSError) as error:
        lines, code = cli.report(error)
        assert_in_words(code, "\n".join(lines) + "\n")
        assert all(len(line) < 2000 for line in lines), lines


def what_is_accepted(run: RunDir) -> Iterator[tuple[Path, dict[str, str]]]:
    """Each checkpoint that verifies and the base if it does, with the hashes that its files have."""
    for step in run.checkpoint_steps():
        place = run.checkpoint_path(step)
        try:
            checkpoints.find(place)
        except ArtError:
            continue
        yield place, hash_files(place)
    if run.base.is_dir():
        try:
            check_base(run.base)
        except ArtError:
            return
        yield run.base, hash_files(run.base)


@pytest.mark.slow
def test_any_mutation_of_any_file_goes_on_or_stops_in_words(good: Path, tmp_path: Path) -> None:
    """Files in turn, readers in turn; what verifies afterwards has the bytes that were written."""
    files = sorted(path.relative_to(good) for path in good.rglob("*") if path.is_file() and path.name != "curve.svg")
    wanted = {step: hash_files(RunDir(good).checkpoint_path(step)) for step in range(3)}
    per_file = -(-NUM_MUTATIONS // len(files))
    assert len(files) > 30
    root = tmp_path / "letters"
    shutil.copytree(good, root)
    run = RunDir(root)
    with MemoryBound(mib=512):
        for place, file in enumerate(files):
            data = (good / file).read_bytes()
            for number, spoilt in enumerate(mutations(data, seed=place, count=per_file)):
                restore(good, root, file)
                (root / file).write_bytes(spoilt)
                goes_on_or_says_why(READERS[(place + number) % len(READERS)], run)
                for accepted, hashes in what_is_accepted(run):
                    step = accepted.name.removeprefix("step_")
                    original = wanted[int(step)] if step.isdecimal() else hash_files(good / "base")
                    if hashes != original:  # only a base whose hashes.json is gone has no proof, and that is not here
                        raise AssertionError((file, number, accepted))
                restore(good, root, file)


def restore(good: Path, root: Path, file: Path) -> None:
    """The file as it was, and what a reader that could go on has removed or written anew."""
    for step in range(3):
        name = f"checkpoints/step_{step:04d}"
        if not (root / name).is_dir():
            shutil.copytree(good / name, root / name)
    for name in (file, Path("config.json")):
        (root / name).write_bytes((good / name).read_bytes())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["zero", "directory", "loop", "pipe", "zeros", "hole"])
@pytest.mark.timeout(200, func_only=True)
def test_things_in_the_place_of_files_go_on_or_stop_in_words(
    run: RunDir, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file in turn empty, a directory, a link to itself, a pipe, /dev/zero, a hole.

    All readers read a file of the run itself; of a base or a checkpoint, each of which has such files, two in turn.
    """
    for module in (json_lines, index):
        monkeypatch.setattr(module, "MAX_LINE_BYTES", 2**20)
    for place, file in enumerate(sorted(path for path in run.root.rglob("*") if path.is_file())):
        is_own = file.parent == run.root or file.parent.name.startswith("step_000") and file.suffix == ".jsonl"
        for reader in READERS if is_own else (READERS[place % len(READERS)], READERS[(place + 3) % len(READERS)]):
            if not file.is_file():
                break  # its checkpoint was pruned
            data = file.read_bytes()
            spoil(file, kind)
            goes_on_or_says_why(reader, run)
            mend(file, data)


def spoil(file: Path, kind: str) -> None:
    file.unlink()
    if kind == "zero":
        file.write_bytes(b"")
    elif kind == "directory":
        file.mkdir()
    elif kind == "loop":
        file.symlink_to(file.name)
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "zeros":
        file.symlink_to("/dev/zero")
    else:
        file.touch()
        os.truncate(file, 2**41)


class Opened:
    """The files below a directory that this process opens in a `with` block."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._is_on = f"{directory}/", False
        self.paths: list[str] = []
        sys.addaudithook(self._see)  # which cannot be removed

    def _see(self, event: str, arguments: tuple[object, ...]) -> None:
        if self._is_on and event == "open" and isinstance(arguments[0], str | Path):
            self._is_on = False  # realpath opens nothing, but a hook must not call itself
            place = os.path.realpath(arguments[0])
            self._is_on = True
            if place.startswith(self._directory):
                self.paths.append(place)

    def __enter__(self) -> "Opened":
        self._is_on = True
        return self

    def __exit__(self, *exc: object) -> None:
        self._is_on = False


@pytest.mark.slow
def test_no_reader_follows_a_link_out_of_a_run(run: RunDir, tmp_path: Path) -> None:
    """Each file that no hash proves lies outside in turn, whole and readable."""
    run.drawing_path.write_text("draw()")
    outside = tmp_path / "outside"
    outside.mkdir()
    opened = Opened(outside)
    files = [path for pattern in ("*.json*", "view.js", "step_*/*", "logs/lock") for path in run.root.glob(pattern)]
    assert len(files) > 8
    for file in files:
        data = file.read_bytes()
        file.rename(outside / file.name)
        file.symlink_to(outside / file.name)
        with opened:
            for reader in READERS:
                goes_on_or_says_why(reader, run)
            assert drawing_page(ViewSource(0, run.root, "run"), None) is None or file.name != "view.js"
        assert opened.paths == [], file
        mend(file, data)


NAMES = (
    "../{}",
    "../../../../outside/{}",
    "{root}/outside/{}",
    "C:\\{}",
    "\\\\host\\share\\{}",
    "a/../../{}",
    "NUL",
    "\0{}",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_manifest_that_names_paths_elsewhere_is_refused_and_nothing_there_is_opened(
    run: RunDir, tmp_path: Path, name: str
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("x")
    named = name.replace("{root}", str(tmp_path)).replace("{}", "file")
    checkpoint = run.checkpoint_path(2)
    manifest = verify_checkpoint(checkpoint)
    files = {**manifest.files, named: hashlib.sha256(b"x").hexdigest()}
    spoilt = msgspec.structs.replace(manifest, files=files, sizes={**manifest.sizes, named: 1}, digest="")
    (checkpoint / "manifest.json").write_bytes(msgspec.json.encode(spoilt))
    with Opened(outside) as opened, pytest.raises(CheckpointError, match="is missing"):
        verify_checkpoint(checkpoint)
    assert opened.paths == []


def test_no_reader_of_a_run_asks_an_address_in_it(run: RunDir) -> None:
    """Pictures in messages, addresses of engines, judges, teachers and trackers: none is looked up or connected to."""
    url = "http://run.invalid/v1"
    config = json.loads(run.config_path.read_bytes())
    config["engine"] = {"name": "openai", "url": url, "model": "m"}
    config["judge"] = {"name": "ruler", "model": "m", "api_base": url}
    config["trackers"] = [{"name": "mlflow", "url": url}]
    run.config_path.write_text(json.dumps(config))
    (line, *rest) = run.scored_path(0).read_bytes().splitlines(keepends=True)
    record = json.loads(line)
    record["messages"].append(
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"{url}/x.png"}}]}
    )
    run.scored_path(0).write_bytes(json.dumps(record).encode() + b"\n" + b"".join(rest))
    asked: list[object] = []
    is_on = True
    sys.addaudithook(lambda event, args: asked.append(args) if is_on and event in NETWORK else None)
    for reader in READERS:
        goes_on_or_says_why(reader, run)
    is_on = False
    assert asked == []


NETWORK = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto")
TENSOR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "size"),
    [
        ({"a": TENSOR, "b": {**TENSOR, "data_offsets": [4, 12]}}, 12),  # they overlap
        ({"a": {**TENSOR, "shape": [2**63]}}, 8),
        ({"a": {**TENSOR, "shape": [-1]}}, 8),
        ({"a": {**TENSOR, "data_offsets": [0, 2**62]}}, 8),
        ({"a": {**TENSOR, "data_offsets": [8, 0]}}, 8),
        ({"a": {**TENSOR, "dtype": "F7"}}, 8),
        ({"a": TENSOR}, 4),
        ({"a": TENSOR}, 800),
        (b'{"a":' * 10_000, 8),
        (2**63, 8),
    ],
)
def test_safetensors_whose_header_lies_are_refused_in_words(run: RunDir, header: object, size: int) -> None:
    path = run.base / "model.safetensors"
    data = header if isinstance(header, bytes) else b"" if isinstance(header, int) else json.dumps(header).encode()
    length = header if isinstance(header, int) else len(data)
    path.write_bytes(length.to_bytes(8, "little") + data + b"\0" * size)
    (run.base / "hashes.json").unlink()
    with MemoryBound(mib=64), pytest.raises(ArtError, match="not a whole safetensors file"):
        check_base(run.base)


def test_a_run_reached_by_a_link_and_links_within_it_are_read_as_before(run: RunDir, tmp_path: Path) -> None:
    wanted = read_report(run), [*run.metrics()], run.scored(1), run.newest_checkpoint()
    for file in [run.metrics_path, run.scored_path(1), run.checkpoint_path(2) / "adapter_model.safetensors"]:
        kept = run.root / "logs" / f"kept-{file.name}"
        file.rename(kept)
        file.symlink_to(kept)
    moved = RunDir(tmp_path / "link")
    moved.root.symlink_to(run.root)
    found = read_report(moved), [*moved.metrics()], moved.scored(1), moved.newest_checkpoint()
    assert str(found[0]).replace(str(moved.root), str(run.root)) == str(wanted[0])
    assert wanted[3] is not None
    assert found[1:3] == wanted[1:3] and found[3] == (moved.checkpoint_path(2), wanted[3][1])
    READERS[-2](moved)  # art view


def test_a_manifest_without_sizes_verifies_and_one_with_them_is_compared_before_anything_is_hashed(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = run.checkpoint_path(2)
    manifest = verify_checkpoint(checkpoint)
    assert manifest.sizes == {name: (checkpoint / name).stat().st_size for name in manifest.files}
    older = msgspec.structs.replace(manifest, sizes={}, digest="")
    (checkpoint / "manifest.json").write_bytes(msgspec.json.encode(older))
    assert verify_checkpoint(checkpoint) == older
    first, *others = manifest.sizes.items()
    renamed = msgspec.structs.replace(manifest, sizes=dict([("other", first[1]), *others]), digest="")
    (checkpoint / "manifest.json").write_bytes(msgspec.json.encode(renamed))
    with pytest.raises(CheckpointError, match="sizes and hashes are of different files"):
        verify_checkpoint(checkpoint)
    (checkpoint / "manifest.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(manifest, digest="")))
    os.truncate(checkpoint / "adapter_model.safetensors", 2**41)
    monkeypatch.setattr("art_cli.runs.manifest.hash_file", None)
    with pytest.raises(CheckpointError, match="adapter_model.safetensors has 2199023255552 bytes instead of"):
        verify_checkpoint(checkpoint)


def test_a_pipe_that_was_added_to_a_checkpoint_makes_it_invalid(run: RunDir) -> None:
    """A library that loads it could wait for it for ever."""
    os.mkfifo(run.checkpoint_path(2) / "generation_config.json")
    with pytest.raises(CheckpointError, match="generation_config.json was put there by hand"):
        verify_checkpoint(run.checkpoint_path(2))


def test_the_lock_of_a_run_does_not_overwrite_what_a_link_leads_to(run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (run.logs / "lock").unlink()
    (run.logs / "lock").symlink_to(tmp_path / "mine")
    with pytest.raises(RunError, match="not a regular file; remove it"), run.lock():
        pass
    assert (tmp_path / "mine").read_text() == "mine"


def mend(file: Path, data: bytes) -> None:
    if not file.parent.is_dir():
        return
    if file.is_dir() and not file.is_symlink():
        shutil.rmtree(file)
    else:
        file.unlink(missing_ok=True)
    file.write_bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["step_9999999999999", "step_-1", "step_0001.tmp", "step_1", "step_\u0661\u0662\u0663\u0664"]
)
def test_directories_that_are_no_checkpoint_of_this_run_are_passed_over(
    run: RunDir, name: str, art: Art, capsys: pytest.CaptureFixture[str]
) -> None:
    """A copy of step 1 under another name is neither listed as usable nor resumed from."""
    shutil.copytree(run.checkpoint_path(1), run.checkpoints / name)
    newest = run.newest_checkpoint()
    assert newest is not None and newest[1].step == 2
    code, out, err = art("checkpoints", run.root, "--json")
    assert_in_words(code, err)
    assert [row["step"] for row in json.loads(out) if row["is_valid"]] == [0, 1, 2]
    for reader in READERS:
        goes_on_or_says_why(reader, run)


CONFIGS = {
    "text": b'"config"',
    "empty": b"",
    "binary": bytes(range(256)),
    "deeper": b'{"model":' * 60_000,
    "digits": b'{"model": {"max_length": ' + b"9" * 5_000 + b"}}",
    "wrong types": b'{"model": 3, "rollout": [], "train": "x", "engine": null}',
    "wrong dtype": b'{"model": {"dtype": "__import__"}}',
}


def test_a_finished_evaluation_that_lost_attempts_is_named(run: RunDir, art: Art) -> None:
    path = run.eval_path(2)
    lines = path.read_bytes().splitlines(keepends=True)
    assert "attempts; the numbers" not in art("report", run.root)[2]
    for kept in (b"".join(lines[:-1]), b"".join(lines)[:-20]):  # a line is gone, or half of one
        path.write_bytes(kept)
        code, _, said = art("report", run.root)
        assert code == 0 and f"eval.jsonl has {len(lines) - 1} of {len(lines)} attempts; the numbers" in said


@pytest.mark.parametrize("value", [1e308, -1e308, float("inf")])
def test_an_evaluation_with_a_huge_number_is_refused(run: RunDir, value: float) -> None:
    values = {"reward": {"a": value, "b": -value, "c": 1.0}}
    run.evaluation_path(0).parent.mkdir(parents=True, exist_ok=True)
    run.evaluation_path(0).write_text(json.dumps({"seconds": 1.0, "values": values}))
    with pytest.raises(DataError, match=r"evaluation\.json: the value -?\w.* is beyond 1e\+30"):
        run.evaluation(0)


@pytest.mark.parametrize("text", [b'{"name": "\\ud800x"}', b'{"name": "\xed\xa0\x80x"}'])
def test_lone_surrogates_in_an_object_become_replacement_characters(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "config.json").write_bytes(text)
    assert read_object(tmp_path / "config.json")["name"] == "\ufffdx"


@pytest.mark.slow
@pytest.mark.parametrize("text", CONFIGS.values(), ids=CONFIGS)
def test_a_nonsense_config_is_one_line_that_names_the_file(run: RunDir, art: Art, text: bytes) -> None:
    """Exit code 1 or 2 of train, serve, export and checkpoints --prune; the listing does not need it."""
    run.config_path.write_bytes(text)
    runs = f"runs={run.root.parent}"
    for command in (
        ("train", CONFIG, runs, *SETTINGS),
        ("serve", run.root, "--port", 0),
        ("export", run.root, "-o", run.root.parent / "out"),
        ("checkpoints", run.root, "--prune"),
    ):
        code, _, err = art(*command)
        assert_in_words(code, err)
        last = err.strip().splitlines()[-1]
        assert code in (1, 2), (command, err)
        assert last.startswith("error: ") and len(last) < 2000
        assert str(run.root) in last
    assert art("checkpoints", run.root)[0] == 0


def test_keys_of_another_version_do_not_keep_a_run_from_being_served(run: RunDir) -> None:
    config = json.loads(run.config_path.read_text())
    run.config_path.write_text(json.dumps({**config, "schema_version": 99, "new_section": {"a": [1]}}))
    serve(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"),
    [*(("flip", name) for name in BASE_FILES), *((kind, BASE_FILES[1]) for kind in ("cut", "zero", "gone", "extra"))],
)
def test_a_damaged_built_base_is_named_and_never_loaded(run: RunDir, art: Art, kind: str, name: str) -> None:
    """Also a chat template with one flipped bit, of which nothing else would tell."""
    path = run.base / name
    data = path.read_bytes()
    match kind:
        case "flip":
            path.write_bytes(data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :])
        case "cut":
            path.write_bytes(data[: len(data) // 2])
        case "zero":
            path.write_bytes(b"")
        case "gone":
            path.unlink()
        case "extra":
            (run.base / "added.safetensors").write_bytes(data)
    code, _, err = art("export", run.root, "-o", run.root.parent / "out")
    assert_in_words(code, err)
    assert code == 1
    last = err.strip().splitlines()[-1]
    assert str(run.base) in last and (name if kind != "extra" else "added.safetensors") in last
    assert "the next `art train` builds it again" in last


@pytest.mark.slow
def test_a_base_removed_is_built_again_and_the_run_goes_on(run: RunDir) -> None:
    shutil.rmtree(run.base)
    loaded = load_config(CONFIG, [f"runs={run.root.parent}", *SETTINGS, "train.steps=3"])
    assert asyncio.run(train(loaded)).step == 3
    check_base(run.base)
    assert (run.base / "hashes.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("name", BASE_FILES)
def test_a_damaged_base_of_the_users_own_is_loaded_or_refused_in_words(good: Path, tmp_path: Path, name: str) -> None:
    """No hashes here: what cannot be known to be wrong is loaded, everything else is a line with the directory."""
    base = tmp_path / "base"
    shutil.copytree(good / "base", base, ignore=shutil.ignore_patterns("hashes.json"))
    data = (base / name).read_bytes()
    source = find_source(str(base)) if name != "config.json" else None
    config = loaded_config(good).config.model
    for spoilt in mutations(data, seed=1, count=max(2, NUM_MUTATIONS // 75)):
        (base / name).write_bytes(spoilt)
        for load in (lambda: load_weights(config, str(base), device="cpu"), lambda: read_spec(config, str(base))):
            try:
                load()
            except ArtError as error:
                lines, code = cli.report(error)
                assert_in_words(code, "\n".join(lines))
                assert len(lines) == 1 and len(lines[0]) < 2000
                assert str(base) in lines[0], lines
    assert source is None or source.base == str(base)


@pytest.mark.slow
def test_more_layers_than_weights_are_refused_at_once(good: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(good / "base", base, ignore=shutil.ignore_patterns("hashes.json"))
    config = json.loads((base / "config.json").read_text())
    for num in (10**9, 10**400, 3):
        (base / "config.json").write_text(json.dumps({**config, "num_hidden_layers": num, "layer_types": None}))
        with pytest.raises(ArtError, match="num_hidden_layers|do not fit"):
            load_weights(loaded_config(good).config.model, str(base), device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "serve", "export"])
def test_a_pickled_base_is_refused_and_never_unpickled(good: Path, tmp_path: Path, art: Art, command: str) -> None:
    base, proof = tmp_path / "base", tmp_path / "ran"
    shutil.copytree(good / "base", base, ignore=shutil.ignore_patterns("hashes.json", "*.safetensors"))
    (base / "pytorch_model.bin").write_bytes(b"cposix\nsystem\n(S'touch %s'\ntR." % os.fsencode(proof))
    arguments = {
        "train": (CONFIG, f"runs={tmp_path / 'runs'}", f"model.base={base}"),
        "serve": (base, "--port", 0),
        "export": (base, "-o", tmp_path / "out"),
    }
    code, _, err = art(command, *arguments[command])
    assert code in (1, 2)
    assert_in_words(code, err)
    assert "pytorch_model.bin: a pickle, which is never read; convert it to safetensors" in err
    assert not proof.exists()


def test_a_pickled_adapter_is_refused_and_never_unpickled(good: Path, tmp_path: Path, art: Art) -> None:
    adapter, proof = tmp_path / "adapter", tmp_path / "ran"
    shutil.copytree(good / CHECKPOINT, adapter, ignore=shutil.ignore_patterns("manifest.json", "*.safetensors"))
    (adapter / "adapter_model.bin").write_bytes(b"cposix\nsystem\n(S'touch %s'\ntR." % os.fsencode(proof))
    for command in (
        ("serve", adapter, "--base", good / "base", "--port", 0),
        ("checkpoints", tmp_path / "new", "--import", adapter),
    ):
        code, _, err = art(*command)
        assert code in (1, 2)
        assert_in_words(code, err)
        assert "safetensors (pickles are not read)" in err
    assert not proof.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["adapter_config.json", "tokenizer.json", "tokenizer_config.json", "adapter_model.safetensors"]
)
def test_a_damaged_adapter_without_a_manifest_is_loaded_or_refused_in_words(
    good: Path, tmp_path: Path, name: str
) -> None:
    """A plain PEFT directory has no hashes: whatever its libraries raise is one line with its place."""
    adapter = tmp_path / "adapter"
    shutil.copytree(good / CHECKPOINT, adapter, ignore=shutil.ignore_patterns("manifest.json"))
    base = load_weights(
        loaded_config(good).config.model.model_copy(update={"lora": None}), str(good / "base"), device="cpu"
    )
    data = (adapter / name).read_bytes()
    for spoilt in mutations(data, seed=5, count=max(8, NUM_MUTATIONS // 30)):
        (adapter / name).write_bytes(spoilt)
        try:
            found = checkpoints.find(adapter)
            assert found is not None
            checkpoints.check_adapter(found.path)
            on_base(base, found.path)
        except ArtError as error:
            lines, code = cli.report(error)
            assert_in_words(code, "\n".join(lines))
            assert len(lines) == 1 and str(adapter) in lines[0], lines


def test_an_adapter_cannot_name_a_module_to_import(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = tmp_path / "adapter"
    shutil.copytree(good / CHECKPOINT, adapter, ignore=shutil.ignore_patterns("manifest.json"))
    (tmp_path / "evil_adapter_module.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = json.loads((adapter / "adapter_config.json").read_text())
    hostile = {"megatron_config": {"a": 1}, "megatron_core": "evil_adapter_module", "init_lora_weights": "pissa"}
    (adapter / "adapter_config.json").write_text(json.dumps(config | hostile))
    bare = loaded_config(good).config.model.model_copy(update={"lora": None})
    on_base(load_weights(bare, str(good / "base"), device="cpu"), adapter)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("hostile", "reason"),
    [
        ({"r": 10**9}, "rank 1000000000; the largest in adapter_model.safetensors is 4"),
        ({"rank_pattern": {"q_proj": 10**9}}, "rank 1000000000"),
        ({"rank_pattern": {"q_proj": "4"}}, "rank '4'"),
        ({"target_modules": "([a-z_.0-9]+)+!"}, "its patterns of module names take more than 1 s"),
        ({"alpha_pattern": {"([a-z_.0-9]+)+!": 4}}, "its patterns"),
        ({"modules_to_save": ["([a-z_.0-9]+)+!"]}, "its patterns"),
        ({"layer_replication": [[0, 2]] * 10**6}, "layer_replication is not supported"),
        ({"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 10**9}, "'PROMPT_TUNING'; only LORA is supported"),
    ],
)
def test_an_adapter_cannot_take_memory_or_time_that_its_tensors_do_not_need(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hostile: dict[str, object], reason: str
) -> None:
    adapter = tmp_path / "adapter"
    shutil.copytree(good / CHECKPOINT, adapter)  # a manifest that a stranger wrote changes nothing
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | hostile))
    monkeypatch.setattr(adapter_config, "PATTERNS_S", 1.0)
    bare = loaded_config(good).config.model.model_copy(update={"lora": None})
    with pytest.raises(CheckpointError, match=reason):
        on_base(load_weights(bare, str(good / "base"), device="cpu"), adapter)


def test_an_adapter_may_name_its_modules_by_a_pattern(good: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    shutil.copytree(good / CHECKPOINT, adapter)
    config = json.loads((adapter / "adapter_config.json").read_text())
    pattern = {"target_modules": r"(?:.*?(?:layers).*?(?:self_attn|mlp).*?(?:_proj).*?)", "rank_pattern": None}
    (adapter / "adapter_config.json").write_text(json.dumps(config | pattern))
    bare = loaded_config(good).config.model.model_copy(update={"lora": None})
    assert on_base(load_weights(bare, str(good / "base"), device="cpu"), adapter).has_adapter


@pytest.mark.parametrize("parent", [0, 1, -1, 99])
def test_a_turn_that_goes_on_from_none_before_it_is_refused_with_its_line(run: RunDir, parent: int) -> None:
    """A cycle of turns would never end where the tokens of a sequence are collected."""
    path = run.trajectories_path(1)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0]["turns"][0]["parent"] = parent
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ArtError, match=r"trajectories.jsonl:1: turn 0 continues turn"):
        export(run)
