"""Which clients may ask `art serve`: by key, web page and address; and what the log says of them."""

import asyncio
import json
import logging
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from art_cli.chat.api_keys import Keys, check_exposure, read_key_texts
from art_cli.chat.wires import WIRES
from art_cli.cli import app as cli
from art_cli.runs.run_dir import RunDir
from art_cli.runtime.errors import UsageError
from art_cli.serving.serve_service import Limits, Service
from art_cli.serving.served_policies import Policies
from tests.support.processes import forked
from tests.support.servers.served import ScriptedLoader
from tests.support.servers.serving import (
    JSON,
    USER,
    client,
    number,
    run_line,
    say,
    send_raw,
    serving,
)


def routes_of(service: Service) -> list[tuple[str, str]]:
    """Every method and path of the application, and some that it does not have."""
    routes = service.app._app.routes  # type: ignore[attr-defined]
    found = [(method, re.sub("{.*}", "policy", route.path)) for route in routes for method in sorted(route.methods)]
    assert {("POST", "/v1/chat/completions"), ("GET", "/v1/models/policy"), ("GET", "/metrics")} < set(found)
    return [*found, ("GET", "/nowhere"), ("DELETE", "/v1/models"), ("OPTIONS", "/v1/completions"), ("GET", "/health/x")]


def ways_to_send(key: str) -> list[dict[str, Any]]:
    """Requests with the key in a wrong header or in the query."""
    headers: list[dict[str, Any]] = [
        {"Authorization": f"Basic {key}"},
        {"Authorization": key},
        {"X-Api-Key": key},
        {"Api-Key": key},
        {"Cookie": f"key={key}"},
    ]
    return [{"headers": given} for given in headers] + [
        {"params": {n: key}} for n in ("api_key", "key", "access_token")
    ]


OPENAIS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


def code_of(path: str, reply: httpx.Response) -> str:
    """What the error says it is, as the protocol of the path says it."""
    error: dict[str, str] = reply.json()["error"]
    return error["type" if path.startswith("/v1/messages") else "code"]


@pytest.mark.slow
async def test_without_a_key_only_health_answers(caplog: pytest.LogCaptureFixture) -> None:
    """Every route, on an address that others can reach: without a key, with wrong keys, with the key elsewhere."""
    caplog.set_level(1)
    key = "right-key-0123456789"
    wrong = [b"Bearer wrong-key-0123456789", f"Bearer {key[:-1]}", f"Bearer {key}x", "Bearer", b"Bearer \xff\xfe"]
    others: list[dict[str, Any]] = [{}, *({"headers": {"Authorization": sent}} for sent in wrong)]
    others += ways_to_send(key)
    async with serving(loader=ScriptedLoader(), keys=Keys([key, "other-key"]), host="0.0.0.0") as (service, root):
        for name in ("uvicorn.error", "uvicorn.access"):
            caplog.set_level(1, logger=name)
        async with httpx.AsyncClient(base_url=root) as http:
            for sent in others:
                for method, path in routes_of(service):
                    reply = await http.request(method, path, **sent)
                    if path == "/health":
                        assert reply.status_code == 200
                        continue
                    if "X-Api-Key" in sent.get("headers", {}) and path not in OPENAIS:
                        assert reply.status_code != 401, (method, path)  # the header of Anthropic's clients
                        continue
                    assert reply.status_code == 401, (method, path, sent)
                    assert method == "HEAD" or code_of(path, reply) in ("invalid_api_key", "authentication_error")
                    assert key not in reply.text
            for good in (key, "other-key"):
                headers = {"Authorization": f"Bearer {good}"}
                for method, path in routes_of(service):
                    assert (await http.request(method, path, headers=headers)).status_code != 401, (method, path)
            metrics = (await http.get("/metrics", headers=headers)).text
        async with client(root, key) as ai:
            assert await say(ai, "policy") == "ok"
    assert number(metrics, "art_requests_total", route="/v1/chat/completions", code="401") == len(others)
    written = logging.Formatter("%(name)s %(message)s")
    ours = "\n".join(
        written.format(r) for r in caplog.records if not r.name.startswith(("httpx", "httpcore", "openai"))
    )
    assert "POST /v1/chat/completions 401" in ours
    for text in (key[:-1], "other-key", "wrong-key"):
        assert text not in ours
        assert text not in repr(service.keys)
        assert text not in metrics


@pytest.mark.slow
async def test_no_key_is_in_anything_that_the_command_writes(run: RunDir, tmp_path: Path) -> None:
    """`art serve --verbose` on 0.0.0.0, as a process: good keys and a wrong one, right or elsewhere, on every route."""
    keys = ["environment-key-0123", "filekey", "wrong-key-0123"]
    (tmp_path / "keys").write_text(keys[1])
    routes = routes_of(Service(Policies([]), keys=Keys(), limits=Limits()))
    words = ["--verbose", "serve", run.root, "--host", "0.0.0.0", "--port", "0"]
    words += ["--engine", "embedded", "--json", "--api-key-file", tmp_path / "keys"]
    environment = os.environ | {"ART_API_KEY": keys[0]}
    process = forked.Forked(words, stdout=forked.PIPE, stderr=forked.PIPE, env=environment)
    try:
        assert process.stdout
        line = process.stdout.readline()
        root = json.loads(line)["url"].removesuffix("/v1")
        async with httpx.AsyncClient(base_url=root) as http:
            for key in keys:
                bearer = {"headers": {"Authorization": f"Bearer {key}"}}
                statuses = [(await http.request(*route, **bearer)).status_code for route in routes]
                assert (401 in statuses) == (key == keys[2])
                elsewhere = [(await http.post("/v1/completions", **sent)).status_code for sent in ways_to_send(key)]
                assert set(elsewhere) == {401}
                for url in (f"/v1/models/{key}", f"/{key}/v1/models", f"/v1/models/a%20{key}", f"/v1/models?key={key}"):
                    assert (await http.get(url)).status_code == 401
                broken = f"GET / HTTP/1.1\r\nAuthorization: Bearer {key}\r\n{key}\0\r\n\r\n"
                assert (await asyncio.to_thread(send_raw, root, broken.encode()))[0].startswith(b"HTTP/1.1 400 ")
        async with client(root, keys[0]) as ai:
            await say(ai, "mine", max_tokens=2)
    finally:
        process.terminate()
        out, err = process.communicate(240)
    assert process.returncode == 0
    written = line + out + err
    assert written.count("POST /v1/completions 401") == 1 + 3 * len(ways_to_send(""))
    assert written.count("GET /v1/models/* 401") == 2 * len(keys)
    assert written.count("GET /*/v1/models 401") == len(keys)
    assert "GET /metrics 200" in written  # which stands there under --verbose only
    assert not any(key in written for key in keys)


# What a browser sends for a page of elsewhere; PORT becomes the server's.
OF_PAGES: list[tuple[dict[str, str], int]] = [
    ({"Host": "rebound.example"}, 421),
    ({"Host": "rebound.example:PORT"}, 421),
    ({"Host": "localhost.rebound.example:PORT"}, 421),
    ({"Host": "127.0.0.1.rebound.example"}, 421),
    ({"Host": "192.168.1.5:PORT"}, 421),
    ({"Host": "localhost@rebound.example"}, 421),
    ({"Host": "0.0.0.0:PORT"}, 421),  # browsers take it for this machine
    ({"Host": ""}, 421),
    ({"Origin": "https://page.example"}, 403),
    ({"Origin": "null"}, 403),
    ({"Origin": "http://localhost:1"}, 403),
    ({"Origin": "http://localhost:PORT.page.example"}, 403),
    ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, 403),
    ({"Sec-Fetch-Site": "same-site"}, 403),
]
OF_PROGRAMS: list[dict[str, str]] = [
    {},
    {"Host": "localhost"},
    {"Host": "LOCALHOST:PORT"},
    {"Host": "[::1]:PORT"},
    {"Host": "127.0.0.1:9"},  # through a forwarded port
    {"Origin": "http://127.0.0.1:PORT", "Sec-Fetch-Site": "same-origin"},
    {"Sec-Fetch-Site": "none"},
    {"Content-Type": "application/json; charset=utf-8"},
]


@pytest.mark.slow
async def test_a_server_without_a_key_obeys_no_web_page() -> None:
    """Every route refuses what a browser sends for a foreign page or a rebound name, and nothing reaches the engine."""
    loader = ScriptedLoader()
    body = json.dumps({"model": "policy", "messages": [USER]})
    async with serving(loader=loader) as (service, root), httpx.AsyncClient(base_url=root) as http:
        port = root.rpartition(":")[2]
        for headers, status in OF_PAGES:
            sent = {name: value.replace("PORT", port) for name, value in headers.items()}
            for method, path in routes_of(service):
                reply = await http.request(method, path, headers={**JSON, **sent}, content=body)
                assert reply.status_code == status, (method, path, sent)
                codes = ("foreign_host", "foreign_origin", "invalid_request_error", "permission_error")
                assert method == "HEAD" or code_of(path, reply) in codes
                assert not any(name.startswith("access-control-") for name in reply.headers)
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", None):
            for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"):
                reply = await http.post(path, content=body, headers={} if kind is None else {"Content-Type": kind})
                code = "invalid_request_error" if path == "/v1/messages" else "unsupported_media_type"
                assert (reply.status_code, code_of(path, reply)) == (415, code)
        assert loader.engines[0].requests == []
        for headers in OF_PROGRAMS:
            sent = {name: value.replace("PORT", port) for name, value in headers.items()}
            reply = await http.post("/v1/chat/completions", content=body, headers={**JSON, **sent})
            assert reply.status_code == 200, sent
            assert (await http.get("/metrics", headers=sent)).status_code == 200
        assert len(loader.engines[0].requests) == len(OF_PROGRAMS)
        twice = f"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nHost: page.example\r\nConnection: close\r\n\r\n"
        assert (await asyncio.to_thread(send_raw, root, twice.encode()))[0].startswith(b"HTTP/1.1 421 ")
        old = b"GET /health HTTP/1.0\r\n\r\n"
        assert (await asyncio.to_thread(send_raw, root, old))[0].split()[1] == b"200"


async def test_programs_without_a_key_keep_working() -> None:
    """curl as the server prints it, the Python client, and node's fetch, which sends Sec-Fetch-Mode."""
    body = json.dumps({"model": "policy", "messages": [USER]})
    async with serving(loader=ScriptedLoader()) as (_, root):
        async with client(root) as ai:
            assert await say(ai, "policy") == "ok"
        url = f"{root.replace('127.0.0.1', 'localhost')}/v1/chat/completions"
        line = f"curl -s --ipv4 {url} -H 'Content-Type: application/json' -d {shlex.quote(body)}"
        assert json.loads(await run_line(line))["choices"][0]["message"]["content"] == "ok"
        if shutil.which("node"):
            options = {"method": "POST", "headers": JSON, "body": body}
            program = f"fetch('{root}/v1/chat/completions', {json.dumps(options)}).then(r => console.log(r.status))"
            assert await run_line(f"node -e {shlex.quote(program)}") == "200\n"


async def test_a_server_with_a_key_is_reached_by_any_name() -> None:
    """A proxy hands on the name that the world knows; the key says who asks."""
    headers = {"Authorization": "Bearer k", "Host": "models.example", "Origin": "https://app.example"}
    async with (
        serving(loader=ScriptedLoader(), keys=Keys(["k"])) as (_, root),
        httpx.AsyncClient(base_url=root) as http,
    ):
        body = {"model": "policy", "messages": [USER]}
        assert (await http.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200


def test_an_address_that_others_reach_needs_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org"):
        with pytest.raises(UsageError, match="it needs a key"):
            check_exposure(host, Keys())
        check_exposure(host, Keys(["k"]))
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        check_exposure(host, Keys())
    assert cli.run(["serve", "org/model", "--host", "0.0.0.0"]) == 2
    assert capsys.readouterr().err.startswith("error: --host 0.0.0.0: others can reach it, so it needs a key")


def test_keys_come_from_an_option_and_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nalpha\n\n  beta  \n")
    keys = Keys(read_key_texts("gamma", file))
    assert [keys.admits(key) for key in ("alpha", "beta", "gamma")] == [True] * 3
    assert [keys.admits(key) for key in ("# ours", "", None, "alph", "alpha ")] == [False] * 5
    assert Keys().admits(None)
    file.write_text("# none\n")
    with pytest.raises(UsageError, match="no keys in"):
        read_key_texts(None, file)
    file.write_text("kläy\n")
    with pytest.raises(UsageError, match="key 1: a key is printable ASCII") as caught:
        read_key_texts(None, file)
    assert "kläy" not in str(caught.value)
    with pytest.raises(UsageError, match="cannot read"):
        read_key_texts(None, tmp_path / "nothing")


@pytest.mark.slow
async def test_errors_of_paths_that_two_protocols_have_are_in_the_clients_own() -> None:
    """Every route that is no wire's, with a wrong key and the right one: by the header that Anthropic's SDK sends."""
    key, wires = "right-key-0123456789", {wire.path for wire in WIRES}
    async with serving(loader=ScriptedLoader(), keys=Keys([key])) as (service, root):
        async with httpx.AsyncClient(base_url=root) as http:
            num_errors = 0
            for method, path in [*routes_of(service), ("GET", "/v1/models/nope")]:
                for sent in (key, "wrong"):
                    headers = {"x-api-key": sent, "anthropic-version": "2023-06-01"}
                    theirs = await http.request(method, path, headers=headers)
                    ours = await http.request(method, path, headers={"Authorization": f"Bearer {sent}"})
                    if path in wires or method == "HEAD" or theirs.status_code < 400:
                        continue
                    num_errors += 1
                    assert theirs.json()["type"] == "error" and set(theirs.json()["error"]) == {"type", "message"}, path
                    assert "type" not in ours.json() and "code" in ours.json()["error"], path
            assert num_errors > 8
        import anthropic  # takes seconds, and no other test here needs it

        async with anthropic.AsyncAnthropic(base_url=root, api_key=key, max_retries=0) as client:
            with pytest.raises(anthropic.NotFoundError) as caught:
                await client.models.retrieve("nope")
    body: Any = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")
