"""`art backend --print`: the file of each kind of machine starts the server with exactly the given options."""

import ast
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from art_cli.config.compose import load_backend
from tests.support.paths import ROOT

Art = Callable[..., tuple[int, str, str]]
PAGE = (ROOT / "docs/machines.md").read_text()
OWN = {  # what each kind of machine needs besides
    "skypilot": ("--checkpoints", "s3://mine/art"),
    "kubernetes": ("--image", "ghcr.io/me/art:1"),
    "slurm": (),
    "modal": (),
}
HOSTILE = "a'b\"c $(touch x) `id` $HOME $$ $(HOME) $$(HOME) \\n %s {x} # é | && ; <x> *"
FAKE_ART = f"#!{sys.executable}\nimport json, os, sys\nopen(os.environ['SEEN'], 'w').write(json.dumps(sys.argv[1:]))\n"


def printed(art: Art, kind: str, *options: str) -> str:
    code, out, errors = art("backend", *options, *OWN[kind], "--print", kind)
    assert code == 0, errors
    return out


def shell(script: str, place: Path, **environment: str) -> list[str]:
    """The arguments that a bash script calls `art` with."""
    (place / "art/bin").mkdir(parents=True)
    for name in ("art", "scontrol"):
        program = place / "art/bin" / name
        program.write_text(FAKE_ART if name == "art" else "#!/bin/sh\n")
        program.chmod(0o700)
    path = f"{place / 'art/bin'}{os.pathsep}{os.environ['PATH']}"
    known = {"PATH": path, "HOME": str(place), "SEEN": str(place / "seen"), "ART_API_KEY": "tml-k", **environment}
    subprocess.run(["bash", "-c", script], cwd=place, env=known, check=True, timeout=30)
    seen: list[str] = json.loads((place / "seen").read_text())
    return seen


def container_of(text: str) -> dict[str, Any]:
    deployment = next(each for each in yaml.safe_load_all(text) if each["kind"] == "Deployment")
    container: dict[str, Any] = deployment["spec"]["template"]["spec"]["containers"][0]
    return container


def expanded(word: str) -> str:
    """A word of a container's command as Kubernetes passes it on, which knows no variables here."""
    return re.sub(r"\$(\$|\([^)]*\))", lambda found: "$" if found[1] == "$" else found[0], word)


def arguments(kind: str, text: str, place: Path) -> list[str]:
    """The arguments that `art` gets, by the way that each kind of machine starts it."""
    if kind == "skypilot":
        return shell(yaml.safe_load(text)["run"], place)
    if kind == "slurm":
        return shell(text, place)
    if kind == "kubernetes":
        words = [expanded(word) for word in container_of(text)["command"]]
    else:
        assigned = [node for node in ast.parse(text).body if isinstance(node, ast.Assign)]
        words = ast.literal_eval(assigned[0].value)
    assert words[0] == "art"
    return words[1:]


@pytest.mark.parametrize("kind", OWN)
def test_the_page_shows_what_is_printed(kind: str, art: Art, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ART_API_KEY", raising=False)
    command = next(line for line in PAGE.splitlines() if line.startswith("art ") and f"--print {kind} " in line)
    code, out, _ = art(*command.split(" > ")[0].split()[1:])
    assert code == 0 and len(out) > 400
    assert f"\n{out}```\n" in PAGE


@pytest.mark.parametrize("kind", OWN)
def test_each_option_arrives_as_it_was_given(kind: str, art: Art, tmp_path: Path) -> None:
    given = [f"learner.device={json.dumps('cpu')}", "--base", HOSTILE, "--models", "3", "--session", "1234567"]
    text = printed(art, kind, *given, "--json", "--port", "9000")
    seen = arguments(kind, text, tmp_path)
    where = {"slurm": "backend"}.get(kind, "/checkpoints")
    rest = ["--host", "0.0.0.0", "--port", "9000", "--checkpoints", where]
    assert sorted(seen) == sorted(["backend", *given, "--json", *rest])
    assert seen[:2] == ["backend", given[0]] and seen[seen.index("--base") + 1] == HOSTILE
    assert not (tmp_path / "x").exists(), "nothing of an option was run"


@pytest.mark.parametrize("kind", OWN)
def test_a_configuration_goes_along_with_its_overrides(kind: str, art: Art, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("model: {base: 'org/model $x', lora: {rank: 4}}\nlearner: {name: torch}\n")
    given = [str(tmp_path / "mine.yaml"), "learner.micro_batch_tokens=4096"]
    text = printed(art, kind, *given)
    seen = arguments(kind, text, tmp_path)
    if kind == "slurm":
        assert seen[1:3] == given, "it reads the file where it is"
        return
    if kind == "skypilot":
        sent = (tmp_path / "art-backend.yaml").read_text()
    elif kind == "kubernetes":
        sent = next(each for each in yaml.safe_load_all(text) if each["kind"] == "ConfigMap")["data"]["config.yaml"]
    else:
        literals = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
        sent = next(each for each in literals if isinstance(each, str) and "org/model" in each)
    (tmp_path / "sent.yaml").write_text(sent)
    here, there = load_backend(Path(given[0]), given[1:]), load_backend(tmp_path / "sent.yaml")
    assert (here.model, here.engine, here.learner) == (there.model, there.engine, there.learner)
    assert not [word for word in seen if "mine.yaml" in word]


@pytest.mark.parametrize("kind", OWN)
def test_a_key_is_never_in_the_file(
    kind: str, art: Art, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ART_API_KEY", "tml-hidden-1")
    keys = tmp_path / "keys"
    keys.write_text("tml-hidden-1\ntml-hidden-2\n")
    for options in ((), ("--api-key", "tml-hidden-2"), ("--api-key-file", str(keys))):
        text = printed(art, kind, "--base", "org/model", *options)
        assert "hidden" not in text and "ART_API_KEY" in text + ("ART_API_KEY" if "--api-key-file" in options else "")


def test_several_keys_arrive_as_a_file_that_only_the_server_reads(art: Art, tmp_path: Path) -> None:
    text = printed(art, "skypilot", "--base", "org/model", "--api-key-file", "keys")
    seen = shell(yaml.safe_load(text)["run"], tmp_path, ART_API_KEYS="tml-a\ntml-b")
    file = Path(seen[seen.index("--api-key-file") + 1])
    assert file.read_text() == "tml-a\ntml-b\n" and file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--base", "a\nb"), "line break"),
        (("--base", "a", "--checkpoints", "s3://x\x00/y"), "line break or control"),
        (("--base", "a", "--host", "127.0.0.1"), "--host 127.0.0.1"),
        (("--base", "a", "--port", "0"), "--port 0"),
        (("--base", "a", "--gpu", "H100; reboot"), "--gpu"),
        (("--base", "a", "--image", "x y"), "--image"),
        (("--base", "a", "--checkpoints", "here"), "absolute path"),
        (("--base", "."), "on this machine"),
        (("--base", "model.py:build"), "on this machine"),
        (("--base", "org/hidden-value"), "MY_TOKEN"),
        (("--base", "a", "engine=vllm", "engine.env={HF_TOKEN: abcdefgh}"), "named like a secret"),
        (("--base", "a", "model.lora=null", "engine=vllm"), "model.lora"),
        ((), "which model"),
    ],
)
def test_what_no_file_can_hold_is_refused(
    options: tuple[str, ...], said: str, art: Art, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "hidden-value")
    code, out, errors = art("backend", *options, "--print", "modal")
    assert (code, out) == (2, "") and said in errors and len(errors.splitlines()) == 1


def test_a_file_needs_what_its_machine_needs(art: Art) -> None:
    for kind, said in (("skypilot", "s3://"), ("kubernetes", "--image"), ("nomad", "one of skypilot")):
        code, out, errors = art("backend", "--base", "org/model", "--print", kind)
        assert (code, out) == (2, "") and said in errors
    code, _, errors = art("backend", "--base", "org/model", "--image", "x")
    assert code == 2 and "go with --print" in errors


@pytest.mark.parametrize(("sent", "is_queued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_a_job_of_slurm_stops_its_server_and_is_queued_again_when_its_time_is_over(
    sent: signal.Signals, is_queued: bool, art: Art, tmp_path: Path
) -> None:
    server = (
        f"#!{sys.executable} -S\nimport signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        "print('ready', flush=True)\nsignal.sigwait([signal.SIGTERM])\nopen('stopped', 'w').close()\n"
    )
    for name, text in (("art", server), ("scontrol", '#!/bin/sh\necho "$@" > queued\n')):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o700)
    known = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "ART_API_KEY": "tml-k", "SLURM_JOB_ID": "7"}
    script = printed(art, "slurm", "--base", "org/model")
    job = subprocess.Popen(["bash", "-c", script], cwd=tmp_path, env=known, stdout=subprocess.PIPE, text=True)
    assert job.stdout is not None
    assert job.stdout.readline().startswith("TINKER_BASE_URL=http://") and job.stdout.readline() == "ready\n"
    job.send_signal(sent)
    assert job.wait(20) == 0 and (tmp_path / "stopped").exists()
    job.stdout.close()
    assert (tmp_path / "queued").exists() == is_queued
    assert not is_queued or (tmp_path / "queued").read_text() == "requeue 7\n"
