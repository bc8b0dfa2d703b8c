"""The page where a person compares two attempts: keys, storage, permissions."""

import asyncio
import json
import re
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import expect

from art_cli.runs.run_dir import RunDir
from art_cli.view.page_answers import Answers
from art_cli.view.sources import Sources
from art_cli.view.view_app import build_app
from tests.support.others.browser import chromium, faults, viewing
from tests.support.records.viewed import write_viewed_run
from tests.view.serving import asking

URL = "/api/source/0/step/1/train/label"


def kept(run: RunDir) -> list[str]:
    return [
        json.loads(line)["verdict"] for line in run.scored_path(1).with_name("labels.jsonl").read_text().splitlines()
    ]


async def test_an_answer_is_on_the_disk_when_the_next_pair_comes_and_nonsense_is_refused(tmp_path: Path) -> None:
    run = write_viewed_run(tmp_path / "run")
    async with asking([run.root]) as ask:
        first = (await ask.client.get(URL)).json()
        assert first["lines"][0].startswith("labels    0 of 33") and first["pair"].keys() == {
            "group_id",
            "left",
            "right",
        }
        second = (await ask.client.post(URL, json=first["pair"] | {"verdict": "left"})).json()
        assert (
            second["lines"][0].startswith("labels    1 of 33")
            and second["pair"] != first["pair"]
            and kept(run) == ["left"]
        )
        undone = (await ask.client.post(URL, json=first["pair"] | {"verdict": "undo"})).json()
        assert undone["pair"] == first["pair"] and kept(run) == ["left", "undo"]
        nonsense: list[tuple[bytes, int]] = [
            (b"[" * 60_000, 404),
            (b"x" * 100_000, 413),
            (json.dumps(first["pair"] | {"verdict": "best"}).encode(), 404),
            (json.dumps({"verdict": "left", "group_id": "../x", "left": "a", "right": "b"}).encode(), 404),
        ]
        for body, status in nonsense:
            answer = await ask.client.post(URL, content=body, headers={"content-type": "application/json"})
            assert answer.status_code == status and "error" in answer.json()
        assert (
            await ask.client.post("/api/source/0/step/9/train/label", json=first["pair"] | {"verdict": "undo"})
        ).status_code == 404
        assert kept(run) == ["left", "undo"]


async def test_two_pages_at_once_keep_both_answers(tmp_path: Path) -> None:
    run = write_viewed_run(tmp_path / "run")
    async with asking([run.root]) as ask:
        pair = (await ask.client.get(URL)).json()["pair"]
        answers = await asyncio.gather(*(ask.client.post(URL, json=pair | {"verdict": "equal"}) for _ in range(8)))
        assert {answer.status_code for answer in answers} == {200} and len(kept(run)) == 8
        assert (await ask.client.get(URL)).json()["lines"][0].startswith("labels    1 of 33")


async def test_other_sites_and_other_machines_cannot_answer(tmp_path: Path) -> None:
    run = write_viewed_run(tmp_path / "run")
    async with asking([run.root]) as ask:
        pair = (await ask.client.get(URL)).json()["pair"] | {"verdict": "left"}
        for headers in ({"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}, {"host": "evil.example"}):
            assert (await ask.client.post(URL, json=pair, headers=headers)).status_code == 403
        plain = await ask.client.post(URL, content=json.dumps(pair), headers={"content-type": "text/plain"})
        assert plain.status_code == 415
    transport = httpx.ASGITransport(build_app(Answers(Sources([run.root])), host="0.0.0.0"))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
        assert (await client.post(URL, json=pair)).status_code == 403
        for method in ("GET", "HEAD"):  # S6: a body with them is not read
            for kind in ("application/json", "text/plain", ""):
                body = json.dumps(pair).encode()
                answer = await client.request(method, URL, content=body, headers={"content-type": kind})
                assert answer.status_code == 200
    assert not run.scored_path(1).with_name("labels.jsonl").exists()


@pytest.mark.slow
def test_a_person_labels_with_keys_sees_no_score_and_goes_on_after_the_server_was_killed(tmp_path: Path) -> None:
    run = write_viewed_run(tmp_path / "run")
    with chromium() as browser:
        page = browser.new_page()
        said: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        with viewing(run.root) as root:
            page.goto(f"{root}/#/s/0/step/1/train")
            page.get_by_role("link", name="label pairs").click()
            expect(page).to_have_url(re.compile("label$"))
            expect(page.locator("h1")).to_have_text("Which is better?")
            expect(page.locator(".panel .message")).to_have_count(10)  # five of each
            text = page.locator("main").inner_text()
            assert "names the thing" not in text and "0.25" not in text and "reward" not in text
            assert not faults(page)
            status = page.get_by_role("status").filter(has_text="pairs")
            for num, key in enumerate(("1", "ArrowRight", "0"), 1):
                page.keyboard.press(key)
                expect(status).to_contain_text(f"{num} of 33 pairs")
            page.keyboard.press("u")
            expect(status).to_contain_text("2 of 33 pairs")
            page.get_by_role("button", name="left is better").click()
            expect(status).to_contain_text("3 of 33 pairs")
            page.goto("about:blank")
        assert kept(run) == ["left", "right", "equal", "undo", "left"]
        with viewing(run.root) as root:
            page.goto(f"{root}/#/s/0/step/1/train/label")
            status = page.get_by_role("status").filter(has_text="pairs")
            expect(status).to_contain_text("3 of 33 pairs")
            page.keyboard.press("q")
            expect(page.locator("h1")).to_have_text("Step 1")
            page.goto("about:blank")
        assert said == []
