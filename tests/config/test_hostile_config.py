"""Wrong configurations as whole commands: each is answered in words, at once, before anything ran or was written.

Families of wrong files, values, references and overrides go through the real command line, whose builder and rollout
leave a mark when they run. The fuzz sends mutations of a good file and of good overrides through the real composition.
"""

import os
import random
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from safetensors.torch import save_file
from torch import zeros

from art_cli.config.compose import load_config, load_sweep
from art_cli.runs.manifest import Manifest, new_checkpoint
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import ScoredTrajectory, Trajectory, score_trajectory
from art_cli.runtime.errors import ConfigError
from tests.support.attacks.hostile import NUM_MUTATIONS, MemoryBound, assert_in_words, mutations

Art = Callable[..., tuple[int, str, str]]

MODEL = 'model: {base: "build.py:build", lora: {rank: 4}}\n'
ROLLOUT = 'rollout: {entry: "rollout.py:rollout", scenarios: scenarios.jsonl, group_size: 4}\n'
REST = "train: {steps: 2}\neval: {scenarios: scenarios.jsonl}\n"
GOOD = MODEL + ROLLOUT + REST
MARK = "from pathlib import Path\n\nPath(__file__).with_name('ran').touch()\n"
NUM_CASES = NUM_MUTATIONS if "ART_FUZZ" in os.environ else 100  # composing one takes 30 to 100 ms
MAX_SECONDS = 5.0  # of this process's own time, so that a busy machine does not count


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose builder and rollout leave the file `ran` as soon as they are imported."""
    place = tmp_path / "project"
    place.mkdir()
    (place / "build.py").write_text(f"{MARK}\n\ndef build(directory):\n    raise SystemExit('built')\n")
    (place / "rollout.py").write_text(f"{MARK}\n\nasync def rollout(policy, scenario):\n    return 1.0\n")
    (place / "scenarios.jsonl").write_text('{"id": "a"}\n{"id": "b"}\n')
    (place / "config.yaml").write_text(GOOD)
    monkeypatch.chdir(place)
    return place


def refused(art: Art, *arguments: object) -> str:
    """What the command said. It refused in words, soon, and nothing of the user's ran and no run was made."""
    before, begin = sorted(os.listdir()), _own_seconds()
    code, out, err = art(*arguments)
    seconds = _own_seconds() - begin
    assert_in_words(code, err)
    assert (code, out) == (2, ""), err
    assert any("config" in line or "command line" in line for line in err.splitlines()), err
    assert all(line.startswith(("error: ", "policy: ")) and len(line) < 1200 for line in err.splitlines()), err
    assert seconds < MAX_SECONDS, (seconds, err)
    assert sorted(os.listdir()) == before
    return err


def _own_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


# --- files that are no configuration ----------------------------------------------------------------------------------

DOCUMENTS: dict[str, bytes | str] = {
    "a number": "5\n",
    "an object": "!!python/object/apply:os.system ['touch ran']\n",
    "an anchor in itself": "a: &a [*a]\n" + GOOD,
    "aliases of aliases": "x0: &x0 [a]\n"
    + "".join(f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 9)}]\n" for n in range(1, 9))
    + GOOD,
    "merged aliases": "x0: &x0 {a: 1}\n"
    + "".join(f"x{n}: &x{n} {{<<: [{', '.join([f'*x{n - 1}'] * 9)}]}}\n" for n in range(1, 9))
    + GOOD,
    "many unknown keys": "".join(f"k{n}: 1\n" for n in range(500)) + GOOD,
    "thousands of digits": GOOD + "seed: " + "9" * 5000 + "\n",
    "a tab": GOOD + "sft:\n\tdemos: x\n",
    "nested lists": "a: " + "[" * 1000 + "]" * 1000 + "\n",
    "an unclosed interpolation": GOOD + "runs: ${\n",
    "an unset variable": GOOD + "runs: ${oc.env:ART_NOPE}\n",
    "interpolations of interpolations": GOOD
    + "x0: a\n"
    + "".join(f"x{n}: ['${{x{n - 1}}}', '${{.x{n - 1}}}', '${{oc.select:x{n - 1}}}']\n" for n in range(1, 30)),
    "an interpolation of itself": GOOD + "runs: ${runs}\n",
    "an interpolated name": GOOD + "engine: ${engine.name}\n",
    "a null key": "null: 1\n" + GOOD,
    "a list as key": "? [a, b]\n: 1\n" + GOOD,
    "a key twice": GOOD + "train: {steps: 3}\n",
    "a key with escapes": '"\\e[2J\\nerror: all is well": 1\n' + GOOD,
    "empty": "",
    "binary data": bytes(range(256)) * 8,
    "NULs": b"\0" * 1000,
    "latin-1": GOOD.replace("a: ", "ä: ").encode("latin-1") + "n\xe4me: 1\n".encode("latin-1"),
    "defaults that name the file": "defaults: [config]\n" + GOOD,
    "defaults that are text": "defaults: base\n" + GOOD,
    "defaults with two keys": "defaults: [{loss: dapo, engine: vllm}]\n" + GOOD,
    "defaults that interpolate": "defaults: [{loss: '${nope}'}]\n" + GOOD,
    "a group twice": "defaults: [{loss: dapo}, {loss: grpo}]\n" + GOOD,
    "Hydra's own": "hydra: {run: {dir: ran}}\n" + GOOD,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_file_that_is_no_configuration_is_refused_in_words(art: Art, project: Path, name: str) -> None:
    document = DOCUMENTS[name]
    data = document.encode() if isinstance(document, str) else document
    (project / "config.yaml").write_bytes(data)
    with MemoryBound(mib=300):
        refused(art, "train", "config.yaml")


@pytest.mark.parametrize("name", ["an anchor in itself", "an object", "nested lists", "a null key", "NULs"])
def test_an_inherited_file_is_held_to_the_same(art: Art, project: Path, name: str) -> None:
    document = DOCUMENTS[name]
    (project / "base_config.yaml").write_bytes(document.encode() if isinstance(document, str) else document)
    (project / "config.yaml").write_text("defaults: [base_config]\n" + GOOD)
    assert "base_config.yaml" in refused(art, "train", "config.yaml")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("aliases of aliases", "config.yaml:6: more than 20000 keys and values up to here"),
        ("merged aliases", "config.yaml:5: more than 20000 keys and values up to here"),
        ("interpolations of interpolations", "its interpolations write more than 4 MiB"),
        ("many unknown keys", "450 other invalid keys from here on"),
        ("thousands of digits", "config.yaml:5: seed: a number of 5000 digits; at most 300 are read"),
        ("a tab", "config.yaml:6: not valid YAML: a line begins with a tab, or a value does; use spaces"),
    ],
)
def test_an_oversized_or_tabbed_file_is_refused_with_its_line(
    art: Art, project: Path, name: str, expected: str
) -> None:
    (project / "config.yaml").write_text(str(DOCUMENTS[name]))
    assert expected in refused(art, "check", "config.yaml")


@pytest.mark.parametrize(("text", "read"), [("1e3", "1000.0"), ("0x1F", "31"), ("1_000", "1000"), ("0b11", "3")])
def test_a_number_that_is_not_read_as_written_is_refused_as_a_name(
    art: Art, project: Path, text: str, read: str
) -> None:
    (project / "config.yaml").write_text(f"name: {text}\n" + GOOD)
    expected = f"config.yaml:1: name: YAML reads {text} as the number {read}; write {read}, or put text in quotes"
    assert expected in refused(art, "check", "config.yaml")


def test_files_that_inherit_from_each_other_are_refused(art: Art, project: Path) -> None:
    (project / "a.yaml").write_text("defaults: [b]\n")
    (project / "b.yaml").write_text("defaults: [a]\n")
    (project / "config.yaml").write_text("defaults: [a]\n" + GOOD)
    assert "leads back to itself" in refused(art, "train", "config.yaml")


def test_what_is_no_file_is_refused(art: Art, project: Path) -> None:
    os.mkfifo(project / "config_pipe.yaml")
    (project / "config_directory.yaml").mkdir()
    (project / "config_loop.yaml").symlink_to("config_loop.yaml")
    for path, expected in {
        "config_pipe.yaml": "not a file with text",
        "config_directory.yaml": "a directory",
        "config_loop.yaml": "symbolic links",
        "config" * 900 + ".yaml": "too long",
        "nowhere/config.yaml": "no such file: the directory ",
        "confg.yaml": "did you mean 'config.yaml'",
        "rollout.py/config.yaml": "",
    }.items():
        assert expected in refused(art, "train", path)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_file_with_a_byte_order_mark_is_read(project: Path, encoding: str) -> None:
    (project / "config.yaml").write_bytes((GOOD + "name: plain # ünï\n").encode(encoding))
    (project / "on.yaml").write_bytes("defaults: [config]\n".encode(encoding))
    assert load_config("config.yaml").config.name == load_config("on.yaml").config.name == "plain"


# --- values that cannot be --------------------------------------------------------------------------------------------

VALUES = {  # what is added to the good file or replaces its line -> what the answer names
    "a name of 300 letters": ("name: " + "n" * 300, "name: 300 characters"),
    "a name with a slash": ("name: a/b", "name: "),
    "a name with NUL": ('name: "a\\0b"', "name: "),
    "an empty name": ('name: ""', "name: "),
    "an infinite rate": ("train: {learning_rate: .inf}", "train.learning_rate: "),
    "a rate that is no number": ("train: {learning_rate: .nan}", "train.learning_rate: "),
    "no step": ("train: {steps: 0}", "train.steps: "),
    "too many steps": ("train: {steps: 18446744073709551616}", "train.steps: "),
    "a seed past 64 bits": ("train: {seed: 18446744073709551616}", "train.seed: "),
    "a timeout past every clock": ("judge: {name: ruler, timeout_s: 1e308}", "judge.timeout_s: "),
    "a fork bomb": ("learner: {processes: 1000000}", "learner.processes: "),
    "a port past 65535": ("gateway: {port: 65536}", "gateway.port: "),
    "a section that is a list": ("train: [1]", "train: "),
    "an engine that is a number": ("engine: 5", "engine: "),
    "an engine without a name": ("engine: {name: null}", "engine"),
    "an empty list of targets": ('model: {base: "build.py:build", lora: {targets: []}}', "model.lora.targets: "),
}
REFERENCES = {
    "no scenarios": (ROLLOUT.replace("scenarios.jsonl", "scenaros.jsonl"), "did you mean 'scenarios.jsonl'"),
    "no scenarios to evaluate": ("eval: {scenarios: held_out.jsonl}", "eval.scenarios: "),
    "no demos": ("sft: {demos: demos.jsonl}", "sft.demos: "),
    "no rollout file": (ROLLOUT.replace("rollout.py", "rolout.py"), "did you mean 'rollout.py'"),
    "no rollout function": (ROLLOUT.replace(":rollout", ":rolout"), "did you mean 'rollout'"),
    "an entry of an unknown module": (ROLLOUT.replace("rollout.py:", "no_such_module_here:"), "rollout.entry: "),
    "no program": ("rollout: {command: [no-such-program], scenarios: scenarios.jsonl}", "rollout.command: "),
    "no judge file": ('judge: {name: function, entry: "judg.py:judge"}', "judge.entry: "),
    "no rubric": ("judge: {name: ruler, rubric: rubric.txt}", "judge.rubric: "),
    "a rubric of nobody": ("judge: {name: ruler, rubric: ~no_such_user/x}", "judge.rubric: "),
    "a cache that is a directory": ("judge: {name: ruler, cache: .}", "judge.cache: "),
    "a judge's address": ("judge: {name: ruler, model: m, api_base: nowhere}", "judge.base_url: "),
    "a judge among several": (
        "judge: {name: blend, blend: {a: 1}, judges: {a: {name: function, entry: 'x.py:f'}}}",
        "judge.judges.a.entry: ",
    ),
    "a host with spaces": ("gateway: {host: not a host}", "gateway.host: "),
    "somebody else's address": ("gateway: {host: 192.0.2.1}", "gateway.host: "),
    "a host with a port": ('gateway: {host: "127.0.0.1:80"}', "gateway.host: "),
    "a host that is a web address": ('gateway: {host: "http://127.0.0.1"}', "gateway.host: "),
    "no builder": ('model: {base: "bild.py:build"}', "did you mean 'build.py'"),
    "no model directory": ("model: {base: ./nowhere}", "model.base: "),
    "a directory without a model": ("model: {base: .}", "model.base: "),
    "no chat template": ('model: {base: "build.py:build", chat_template: t.jinja}', "model.chat_template: "),
    "targets that are no expression": ('model: {base: "build.py:build", lora: {targets: "("}}', "model.lora.targets: "),
    "runs that are a file": ("runs: rollout.py", "runs: "),
    "runs with a long name": ("runs: " + "r" * 300, "runs: "),
    "no Python of vLLM": ("engine: {name: vllm, python: no/python}", "engine.python: "),
    "nothing to compare": (ROLLOUT.replace("size: 4", "size: 1"), "rollout.group_size: "),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*VALUES, *REFERENCES])
def test_what_can_be_known_is_known_before_anything_runs(art: Art, project: Path, name: str) -> None:
    line, expected = (VALUES | REFERENCES)[name]
    section = line.partition(":")[0]
    kept = [other for other in GOOD.splitlines(keepends=True) if not other.startswith(f"{section}:")]
    (project / "config.yaml").write_text("".join(kept) + line + "\n")
    found = refused(art, "train", "config.yaml")
    assert expected in found
    assert f"config.yaml:{len(kept) + 1}: {section}" in found


def test_all_that_is_missing_is_told_at_once(art: Art, project: Path) -> None:
    (project / "scenarios.jsonl").unlink()
    (project / "rollout.py").unlink()
    (project / "config.yaml").write_text(GOOD + "gateway: {host: 192.0.2.1}\nrunz: 1\n")
    assert "runz" in refused(art, "train", "config.yaml")
    (project / "config.yaml").write_text(GOOD + "gateway: {host: 192.0.2.1}\n")
    found = refused(art, "train", "config.yaml", "sft={demos: nowhere.jsonl}")
    for key in ("rollout.entry", "rollout.scenarios", "eval.scenarios", "gateway.host", "sft.demos"):
        assert f": {key}: " in found


@pytest.mark.parametrize("command", ["train", "check", "generate"])
def test_unknown_lora_targets_of_a_base_directory_are_known_from_its_weights(
    art: Art, project: Path, command: str
) -> None:
    base = project / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    save_file(
        {f"model.layers.0.self_attn.{name}.weight": zeros(1, 1) for name in ("q_proj", "k_proj")},
        base / "m.safetensors",
    )
    override = "model={base: base, lora: {targets: [q_proj, v_porj]}}"
    more = ["-o", "config_out.jsonl"] if command == "generate" else []
    assert "the model has no module 'v_porj'" in refused(art, command, "config.yaml", override, *more)


def test_unknown_lora_targets_of_a_built_base_leave_no_run_directory(art: Art, project: Path) -> None:
    (project / "build.py").write_text("from tests.support.models.tiny import save_tiny_base as build\n")
    code, _, err = art("train", "config.yaml", "model.lora.targets=[q_proj,qq_proj]")
    assert_in_words(code, err)
    assert code == 2 and "command line: model.lora.targets: the model has no module 'qq_proj'; did you mean" in err
    assert not (project / "runs").exists()


# --- the command line -------------------------------------------------------------------------------------------------

OVERRIDES = {
    "no value": "train.steps=",
    "no key": "=x",
    "an open list": "train.steps=[",
    "unicode": "träin.stéps=5",
    "a megabyte": "name=" + "x" * 1_000_000,
    "deep": "train=" + "[" * 500 + "]" * 500,
    "5,000 digits": "train.steps=" + "9" * 5000,
    "an interpolation of itself": "runs=${runs}",
    "an unset variable": "runs=${oc.env:ART_NOPE}",
    "added": "+x=1",
    "removed and needed": "~model",
    "removed with a value": "~train.steps=9",
    "a sweep": "train.steps=1,2",
    "a cast": "train.steps=int(many)",
    "an unknown function": "train.steps=nope(1)",
    "a package": "loss@x=dapo",
    "Hydra's own": "hydra.run.dir=ran",
    "a section below a value": "train.steps.x=1",
    "a place in a list": "rollout.command[0]=x",
    "empty parts": "train..steps=1",
    "an escape": "x\x1b[2J=1",
    "an option": "--nope=1",
    "a group that is none": "loss=nope",
    "a group that is a path": "loss=../../../etc/passwd",
    "null for what is needed": "model.base=null",
    "an infinite number": "train.learning_rate=inf",
    "a surrogate": "name=\udcff",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OVERRIDES)
@pytest.mark.parametrize("flags", [[], ["-m"]], ids=["run", "sweep"])
def test_an_override_that_cannot_be_is_refused_in_words(art: Art, project: Path, name: str, flags: list[str]) -> None:
    argument = OVERRIDES[name]
    if flags and name == "a sweep":
        argument += ","
    arguments = ["--", argument] if argument.startswith("-") else [argument]
    code, _, err = art("train", "config.yaml", *flags, *arguments)
    if name == "an option":
        assert_in_words(code, err)
        assert code == 2
        return
    refused(art, "train", "config.yaml", *flags, *arguments)


SWEEPS = {
    "too many by a range": ["train.steps=range(1,1000000000)"],
    "too many by a product": [f"train.{key}=1,2,3,4,5,6,7,8,9" for key in ("steps", "seed", "warmup_steps", "x")],
    "an interval": ["train.steps=interval(0,1)"],
    "an endless range": ["train.steps=range(1,2,0)"],
    "one wrong value": ["train.steps=1,0"],
    "one missing file": ["rollout.scenarios=scenarios.jsonl,nowhere.jsonl"],
    "a long name": ["name=" + "n" * 180, "model.base='" + "b" * 60 + "','" + "c" * 60 + "'"],
    "shuffled nonsense": ["train.steps=shuffle(nope(1,2))"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_that_cannot_be_is_refused_before_its_first_run(art: Art, project: Path, name: str) -> None:
    with MemoryBound(mib=300):
        refused(art, "train", "config.yaml", "-m", *SWEEPS[name])


@pytest.mark.slow
def test_names_that_are_meant_are_suggested(art: Art, project: Path) -> None:
    """By abbreviation and likeness of the last part, within the section first."""
    for key, meant in {
        "train.lr": "'learning_rate'",
        "train.wd": "'weight_decay'",
        "train.warmup": "'warmup_steps'",
        "train.grad_norm": "'max_grad_norm'",
        "train.max_steps": "'steps'",
        "rollout.temp": "'rollout.sampling.temperature'",
        "rollout.timeout": "'timeout_s'",
        "rollout.sampling.temp": "'temperature'",
        "sft.lr": "'learning_rate'",
        "sft.bs": "'batch_size'",
        "lr": "'train.learning_rate'",
        "temperature": "'rollout.sampling.temperature'",
        "model.lora.r": "'rank'",
        "rollout.gs": "'group_size'",
    }.items():
        found = refused(art, "train", "config.yaml", "+sft.demos=scenarios.jsonl", f"+{key}=1")
        assert f"{key}: no such key; did you mean {meant}" in found or f"did you mean {meant}" in found, found


@pytest.mark.slow
@pytest.mark.parametrize("command", ["generate", "eval", "step"])
@pytest.mark.parametrize("override", ["model.base=other", "model.lora.rank=8"])
def test_a_model_that_is_not_the_found_checkpoints_is_refused(
    art: Art, project: Path, command: str, override: str
) -> None:
    """The run holds the base that was built for it, which would be taken in silence."""
    run = RunDir(project / "runs/project")
    run.root.mkdir(parents=True)
    run.config_path.write_text(load_config("config.yaml").config.model_dump_json())
    with new_checkpoint(run.checkpoint_path(0), Manifest(step=0, base="../../base", config_hash="")) as directory:
        (directory / "adapter_config.json").write_text("{}")
    (project / "config_scored.jsonl").write_bytes(msgspec.json.encode(scored()) + b"\n")
    more = {"generate": ["-o", "out.jsonl"], "eval": [], "step": ["config_scored.jsonl", "-o", "out"]}[command]
    found = refused(art, command, "config.yaml", *more, override)
    assert f"command line: {override.partition('=')[0]}: " in found and "trained with" in found


def test_what_a_command_would_ignore_is_refused(art: Art, project: Path) -> None:
    """An endpoint beside a checkpoint, and other transcripts than those that are named."""
    endpoint = "engine={name: openai, url: 'http://127.0.0.1:9/v1', model: config}"
    for command, more in {"generate": ["-o", "out.jsonl"], "eval": []}.items():
        assert "samples from its own model" in refused(
            art, command, "config.yaml", endpoint, "--checkpoint", "config_run", *more
        )
    demos = ["sft", "config.yaml", "scenarios.jsonl", "+sft.demos=other.jsonl", "-o", "out"]
    assert "command line: sft.demos: the transcripts are scenarios.jsonl" in refused(art, *demos)


def scored() -> ScoredTrajectory:
    return score_trajectory(Trajectory(id="a", group_id="a", group_size=1, index=0, turns=[]), 1.0)


# --- fuzz -------------------------------------------------------------------------------------------------------------

FULL = (
    GOOD.encode()
    + b"""defaults: [base, {loss: dapo}, _self_]
name: "mine"
runs: ${oc.env:HOME,x}/runs
gateway: {host: 127.0.0.1, port: 0}
engine: {name: embedded, max_batch: 8}
judge: &judge
  name: blend
  blend: {ruler: 0.7, rollout: 0.3}
  judges: {ruler: {name: ruler, panel: [{model: a/b, weight: 2, params: {temperature: 0}}]}}
learner: {name: torch, gradient_checkpointing: true}
"""
)
GOOD_OVERRIDES = (
    b'train.steps=3\nmodel.base="a=b"\njudge={name: ruler, votes: 3}\n~eval\n+sft.demos=x.jsonl\nloss=dapo,gspo\n'
    b"runs=${oc.env:HOME}\nrollout.command=[node, 'a.js']\ntrain.seed=range(1,4)\nmodel.lora.rank=choice(4,8)\n"
)


@pytest.mark.slow
@pytest.mark.timeout(300 + 2 * NUM_CASES)
def test_a_mutated_file_composes_or_is_refused_in_words(project: Path) -> None:
    (project / "base.yaml").write_text("train: {seed: 3}\n")
    (project / "config.yaml").write_bytes(FULL)
    assert load_config("config.yaml").config.judge.name == "blend"
    with MemoryBound(mib=400):
        for data in mutations(FULL, seed=18, count=NUM_CASES):
            (project / "config.yaml").write_bytes(data)
            _compose(lambda: load_config("config.yaml"), data)


@pytest.mark.slow
@pytest.mark.timeout(300 + 2 * NUM_CASES)
def test_mutated_overrides_compose_or_are_refused_in_words(project: Path) -> None:
    with MemoryBound(mib=400):
        for number, arguments in enumerate(_mutated_overrides()):
            _compose(lambda arguments=arguments: load_config("config.yaml", arguments), arguments)
            if number % 4 == 0:
                _compose(lambda arguments=arguments: load_sweep(Path("config.yaml"), arguments[:2]), arguments)


def _mutated_overrides() -> Iterator[list[str]]:
    draw = random.Random(18)
    for data in mutations(GOOD_OVERRIDES, seed=19, count=NUM_CASES):
        lines = [line for line in data.decode("utf-8", "surrogateescape").split("\n") if line and "\0" not in line]
        draw.shuffle(lines)
        yield lines[:3]


def _compose(compose: Callable[[], object], case: object) -> None:
    begin = time.thread_time()
    try:
        compose()
    except ConfigError as error:
        assert_in_words(2, str(error))
        assert "<unicode string>" not in str(error) and len(str(error)) < 20_000, str(error)[:2000]
        assert all(len(line) < 1500 for line in str(error).splitlines()), str(error)[:2000]
    except Exception as error:
        raise AssertionError(f"{type(error).__name__} for {case!r}"[:3000]) from error
    assert time.thread_time() - begin < MAX_SECONDS, repr(case)[:2000]
