"""The command line: help at once, one line for each mistake, and the exit codes."""

import errno
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import art_cli
from art_cli.cli import NAMES, doctor
from art_cli.cli import app as cli
from art_cli.cli.init import copy_recipe
from art_cli.config.compose import load_config
from art_cli.config.packaged import packaged
from art_cli.runtime import log
from art_cli.runtime.errors import ArtError, ConfigError, Interrupted, Problem, UsageError
from tests.support.paths import ROOT

COMMANDS = list(NAMES)
HEAVY = ["torch", "openai", "litellm", "hydra", "transformers", "omegaconf", "pydantic", "rich", "httpx", "numpy"]
HELP_MODULES = 150  # besides those of typer; today 20 for a command, and 90 for the list of all
PLAIN = 'model: {base: m}\nrollout: {entry: "rollout.py:rollout", scenarios: scenarios.jsonl}\n'


class Result(NamedTuple):
    code: int
    out: str
    err: str


class Art:
    """The command line inside this process, as a shell would see it."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str) -> Result:
        self._capsys.readouterr()
        code = cli.run(arguments)
        out, err = self._capsys.readouterr()
        return Result(code, out, err)


@pytest.fixture
def art(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Art]:
    """`art` in an empty working directory; logging is put back as it was."""
    monkeypatch.chdir(tmp_path)
    root, ours = logging.getLogger(), logging.getLogger("art_cli")
    handlers, levels = root.handlers[:], (root.level, ours.level)
    yield Art(capsys)
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


# --- help -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_help_imports_little(tmp_path: Path) -> None:
    """Help takes as long as what it imports, and a count of modules is the same on a busy machine."""
    helps = [["--help"], *([command, "--help"] for command in COMMANDS)]
    program = (
        "import json, os, sys, typer\n"
        "before = len(sys.modules)\n"
        "from art_cli.cli.app import run\n"
        f"for words in {helps!r}:\n"
        "    if os.fork() == 0:\n"
        "        code = run(words)\n"
        f"        heavy = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "        sys.stderr.write(json.dumps([words, code, heavy, len(sys.modules) - before]) + '\\n')\n"
        "        sys.stdout.flush()\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    found = [json.loads(line) for line in done.stderr.splitlines()]
    assert [words for words, *_ in found] == helps
    for words, code, heavy, modules in found:
        assert (code, heavy) == (0, []) and modules < HELP_MODULES, words
    assert done.stdout.startswith("Usage: art") and done.stdout.count("\nUsage: art") == len(COMMANDS)


def test_every_command_has_an_example_in_its_help(art: Art) -> None:
    for command in COMMANDS:
        assert "art " + command in art(command, "--help").out.split("\n", 1)[0], command
        assert f"\n  art {command}" in art(command, "--help").out or command == "doctor"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "override"),
    [
        ("eval", "eval.scenarios=few.jsonl"),
        ("generate", "rollout.group_size=2"),
        ("train", "train.steps=10, loss=dapo"),
    ],
)
def test_the_help_of_a_command_has_an_override_that_it_uses(art: Art, command: str, override: str) -> None:
    assert f"Overrides: {override}\n" in art(command, "--help").out


def test_art_alone_is_its_help(art: Art) -> None:
    assert art() == art("--help")
    assert all(f"\n  {command} " in art().out for command in COMMANDS)


def test_version_is_the_packages(art: Art) -> None:
    from importlib.metadata import version

    assert art("--version") == Result(0, f"art {version('art-cli')}\n", "")


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["trian"], "error: No such command 'trian'. Did you mean 'train'? (see art --help)\n"),
        (["train"], "error: Missing argument 'CONFIG'. (see art train --help)\n"),
        (["train", "c.yaml", "--fersh"], "error: No such option: --fersh"),
        (["generate", "c.yaml", "-o", "x", "--step", "-1"], "error: Invalid value for '--step'"),
        (["train", "confg.yaml"], "error: confg.yaml: no such file; did you mean 'config.yaml'?\n"),
        (["train", "syntax.yaml"], "error: syntax.yaml:3: not valid YAML: "),
        (["train", "key.yaml"], "error: key.yaml:3: train.step: no such key; did you mean 'steps'?\n"),
        (["train", "type.yaml"], 'error: type.yaml:3: train.steps: expected a whole number, not "many"\n'),
        (["train", "config.yaml", "engine=tpu"], "error: command line: engine: no engine 'tpu'; there are: "),
        (["train", "config.yaml", "train.steps"], "error: command line: train.steps: expected key=value"),
        (["train", "config.yaml", "-m", "train.steps=interval(1,2)"], "error: command line: train.steps: an interval"),
        (["init", "x", "--recipe", "chess"], "error: no recipe 'chess'; "),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(art: Art, arguments: list[str], line: str) -> None:
    Path("config.yaml").write_text(PLAIN)
    Path("rollout.py").write_text("def rollout(policy, scenario): ...\n")
    Path("scenarios.jsonl").write_text('{"id": 1}\n')
    Path("syntax.yaml").write_text("a: 1\nb: [\n")
    Path("key.yaml").write_text(PLAIN + "train: {step: 3}\n")
    Path("type.yaml").write_text(PLAIN + "train: {steps: many}\n")
    code, out, err = art(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(line)
    assert not Path("runs").exists()


def test_all_mistakes_of_a_file_are_a_line_each(art: Art) -> None:
    Path("config.yaml").write_text("model: {bas: m}\nrollout: {scenarios: s, entry: e}\nlearning_rate: 1\n")
    code, _, err = art("train", "config.yaml", "loss=ppoo")
    keys = [line.split(": ")[2] for line in err.splitlines()]
    assert (code, keys) == (2, ["model.bas", "model.base", "learning_rate", "loss"])


def test_a_file_that_is_missing_is_a_mistake_of_usage_and_an_empty_one_is_none_to_learn_from(art: Art) -> None:
    Path("config.yaml").write_text(PLAIN)
    Path("empty.jsonl").write_text("")
    empty = art("step", "config.yaml", "empty.jsonl", "-o", "out")
    assert empty == Result(1, "", "error: empty.jsonl: no scored trajectories: nothing to learn from\n")
    assert not Path("out").exists()
    missing = Result(2, "", "error: nowhere.jsonl: no such file\n")
    assert art("step", "config.yaml", "nowhere.jsonl", "-o", "out") == missing
    assert art("sft", "config.yaml", "nowhere.jsonl", "-o", "out") == missing
    assert art("judge", "nowhere.jsonl") == missing
    os.mkfifo("pipe")
    for name in (".", "pipe"):
        assert art("judge", name) == Result(2, "", f"error: {name}: not a file\n")
        assert art("step", "config.yaml", name, "-o", "out") == Result(2, "", f"error: {name}: not a file\n")
    assert art("judge", "empty.jsonl", "judge=rollout") == Result(
        1, "", "error: empty.jsonl: no group in it: nothing to judge\n"
    )
    assert not Path("empty.scored.jsonl").exists()


def test_a_checkpoint_that_is_missing_is_a_mistake_of_usage(art: Art) -> None:
    Path("config.yaml").write_text(PLAIN)
    for words in (["generate", "config.yaml", "-o", "x"], ["eval", "config.yaml", "eval.scenarios=s"]):
        code, out, err = art(*words, "--checkpoint", "nowhere")
        assert (code, out, err.splitlines()[-1]) == (2, "", "error: nowhere: no such directory")


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "lines", "code"),
    [
        (ArtError("it failed"), ["error: it failed"], 1),
        (UsageError("not so"), ["error: not so"], 2),
        (
            ConfigError([Problem("a", "f:1", "x"), Problem("b", "f:2", "y")]),
            ["error: f:1: a: x", "error: f:2: b: y"],
            2,
        ),
        (ExceptionGroup("tasks", [ArtError("one"), ArtError("two")]), ["error: one"], 1),
        (Interrupted("go on with: art train c.yaml"), ["go on with: art train c.yaml"], 130),
        (
            OSError(errno.ENOSPC, "No space left on device", "runs/x"),
            ["error: runs/x: no space left on the disk; free some and run the same command again"],
            1,
        ),
        (
            OSError(errno.EDQUOT, "Disk quota exceeded", "runs/x"),
            ["error: runs/x: no space left on the disk; free some and run the same command again"],
            1,
        ),
        (RuntimeError('Error building "model" validator:\n  KeyboardInterrupt:'), ["interrupted"], 130),
        (PermissionError(errno.EACCES, "Permission denied", "runs"), ["error: runs: Permission denied"], 1),
        (
            ModuleNotFoundError("No module named 'torch'", name="torch"),
            ["error: torch is not installed; pip install 'art-cli[train]'"],
            1,
        ),
    ],
)
def test_a_failure_is_told_as_what_it_is(error: Exception, lines: list[str], code: int) -> None:
    assert cli.report(error) == (lines, code)


def test_a_bug_is_one_line_and_a_traceback_under_verbose(art: Art, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ZeroDivisionError("division\nby zero")

    monkeypatch.setattr(doctor, "run", broken)
    code, _, err = art("doctor")
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith("error: this is a bug in art: ZeroDivisionError: division by zero (test_cli.py:")
    assert "--verbose" in err
    code, _, err = art("doctor", "--verbose")
    assert code == 1
    assert err.startswith("Traceback (most recent call last):")


def test_verbose_may_stand_anywhere(art: Art) -> None:
    for words in (["--verbose", "init", "x"], ["init", "--verbose", "x"], ["init", "x", "--verbose"]):
        assert art(*words, "--recipe", "none").code == 2
        assert logging.getLogger("art_cli").level == logging.DEBUG
    assert art("init", "x", "--recipe", "none").code == 2
    assert logging.getLogger("art_cli").level == logging.INFO


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "said"),
    [
        ("art_cli.cli.app", ""),
        ("typer", ""),
        ("typer.main", ""),
        ("typer's commands", "interrupted\n"),
        ("art_cli.cli.train", "interrupted\n"),
        ("hydra.core.override_parser.types", "interrupted\n"),
    ],
)
def test_ctrl_c_is_quiet_from_the_first_moments_on(tmp_path: Path, moment: str, said: str) -> None:
    """The process signals itself when a module is about to be imported, or Typer makes its commands."""
    program = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from art_cli.__main__ import main\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {moment!r}:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        f'if {moment!r} == "typer\'s commands":\n'
        "    import typer.main\n"
        "    typer.main.get_group = lambda _: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.argv = ['art', 'train', 'config.yaml']\n"
        "main()\n"
    )
    (tmp_path / "config.yaml").write_text(PLAIN)
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", said)


def test_ctrl_c_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    """As a shell starts `art ... &`."""
    program = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from art_cli.__main__ import main\n"
        "sys.argv = ['art', '--version']\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_what_still_computes_in_a_thread_does_not_abort_the_process() -> None:
    """What is to be done at the end is done: handlers of atexit, and what was printed is seen. Three forks try it."""
    program = (
        "import atexit, os, threading, torch\n"
        "from art_cli.cli import app as cli\n"
        "def compute():\n"
        "    while True:\n"
        "        torch.mm(torch.ones(300, 300), torch.ones(300, 300))\n"
        "def run(_):\n"
        "    for _ in range(4):\n"
        "        threading.Thread(target=compute, daemon=True).start()\n"
        "    print('done')\n"
        "    return 7\n"
        "cli.run = run\n"
        "for _ in range(3):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        atexit.register(print, 'bye')\n"
        "        cli.main()\n"
        "    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\nbye\n" * 3, "")


def test_a_reader_that_has_enough_is_no_failure_to_shout_about(tmp_path: Path) -> None:
    command = f"'{sys.executable}' -m art_cli --help | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.stderr == ""
    assert done.stdout in ("0\n", "1\n")  # 0: all was written before `true` ended


# --- commands ---------------------------------------------------------------------------------------------------------


def test_init_copies_a_recipe_and_not_what_using_it_left(tmp_path: Path) -> None:
    for name in ("config.yaml", "rollout.py", "runs/old/config.json", "__pycache__/rollout.pyc"):
        (tmp_path / "recipes/toy" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "recipes/toy" / name).write_text(name)
    copy_recipe(tmp_path / "recipes", "toy", tmp_path / "mine/new")
    assert sorted(file.name for file in (tmp_path / "mine/new").rglob("*")) == ["config.yaml", "rollout.py"]


@pytest.mark.slow
def test_a_new_project_is_named_after_its_directory(art: Art) -> None:
    for place, own in (("mine", "mine"), ("my task", "my-task"), ("2048", "2048"), ("...", "tictactoe")):
        assert art("init", place, "--recipe", "tictactoe").code == 0
        assert load_config(Path(place, "config.yaml")).config.name == own
        assert load_config(Path(place, "config-groups.yaml")).config.name == f"{own}-groups"
        text = Path(place, "README.md").read_text()
        assert f"--checkpoint runs/{own}\n" in text and "](../" not in text


@pytest.mark.slow
def test_a_blank_project_is_four_files_that_pass_the_check(art: Art) -> None:
    assert art("init", "mine", "--recipe", "blank").code == 0
    files = sorted(path.name for path in Path("mine").iterdir() if path.name != ".agents")
    assert files == ["config.yaml", "held_out.jsonl", "rollout.py", "scenarios.jsonl"]
    agent = ROOT.joinpath("README.md").read_text().split("# rollout.py\n")[1].split("```")[0]
    said = [line.strip() for line in agent.splitlines()[1:] if line.strip()]
    assert all(line in Path("mine/rollout.py").read_text() for line in said)
    done = art("check", "mine/config.yaml", "rollout.processes=0")
    assert done.code == 0, done.out


def test_init_writes_over_nothing(tmp_path: Path) -> None:
    (tmp_path / "recipes/toy").mkdir(parents=True)
    (tmp_path / "recipes/toy/config.yaml").write_text("new")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/config.yaml").write_text("old")
    with pytest.raises(UsageError, match="not empty; name a new directory"):
        copy_recipe(tmp_path / "recipes", "toy", tmp_path / "mine")
    assert (tmp_path / "mine/config.yaml").read_text() == "old"


@pytest.mark.slow
def test_every_packaged_recipe_starts_a_project_that_composes(art: Art) -> None:
    recipes = sorted(path.parent.name for path in packaged("recipes").glob("*/config.yaml"))
    for recipe in recipes:
        result = art("init", f"new-{recipe}", "--recipe", recipe)
        assert (result.code, result.err) == (0, "")
        assert "art train config.yaml" in result.out
        for file in Path(f"new-{recipe}").glob("*.yaml"):
            load_config(file)


def test_doctor_tells_what_is_missing_and_what_is_broken(art: Art, monkeypatch: pytest.MonkeyPatch) -> None:
    def prove() -> str:
        raise RuntimeError("operator torchvision::nms\ndoes not exist")

    monkeypatch.setitem(doctor.EXTRAS, "train", (("typer",), "training"))
    monkeypatch.setitem(doctor.EXTRAS, "wandb", (("no-such-package",), "the tracker"))
    monkeypatch.setitem(doctor.PROOFS, "train", prove)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    code, out, err = art("doctor", "--json")
    found = {finding["name"]: finding for finding in json.loads(out)}
    assert found["wandb"]["state"] == "missing"
    assert found["wandb"]["cure"] == "pip install 'art-cli[wandb]'"
    assert found["train"]["state"] == "broken"
    assert "RuntimeError: operator torchvision::nms does not exist" in found["train"]["message"]
    assert found["keys"]["message"] == "OPENAI_API_KEY" or "OPENAI_API_KEY," in found["keys"]["message"]
    assert "sk-secret" not in out
    assert (code, err) == (1, "error: does not work: train; each line above names the cure\n")


def test_doctor_is_content_where_nothing_is_broken(art: Art, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(doctor.PROOFS, "train")  # importing torch and transformers takes seconds
    code, out, _ = art("doctor")
    assert code == 0
    assert {line.split()[0] for line in out.splitlines()} <= {"ok", "missing", "->"}


def test_a_bug_report_has_the_newest_runs_logs_and_no_secret(
    art: Art, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log that is a link could be any file; a long log is cut; the .env file's keys count too."""
    monkeypatch.delitem(doctor.PROOFS, "train")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_API_KEY", "sk-of-the-environment")
    (tmp_path / ".env").write_text("OTHER_TOKEN=sk-of-the-file\n")
    monkeypatch.setenv("OTHER_TOKEN", "")
    monkeypatch.delenv("OTHER_TOKEN")
    for name in ("old", "new"):
        (tmp_path / "runs" / name / "logs").mkdir(parents=True)
    old, new = (tmp_path / "runs" / name / "logs" / "train.log" for name in ("old", "new"))
    old.write_text("the old run")
    os.utime(old, (1, 1))
    new.write_bytes(b"key sk-of-the-environment, token sk-of-the-file\n\xff" + b"x" * 2 * doctor.LOG_HEAD + b"the end")
    (tmp_path / "elsewhere").write_text("another file of the machine")
    new.with_name("vllm.log").symlink_to(tmp_path / "elsewhere")
    assert art("doctor", "--bundle", "report.txt").code == 0
    text = (tmp_path / "report.txt").read_text()
    assert "key ***, token ***" in text and "sk-of" not in text
    assert "ok python: " in text and "\ntyper==" in text and f"--- {new}" in text
    assert not any(part in text for part in ("the old run", "another file", "the end"))
    assert art("doctor", "--bundle", "report.txt", "--run", "runs/old").code == 0
    assert "the old run" in (tmp_path / "report.txt").read_text()
    assert art("doctor", "--bundle", "report.txt", "--run", "nowhere").err == "error: --run nowhere: not a directory\n"
    assert not list(tmp_path.glob(".report*"))


def test_a_python_without_docstrings_is_refused_in_one_line(tmp_path: Path) -> None:
    """transformers reads docstrings when it is imported: it was "a bug in art: ValueError: No `Args`"."""
    command = [sys.executable, "-m", "art_cli", "--help"]
    environment = os.environ | {"PYTHONOPTIMIZE": "2"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "unset PYTHONOPTIMIZE" in done.stderr
    environment |= {"PYTHONOPTIMIZE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and "Usage: art" in done.stdout


# --- the package ------------------------------------------------------------------------------------------------------


def test_every_name_the_package_offers_is_there_and_is_what_it_says() -> None:
    for name in art_cli.__all__:
        assert getattr(art_cli, name).__name__ == name
    assert sorted(art_cli.__all__) == sorted(art_cli._HOMES) == dir(art_cli)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = art_cli.trian


def test_logs_go_to_standard_error_ours_from_info_others_from_warning(
    art: Art, capsys: pytest.CaptureFixture[str]
) -> None:
    log.set_up()
    logging.getLogger("art_cli.loop").info("ours")
    logging.getLogger("httpx").info("theirs")
    logging.getLogger("httpx").warning("their warning")
    out, err = capsys.readouterr()
    assert (out, err) == ("", "ours\ntheir warning\n")


# --- start ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"GOMP_SPINCOUNT": "1000"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE"}),
    ],
)
def test_threads_wait_politely_unless_the_environment_says_how_they_wait(
    given: dict[str, str], expected: dict[str, str]
) -> None:
    """What OpenMP will read is in the environment of the command's own process before torch is imported."""
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    program = (
        "import os, json, sys; sys.argv = ['art', '--version']\n"
        "from art_cli import __main__\nfrom art_cli.cli import app as cli\n"
        f"cli.main = lambda: print(json.dumps({{n: os.environ[n] for n in {names} if n in os.environ}}))\n"
        "__main__.main()"
    )
    clean = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, "-c", program], env=clean | given, capture_output=True, text=True, timeout=60
    )
    assert json.loads(done.stdout) == expected
