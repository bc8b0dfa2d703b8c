"""The server of `art view` over real HTTP: answers, refusals, and robustness against blocking files."""

import asyncio
import json
import math
import os
import re
import threading
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from art_cli.chat.http_server import serve
from art_cli.judges.judge_report import make_report
from art_cli.reports.pages.plan_text import plan_sections
from art_cli.reports.pages.report_text import KINDS, promised_rows
from art_cli.reports.run_report import read_report
from art_cli.runs.run_dir import RunDir
from art_cli.view.chat import ChatRelay
from art_cli.view.page_answers import Answers
from art_cli.view.sources import Sources
from art_cli.view.view_app import NUM_THREADS, PageGuard, build_app, is_own_name
from tests.support.attacks.hostile import NUM_MUTATIONS, Heartbeat, mutations
from tests.support.records.attempts import scored, write_attempts
from tests.support.records.runs import write_run
from tests.support.records.viewed import write_promise
from tests.support.servers.chat_server import ChatServer, chatting
from tests.support.servers.serving import send_raw
from tests.view.serving import Asking, asking


async def test_a_run_is_answered_for_as_the_records_have_it(tmp_path: Path) -> None:
    run = write_attempts(tmp_path / "mail")
    async with asking([run.root]) as ask:
        [source] = (await ask.get("sources"))["sources"]
        assert (source["name"], source["kind"], source["num_trajectories"]) == ("mail", "run", 7)
        assert [(s["step"], s["split"], s["num_groups"]) for s in source["steps"]] == [
            (0, "train", 2),
            (0, "eval", 1),
            (1, "train", 1),
        ]
        step = ("source", 0, "step", 0, "train")
        rows = (await ask.get(*step, "groups"))["rows"]
        assert [(row["group_id"], row["rewards"], row["error"], row["num_tokens"]) for row in rows] == [
            ("s0000-g0000", [0.75, 0.75], None, 5),
            ("s0000-g0001", [0.75, None], "timeout", 5),
        ]
        group = await ask.get(*step, "group", "s0000-g0001")
        assert group["previous"] == "s0000-g0000" and group["next"] is None
        assert [each["error"] for each in group["attempts"]] == [None, "timeout: not finished"]
        assert group["attempts"][0]["scores"][0]["explanation"] == "found at once"
        records = {record.id: record for record in run.scored(0)}
        for id in rows[0]["ids"] + rows[1]["ids"]:
            answer = await ask.get("source", 0, "trajectory", id)
            expected = msgspec.to_builtins(records[id])
            del expected["turns"]
            assert answer["trajectory"] == expected
            assert [turn["segments"][-1]["ids"] for turn in answer["turns"]] == [[2, 2, 2], [4, 4]]
        scenario = await ask.get("source", 0, "scenario", "mail-1")
        assert [(a["step"], a["split"]) for a in scenario["attempts"]] == [(0, "train")] * 2 + [(0, "eval")] * 2 + [
            (1, "train")
        ]
        assert "tool: 1 mail of Ann" in scenario["attempts"][0]["reply"]
        judged = await ask.get("source", 0, "judge", 0)
        assert judged["report"] == msgspec.to_builtins(make_report(run.scored_path(0))[0])


async def test_curves_and_findings_are_those_of_art_report(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a", collapses_at=12), write_run(tmp_path / "b", steps=12)]
    async with asking([tmp_path]) as ask:
        found, report = await ask.get("source", 0), read_report(runs[0])
        assert [(f["kind"], f["title"], f["step"], f["text"]) for f in found["findings"]] == [
            (f.kind, KINDS[f.kind], f.step, f.text) for f in report.findings
        ]
        assert report.findings  # else the line above compares nothing
        rewards = [each for each in found["evaluations"] if each["metric"] == "reward"]
        points = [each.reward for each in report.evaluations if each.reward is not None]
        assert [(e["step"], e["mean"], e["low"], e["high"]) for e in rewards] == [
            (p.step, p.mean, p.low, p.high) for p in points
        ]
        lines = {line.step: line.metrics for line in runs[0].metrics() if line.split == "train"}
        assert dict(found["metrics"]["train"]["entropy"]) == {step: m["entropy"] for step, m in lines.items()}
        assert dict(found["stages"]["train"]) == {step: m["train_s"] for step, m in lines.items()}


async def test_the_plan_is_that_of_art_plan_and_what_happened_that_of_art_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan may come while the page is open, be of more steps than were done yet, and be replaced."""
    monkeypatch.setattr("art_cli.view.page_answers.LOOK_S", 0.0)
    run = write_run(tmp_path / "a", steps=12)
    async with asking([tmp_path]) as ask:
        assert (await ask.get("source", 0))["plan"] is None
        assert [each["has_plan"] for each in (await ask.get("sources"))["sources"]] == [False]
        before = (await ask.get("revision"))["revision"]
        promise = write_promise(run, steps=40)
        assert (await ask.get("revision"))["revision"] > before
        plan = (await ask.get("source", 0))["plan"]
        assert plan["sections"] == json.loads(msgspec.json.encode(plan_sections(promise)))
        assert plan["expected"][0] == ["", "promised", "80 % interval"]
        assert {row[0] for row in plan["expected"][1:]} == promise.expected.keys()
        write_promise(run, steps=12)
        plan = (await ask.get("source", 0))["plan"]
        assert plan["expected"] == promised_rows(msgspec.to_builtins(read_report(run))) and len(plan["expected"]) > 2
        run.promise_path.write_text("{")
        found = await ask.get("source", 0)
        assert found["plan"] is None and found["metrics"]["train"]["entropy"] and "promise.json" in found["problems"][0]


async def test_a_run_is_followed_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that asks again sees the new group, the new step and the new number, and the revision says so."""
    monkeypatch.setattr("art_cli.view.page_answers.LOOK_S", 0.0)
    run = write_attempts(tmp_path / "mail")
    async with asking([run.root]) as ask:
        before = (await ask.get("revision"))["revision"]
        assert (await ask.get("revision"))["revision"] == before
        with run.scored_path(0).open("ab") as file:
            file.write(msgspec.json.encode(scored("s0000-g0002", 0)) + b'\n{"id": "torn')
        run.append_metrics(0, "train", {"reward_mean": 0.5})
        assert (await ask.get("source", 0, "step", 0, "train", "groups"))["total"] == 3
        assert (await ask.get("source", 0))["metrics"]["train"]["reward_mean"] == [[0, 0.5]]
        assert (await ask.get("revision"))["revision"] > before
        assert not (await ask.get("sources"))["sources"][0]["steps"][0]["problems"]


async def test_learned_numbers_stand_beside_their_tokens(tmp_path: Path) -> None:
    run = write_attempts(tmp_path / "mail")
    learned = {"id": "s0000-g0000-0", "advantages": [0.5, [0.1, None]], "logprobs": [[-1, -2, -3], [-4]], "loss": 0.25}
    run.scored_path(0).with_name("learned.jsonl").write_text(json.dumps(learned) + "\n" + '{"id": "half')
    async with asking([run.root]) as ask:
        answer = await ask.get("source", 0, "trajectory", "s0000-g0000-0")
        sampled = [turn["segments"][-1] for turn in answer["turns"]]
        assert [each["advantages"] for each in sampled] == [[0.5, 0.5, 0.5], [0.1, None]]
        assert [each["learner_logprobs"] for each in sampled] == [[-1, -2, -3], None]  # one number for two tokens
        assert answer["loss"] == 0.25


# --- refusals ---------------------------------------------------------------------------------------------------------


async def test_other_sites_are_refused(tmp_path: Path) -> None:
    async with asking([write_attempts(tmp_path / "mail").root]) as ask:
        port = ask.client.base_url.port
        own = f"127.0.0.1:{port}"

        async def status(host: str = own, **headers: str) -> int:
            sent = {"host": host, **{name.replace("_", "-"): value for name, value in headers.items()}}
            return (await ask.client.get("/api/sources", headers=sent)).status_code

        for host in (own, f"localhost:{port}", f"LOCALHOST:{port}", f"[::1]:{port}"):
            assert await status(host) == 200, host
        for host in (f"evil.example:{port}", "127.0.0.1", "127.0.0.1:1", f"127.0.0.1.evil.example:{port}", "", "::1"):
            assert await status(host) == 403, host
        assert await status(origin=f"http://{own}", sec_fetch_site="same-origin") == 200
        assert await status(sec_fetch_site="none") == 200
        for origin in ("http://evil.example", "null", f"https://{own}", f"http://localhost:{port}"):
            assert await status(origin=origin) == 403, origin
        for site in ("cross-site", "same-site", ""):
            assert await status(sec_fetch_site=site) == 403, site


@pytest.mark.slow
async def test_no_method_of_any_route_answers_under_another_sites_name(tmp_path: Path) -> None:
    """Built from the router, so new routes are included."""
    answers = Answers(Sources([write_attempts(tmp_path / "mail").root]))
    guard = build_app(answers, host="127.0.0.1")
    assert isinstance(guard, PageGuard) and isinstance(guard._app, Starlette)
    paths = [re.sub(r"\{(\w+)(:\w+)?\}", "0", route.path) for route in guard._app.routes if isinstance(route, Route)]
    assert len(paths) > 10
    async with asking([tmp_path / "mail"]) as ask:
        port = ask.client.base_url.port
        wrong = [{"host": f"evil.example:{port}"}, {"host": f"[2001:db8::1]:{port}"}, {"host": f"127.0.0.1.:{port}.x"},
                 {"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}]  # fmt: skip
        for path in [*paths, "/nowhere", "//api/sources", "/api/sources/"]:
            for method in ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE"):
                for headers in wrong:
                    refused = await ask.client.request(method, f"http://127.0.0.1:{port}{path}", headers=headers)
                    assert refused.status_code == 403, (method, path, headers)


def test_a_server_on_all_addresses_is_asked_by_address_or_own_name() -> None:
    assert is_own_name("192.168.1.4", "0.0.0.0") and is_own_name("box.lan", "box.lan")
    assert not is_own_name("evil.example", "0.0.0.0")
    assert not is_own_name("192.168.1.4", "127.0.0.1")


async def test_names_in_urls_are_never_paths(tmp_path: Path) -> None:
    (tmp_path / "secret.jsonl").write_text('{"messages": [], "id": "s", "group_id": "s"}\n')
    run = write_attempts(tmp_path / "runs" / "mail")
    async with asking([run.root]) as ask:
        for name in ("../secret.jsonl", "...", "%2e%2e/secret.jsonl", "/etc/passwd", "a\x00b", "\ud7ff", "x" * 5000):
            for url in (("source", name), ("source", 0, "trajectory", name), ("source", 0, "scenario", name),
                        ("source", 0, "step", 0, "train", "group", name), ("source", 0, "step", 0, name, "groups"),
                        ("source", name, "drawing"), (name,)):  # fmt: skip
                assert set(await ask.get(*url)) == {"error"}, url
        for path in ("/%2e%2e/run_dir.py", "/page_file.py", "/app.py"):
            assert (await ask.client.get(path)).status_code == 404, path
    app = build_app(Answers(Sources([run.root])), host="127.0.0.1")
    async with serve(app) as root:  # sent literally, because clients normalize paths
        for path in ("/app.js/../../../run_dir.py", "/app.js/../../view_app.py", "//etc/passwd", "/../run_dir.py"):
            head = f"GET {path} HTTP/1.1\r\nhost: {root.removeprefix('http://')}\r\nconnection: close\r\n\r\n"
            answer, _ = await asyncio.to_thread(send_raw, root, head.encode())
            assert answer.startswith(b"HTTP/1.1 404"), (path, answer[:200])


async def test_ids_of_any_form_are_found_by_their_links(tmp_path: Path) -> None:
    names = ["a/b", "..%2f", "a?b#c", "ä €", "'\"<b>", "../../etc/passwd", ".", "\u202e"]
    records = [{"id": name, "group_id": name, "messages": [{"role": "user", "content": name}]} for name in names]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    async with asking([path]) as ask:
        rows = (await ask.get("source", 0, "step", 0, "train", "groups"))["rows"]
        for row, name in zip(rows, names, strict=True):
            for answer in (
                await ask.get("source", 0, "step", 0, "train", "group", row["group_id"]),
                await ask.get("source", 0, "trajectory", row["ids"][0]),
            ):
                assert answer["group_id"] == row["group_id"]
            assert answer["trajectory"]["messages"][0]["content"] == name


async def test_a_query_that_makes_no_sense_is_answered(tmp_path: Path) -> None:
    async with asking([write_attempts(tmp_path / "mail").root]) as ask:
        for query in ({"sort": "x"}, {"limit": "-1"}, {"offset": "1e999"}, {"min": "NaN"}, {"max": "x"}, {"limit": "²"},
                      {"text": "x" * 10_000}, {"order": "up"}, {"offset": "9" * 400}):  # fmt: skip
            answer = await ask.get("source", 0, "step", 0, "train", "groups", **query)
            assert answer["total"] in (0, 2) and len(answer["rows"]) <= 2


# --- hostile files ----------------------------------------------------------------------------------------------------


async def ask_all(ask: Asking) -> int:
    """Asks every possible question about every source. Returns the number of trajectories seen."""
    num = 0
    for source in (await ask.get("sources"))["sources"]:
        await ask.get("source", source["id"])
        await ask.get("source", source["id"], "drawing")
        for each in source["steps"]:
            step = ("source", source["id"], "step", each["step"], each["split"])
            await ask.get(*step, "histogram")
            await ask.get("source", source["id"], "judge", each["step"])
            await ask.get(*step, "groups", text="e")
            for row in (await ask.get(*step, "groups", sort="spread"))["rows"]:
                assert set(await ask.get(*step, "group", row["group_id"])) >= {"attempts", "tree"}
                await ask.get("source", source["id"], "scenario", row["scenario_id"])
                for id in row["ids"][:3]:
                    assert "turns" in await ask.get("source", source["id"], "trajectory", id)
                    num += 1
    return num


@pytest.mark.slow
async def test_damaged_runs_are_answered_and_never_hold_the_server_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file of a run is damaged in various ways; each request gets an answer or an error message."""
    monkeypatch.setattr("art_cli.view.page_answers.LOOK_S", 0.0)
    run = write_attempts(tmp_path / "mail")
    run.append_metrics(0, "train", {"reward_mean": 0.5, "train_s": 1.0})
    write_promise(run, steps=1)
    read = (run.scored_path(0), run.eval_path(0), run.metrics_path, run.config_path, run.promise_path)
    good = {path: path.read_bytes() for path in (*read, run.trajectories_path(1))}
    learned = run.scored_path(0).with_name("learned.jsonl")
    good[learned] = b'{"id": "s0000-g0000-0", "advantages": [0.5, [0.1, 0.2]], "logprobs": [[-1, -2, -3], [-4, -5]]}\n'
    num = 0
    async with asking([run.root]) as ask, Heartbeat() as heart:
        for number, (path, data) in enumerate(good.items()):
            for damaged in mutations(data, seed=number, count=NUM_MUTATIONS // 50):
                os.replace(_written(tmp_path / "damaged", damaged), path)
                num += await ask_all(ask)
            os.replace(_written(tmp_path / "damaged", data), path)
    assert heart.longest_s < 1.0
    assert num > 100


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def long_lines() -> dict[str, list[Any]]:
    calls = [{"id": str(n), "type": "function", "function": {"name": "f", "arguments": "{}"}} for n in range(10_000)]
    deep: Any = 1
    for _ in range(900):
        deep = [deep]
    return {
        "long": [{"role": "user", "content": "<script>" + "x" * 1_000_000}],
        "calls": [{"role": "assistant", "content": None, "tool_calls": calls}],
        "deep": [{"role": "user", "content": deep}],
        "surrogates": [{"role": "user", "content": "\ud800 half \udfff"}],
        "bidi": [{"role": "\u202e" * 9, "content": "\u202e</script>\x00\x1b[2J"}],
        "types": [{"role": 7, "content": {"a": math.nan}}, {"role": None, "tool_calls": [1, {"function": 3}]}],
        "many": [{"role": "user", "content": str(n)} for n in range(20_000)],
    }


@pytest.mark.slow
async def test_extreme_conversations_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = long_lines()
    path.write_text("".join(json.dumps({"id": n, "group_id": n, "messages": m}) + "\n" for n, m in lines.items()))
    async with asking([path]) as ask:
        async with Heartbeat() as heart:
            assert await ask_all(ask) == len(lines)
        assert heart.longest_s < 1.0
        found = {name: (await ask.get("source", 0, "trajectory", name))["trajectory"] for name in lines}
        assert found["long"]["messages"] == lines["long"]
        assert found["calls"]["messages"] == lines["calls"]
        assert found["surrogates"]["messages"][0]["content"] == "\ufffd half \ufffd"
        assert found["bidi"]["messages"] == lines["bidi"]
        assert found["deep"]["error"].startswith("unreadable: its JSON is nested more than")
        tree = (await ask.get("source", 0, "step", 0, "train", "group", "calls"))["tree"]["nodes"]
        assert len(tree[0]["calls"]) == 100 and tree[0]["num_left_out"] == 9_900


# --- the chat and the drawing -----------------------------------------------------------------------------------------


async def test_the_chat_relays_a_conversation_and_hides_the_key(tmp_path: Path) -> None:
    server = ChatServer(lambda body, number: "hello" if number < 3 else (500, {"error": {"message": "key sk-secret"}}))
    with chatting(server):
        relay = ChatRelay(server.api_base, "mine", "sk-secret")
        async with asking([write_attempts(tmp_path / "mail").root], chat=relay) as ask:
            messages = [{"role": "user", "content": "hi"}]

            async def post(**sent: Any) -> httpx.Response:
                return await ask.client.post("/api/chat", **sent)

            answer = await post(json={"messages": messages, "temperature": 0.5})
            assert answer.json()["message"]["content"] == "hello"
            assert server.asked[0]["messages"] == messages
            assert (server.asked[0]["model"], server.asked[0]["temperature"]) == ("mine", 0.5)
            for body in (b"", b"[]", b"{}", b'{"messages": 3}', b"[" * 100_000, b'{"messages": [{"role": "x"}]}'):
                refused = await post(content=body, headers={"content-type": "application/json"})
                assert (refused.status_code, set(refused.json())) == (400, {"error"}), body[:20]
            assert (await post(content=b"{}", headers={"content-type": "text/plain"})).status_code == 415
            large = await post(json={"messages": [{"role": "user", "content": "x" * 5_000_000}]})
            assert large.status_code == 413
            await post(json={"messages": messages})
            failed = await post(json={"messages": messages})
            assert failed.status_code == 500 and "sk-secret" not in failed.text
        await relay.close()


async def test_an_endpoint_that_does_not_answer_is_one_sentence(tmp_path: Path) -> None:
    relay = ChatRelay("http://127.0.0.1:9/v1", "mine", "k")
    async with asking([write_attempts(tmp_path / "mail").root], chat=relay) as ask:
        failed = await ask.client.post("/api/chat", json={"messages": [{"role": "user", "content": "hi"}]})
        assert failed.status_code == 502 and "127.0.0.1:9" in failed.json()["error"]
    await relay.close()


async def test_the_page_of_a_drawing_can_load_nothing(tmp_path: Path) -> None:
    run = write_attempts(tmp_path / "mail")
    RunDir(run.root).drawing_path.write_text("draw('</script><script>alert(1)</script>') // <!-- ")
    async with asking([run.root]) as ask:
        assert (await ask.get("sources"))["sources"][0]["drawing"] == "found"
        response = await ask.client.get("/api/source/0/drawing")
        policy = response.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'sha256-") and "sandbox allow-scripts" in policy
        assert response.text.count("<script>") == response.text.count("</script") == 1
        page = await ask.client.get("/")
        assert "unsafe" not in page.headers["content-security-policy"]


async def test_an_answer_that_nobody_waits_for_holds_up_no_other(tmp_path: Path) -> None:
    began, is_over = threading.Event(), threading.Event()

    def sources() -> None:
        began.set()
        is_over.wait(60)

    async with asking([write_attempts(tmp_path / "mail").root]) as ask:
        ask.answers.sources = sources  # type: ignore[assignment, method-assign]
        for _ in range(NUM_THREADS + 1):
            began.clear()
            with pytest.raises(httpx.ReadTimeout):
                await ask.client.get("/api/sources", timeout=1.0)
            assert began.is_set()
        assert "config" in await ask.get("source", 0)
        is_over.set()


async def test_many_questions_at_once_are_answered(tmp_path: Path) -> None:
    async with asking([write_attempts(tmp_path / "mail").root]) as ask:
        answers = await asyncio.gather(*(ask.get("source", 0, "step", 0, "train", "groups") for _ in range(50)))
        assert all(answer["total"] == 2 for answer in answers)
