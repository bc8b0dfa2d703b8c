"""The page as one file: the answers of the server inside a page that may load nothing."""

import base64
import gzip
import hashlib
import json
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import msgspec
import pytest

from art_cli.runs.run_dir import RunDir
from art_cli.view.page_answers import Answers
from art_cli.view.page_file import write_page
from art_cli.view.sources import Sources
from tests.support.records.attempts import scored, write_attempts
from tests.view.serving import asking


def written(
    paths: list[Path], html: Path, *, max_bytes: int = 10**8, drawing: Path | None = None
) -> tuple[str, dict[str, Any]]:
    """The page, and the answers in it."""
    write_page(Answers(Sources(paths), drawing=drawing), html, max_bytes=max_bytes)
    page = html.read_text()
    [data] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, flags=re.DOTALL)
    assert "<" not in data
    packed = json.loads(data)
    main = opened(packed["main"])
    parts = [opened(part) for part in packed["parts"]]
    assert main["where"] == {url: number for number, part in enumerate(parts) for url in part}
    return page, main["answers"] | {url: answer for part in parts for url, answer in part.items()}


def opened(part: str) -> dict[str, Any]:
    answers: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(part)))
    return answers


async def test_the_file_has_the_answers_of_the_server(tmp_path: Path) -> None:
    run = write_attempts(tmp_path / "mail")
    hostile = {
        "id": "a/b?<script>",
        "group_id": "</script>",
        "messages": [{"role": "user", "content": "</script><!--"}],
    }
    (tmp_path / "other.jsonl").write_text(json.dumps(hostile) + "\n")
    run.append_metrics(0, "train", {"reward_mean": 0.5})
    _, answers = written([tmp_path], tmp_path / "page.html")
    async with asking([tmp_path]) as ask:
        for url, answer in answers.items():
            if url in ("/api/sources", "/api/revision"):
                continue
            if url.endswith("/groups"):
                for row in answer["rows"]:
                    del row["text"]
            parts = [unquote(part) for part in url.removeprefix("/api/").split("/")]
            assert _without_text(await ask.get(*parts)) == answer, url
    rows = sum(1 for url in answers if "/trajectory/" in url)
    assert rows == 8 and answers["/api/sources"]["left_out"] == 0
    assert "/api/source/1/trajectory/a%2Fb%3F%3Cscript%3E" in answers


def _without_text(answer: Any) -> Any:
    for row in answer.get("rows", ()):
        row.pop("text", None)
    return answer


def test_a_file_that_would_be_too_large_keeps_the_best_and_the_worst(tmp_path: Path) -> None:
    path, html = tmp_path / "a.jsonl", tmp_path / "page.html"
    texts = [random.Random(n).randbytes(15_000).hex() for n in range(10)]  # which cannot be packed
    records = [
        scored("g", n, reward=n / 10, group_size=10, messages=[{"role": "user", "content": text}])
        for n, text in enumerate(texts)
    ]
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
    whole, _ = written([path], html)
    _, answers = written([path], html, max_bytes=len(whole) - 200_000)
    kept = {url.rpartition("/")[2] for url in answers if "/trajectory/" in url}
    assert {"g-0", "g-9"} <= kept and 2 <= len(kept) < 10
    assert answers["/api/sources"]["left_out"] == 10 - len(kept)
    assert html.stat().st_size <= len(whole) - 200_000
    assert len(answers["/api/source/0/step/0/train/groups"]["rows"][0]["rewards"]) == 10


def test_the_policy_allows_the_scripts_of_the_file_alone(tmp_path: Path) -> None:
    run = write_attempts(tmp_path / "mail")
    (tmp_path / "draw.js").write_text("draw() // </script>")
    page, answers = written([run.root], tmp_path / "page.html", drawing=tmp_path / "draw.js")
    [policy] = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert "default-src 'none'" in policy and "unsafe" not in policy
    scripts = re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)
    scripts += re.findall(r"<script>(.*?)</script>", answers["/api/source/0/drawing"], flags=re.DOTALL)
    styles = re.findall(r"<style>(.*?)</style>", page, flags=re.DOTALL)
    assert (len(scripts), len(styles)) == (2, 1)
    for text in (*scripts, *styles):
        assert f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" in policy
    assert not re.findall(r'<script[^>]*src=|<link[^>]*href="(?!data:)|https?://[^"]*"\s*>', page)
    assert page.index('id="data"') < page.rindex("<script>")  # the script finds the data when it runs


def test_a_drawing_that_lies_beside_the_run_is_left_out(tmp_path: Path) -> None:
    run = write_attempts(tmp_path / "mail")
    RunDir(run.root).drawing_path.write_text("draw()")
    page, answers = written([run.root], tmp_path / "page.html")
    assert "/api/source/0/drawing" not in answers and answers["/api/source/0"]["drawing"] is None
    assert page.count("'sha256-") == 2  # the page's own style and script


def test_the_command_writes_it_and_says_so(tmp_path: Path, art: Any) -> None:
    run = write_attempts(tmp_path / "mail")
    code, out, _ = art("view", run.root, "--html", tmp_path / "page.html")
    assert code == 0 and "7 trajectories" in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere"], "no such file or directory"),
        (["mail/checkpoints"], "it is part of the run"),
        (["empty"], "no run and no JSONL file in it"),
        (["config.yaml"], "not JSON lines; name a run"),
        (["mail", "--model", "x"], "--model: name its --endpoint too"),
        (["mail", "--drawing", "x.js"], "--drawing x.js: no such file"),
        (["mail", "--html", "page.html", "--max-mb", "0.1"], "the lists of groups alone are larger"),
        (["mail", "--endpoint", "http://127.0.0.1:9/v1"], "cannot list its models"),
        (["mail", "--endpoint", "http://127.0.0.1:9/v1", "--host", "0.0.0.0"], "0.0.0.0 could spend your key"),
        (["mail", "--host", "203.0.113.7"], "cannot listen on 203.0.113.7"),
    ],
)
def test_a_wrong_call_ends_in_one_line(
    tmp_path: Path, art: Any, monkeypatch: pytest.MonkeyPatch, arguments: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_attempts(tmp_path / "mail").checkpoints.mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "config.yaml").write_text("name: mail\n")
    code, out, err = art("view", *arguments, "--port", "0")
    assert code in (1, 2) and sentence in err.splitlines()[-1] and "Traceback" not in err and not out


@pytest.mark.slow
def test_ctrl_c_ends_the_server_without_a_word(tmp_path: Path) -> None:
    run = write_attempts(tmp_path / "mail")
    command = [sys.executable, "-m", "art_cli", "view", str(run.root), "--port", "0", "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        root = process.stdout.readline().strip()
        assert httpx.get(root).headers["content-type"].startswith("text/html")
        assert httpx.get(f"{root}api/sources").json()["sources"][0]["name"] == "mail"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "", "")
