"""Logs of `art log --inspect`, read by the real inspect, and its bundled page opened in a real Chromium."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles

from art_cli.cli import app as cli
from tests.support.others.browser import chromium
from tests.support.others.real_readers import MARKS, answer, run
from tests.support.processes.waiting import wait_until
from tests.support.records.attempts import write_attempts

pytestmark = MARKS

# Returns inspect's view of every log in a directory, as JSON.
READ = """
import json, sys
from inspect_ai.log import list_eval_logs, read_eval_log, read_eval_log_sample_summaries
seen = {}
for info in list_eval_logs(sys.argv[1]):
    log = read_eval_log(info)
    seen[log.eval.task + "/" + str(log.eval.task_args["step"])] = {
        "log": log.model_dump(mode="json"),
        "summaries": [each.model_dump(mode="json") for each in read_eval_log_sample_summaries(info)],
    }
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("inspect")
    run_dir = write_attempts(home / "run")
    assert cli.run(["log", str(run_dir.root), "--inspect", "-o", str(home / "logs")]) == 0
    return home / "logs"


@pytest.fixture(scope="module")
def seen(logs: Path) -> dict[str, Any]:
    found: dict[str, Any] = answer("-c", READ, str(logs), home=logs.parent)
    return found


def test_a_scenario_is_a_sample_and_an_attempt_an_epoch_with_scores_and_the_judges_words(seen: dict[str, Any]) -> None:
    assert sorted(seen) == ["run-eval/0", "run-train/0", "run-train/1"]
    log = seen["run-train/0"]["log"]
    assert log["status"] == "success" and log["eval"]["model"] == "builtin:tiny"
    assert seen["run-train/1"]["log"]["status"] == "cancelled"
    samples = {(each["id"], each["epoch"]): each for each in log["samples"]}
    assert sorted(samples) == [("mail-1", 1), ("mail-1", 2), ("mail-2", 1), ("mail-2", 2)]
    first = samples["mail-1", 1]
    assert first["scores"]["reward"]["value"] == 0.75 and "found at once" in first["scores"]["reward"]["explanation"]
    assert first["scores"]["ruler"]["explanation"] == "found at once"
    assert first["scores"]["ruler"]["metadata"]["votes"] == [0.5, 1.0]
    assert first["scores"]["metric.found"]["value"] == 1.0
    assert first["model_usage"]["builtin:tiny"]["input_tokens"] == 5 + 12
    assert first["model_usage"]["builtin:tiny"]["output_tokens"] == 5 and first["total_time"] == 10.0
    assert samples["mail-2", 1]["limit"]["type"] == "turn"
    assert samples["mail-2", 2]["error"]["message"] == "timeout: not finished"
    mean = {each["name"]: each["metrics"]["mean"]["value"] for each in log["results"]["scores"]}
    assert mean["reward"] == 0.75 and log["results"]["total_samples"] == 4 == len(seen["run-train/0"]["summaries"])
    assert seen["run-eval/0"]["log"]["samples"][0]["scores"]["reward"]["value"] == 0.25


def test_calls_of_the_model_and_of_tools_are_events_with_their_messages(seen: dict[str, Any]) -> None:
    sample = seen["run-train/0"]["log"]["samples"][0]
    kinds = [event["event"] for event in sample["events"]]
    assert kinds == ["sample_init", "model", "tool", "model", "score", "score", "score", "score"]
    _, model, tool, second, *_ = sample["events"]
    assert [message["role"] for message in model["input"]] == ["system", "user"]
    assert [message["role"] for message in second["input"]] == ["system", "user", "assistant", "tool"]
    reply = model["output"]["choices"][0]
    assert reply["stop_reason"] == "tool_calls" and reply["message"]["tool_calls"][0]["arguments"] == {
        "query": "cheese"
    }
    assert reply["message"]["content"][0]["reasoning"] == "I should look."
    assert model["config"]["temperature"] == 0.8 and model["output"]["usage"]["output_tokens"] == 3
    assert model["tools"][0]["parameters"]["properties"]["query"]["description"] == "words"
    assert (tool["function"], tool["arguments"], tool["result"]) == ("search", {"query": "cheese"}, "1 mail of Ann")
    assert second["output"]["completion"] == "It was Ann."


def test_its_bundled_page_shows_the_logs_and_a_sample_without_an_error(logs: Path) -> None:
    page_files = logs.parent / "page"
    words = ["view", "bundle", "--log-dir", str(logs), "--output-dir", str(page_files)]
    made = run(
        "-c",
        f"import sys; sys.argv = ['inspect', *{words!r}]; from inspect_ai._cli.main import main; main()",
        home=logs.parent,
    )
    assert made.returncode == 0, made.stderr[-2000:]
    with served(page_files) as url, chromium() as browser:
        page = browser.new_page()
        errors, missing = list[str](), set[str]()
        page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("response", lambda answer: missing.add(answer.url.rpartition("/")[2]) if answer.status >= 400 else None)
        page.goto(url)
        page.get_by_text("run-train").first.wait_for()
        page.get_by_text("run-eval").first.click()
        page.get_by_text("Who wrote about cheese?").first.wait_for()
        page.get_by_text("Who wrote about cheese?").first.click()
        page.get_by_text("It was Ann.").first.wait_for()
        # inspect looks for these two files of its own beside any logs, and Chromium writes a line for each
        assert missing == {"eval-set.json", "flow.yaml"}
        assert [each for each in errors if not each.startswith("Failed to load resource")] == []


@contextmanager
def served(directory: Path) -> Iterator[str]:
    """The address of a host of static files that answers range requests, as inspect's page needs it."""
    app = Starlette(routes=[Mount("/", StaticFiles(directory=directory, html=True))])
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join(30)
