"""A client without a key learns nothing but that it needs one, and one with a key nothing of another's."""

import itertools
import re
import uuid
from collections.abc import Iterator
from typing import Any, cast

import httpx
import pytest
from starlette.routing import Route

from art_cli.chat.api_keys import Keys
from art_cli.tinker.server.tinker_service import REFUSED, build_app
from tests.support.servers.backend_server import Client, datum, passing, serving, tiny_base

KEY = "tml-right"
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "BREW")
OPEN = [("GET", "/health"), ("HEAD", "/health"), ("GET", "/api/v1/downloads/0"), ("HEAD", "/api/v1/downloads/0")]
NAMES_NOTHING = ("/health", "healthz", "get_server_capabilities", "client/config", "client/dynamic_config", "telemetry")
NAMES_NOTHING += ("create_session", "sessions", "sessions/search", "training_runs", "checkpoints", "downloads/{token}")
BAD: list[list[tuple[str, str | bytes]]] = [
    [],
    [("x-api-key", "")],
    [("x-api-key", "tml-wrong")],
    [("x-api-key", KEY[:-1])],
    [("x-api-key", KEY + "x")],
    [("x-api-key", f'"{KEY}"')],
    [("x-api-key", KEY.upper())],
    [("x-api-key", "é".encode())],
    [("x-api-key", b"\x00" + KEY.encode())],
    [("x-api-key", "k" * 2**20)],
    [("x-api-key", "tml-wrong"), ("x-api-key", KEY)],
    [("x-api-key", KEY), ("x-api-key", "tml-wrong")],
    [("x-api-key", KEY), ("authorization", "Bearer tml-wrong")],
    [("x-api-key", ""), ("authorization", f"Bearer {KEY}")],
    [("authorization", "Bearer")],
    [("authorization", "Bearer ")],
    [("authorization", f"Basic {KEY}")],
    [("authorization", f"Bearer {KEY}, Bearer {KEY}")],
    [("authorization", KEY)],
    [("cookie", f"x-api-key={KEY}")],
    [("connection", "upgrade"), ("upgrade", "websocket")],
]


def paths() -> list[str]:
    """Those of the router, with something in their variables, and what they could be taken for."""
    app = build_app(cast(Any, None), Keys([KEY]))
    served = [route.path for route in app.routes if isinstance(route, Route)]
    assert len(served) > 40 and len(served) == len(app.routes)
    found = {path.replace("{rest:path}", "x").replace("{token}", "0") for path in served}
    for name in ("id", "kind", "name"):
        found = {path.replace(f"{{{name}}}", "0") for path in found}
    return sorted(found)


def twisted(path: str) -> list[str]:
    head, _, last = path.rpartition("/")
    named = [f"{path}/", f"/{path}", f"{head}/./{last}", f"{head}/%2e%2e/{last}", path.upper(), f"{path}?api_key={KEY}"]
    return [*named, f"{path}%00", f"{path};x"]


@pytest.mark.slow
async def test_no_path_and_method_answers_anything_but_401_without_the_key() -> None:
    """Made from the router, so that a new route that forgets the key fails. The routes have no state here: a request
    that is let in is a 500."""
    app = build_app(cast(Any, None), Keys([KEY]))
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    answers = set()
    async with httpx.AsyncClient(transport=transport) as http:

        async def ask(method: str, path: str, headers: list[tuple[str, str | bytes]]) -> None:
            content = [("content-type", "application/json")]
            answer = await http.request(method, f"http://here{path}", headers=[*content, *headers], content=b"{}")  # type: ignore[list-item]
            assert answer.status_code == 401, (method, path, headers)
            if method != "HEAD":
                answers.add((answer.content, tuple(answer.headers.items())))

        served = paths()
        for path in served:
            for method in METHODS:
                if (method, path) not in OPEN:
                    for headers in BAD if method in ("GET", "POST") else BAD[:3]:
                        await ask(method, path, headers)
        closed = [path for path in served if ("GET", path) not in OPEN]
        for path in ["/", "/nothing", "/api/v1/nothing", *itertools.chain(*map(twisted, closed))]:
            await ask("GET", path, [])
            await ask("POST", path, BAD[2])
        right = [
            await http.get("http://here/health"),
            await http.get("http://here/api/v1/healthz", headers={"x-api-key": KEY}),
        ]
        right += [await http.get("http://here/api/v1/healthz", headers={"authorization": f"Bearer {KEY}"})]
        assert [answer.status_code for answer in right] == [200] * 3
    assert len(answers) == 1, "one answer for all"


# --- one client and another's ids -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, Client]]:
    base = tiny_base(tmp_path_factory.mktemp("tiny"))
    with (
        serving(base, tmp_path_factory.mktemp("root"), keys=("tml-a", "tml-b")) as address,
        Client(address, "tml-a") as mine,
        Client(address, "tml-b") as other,
    ):
        yield mine, other


def probes(session: str, model: str, own: str, name: str, request: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Every request that names a session, a model, a checkpoint, a sampler or a request; `own` is the asker's model."""
    run = f"training_runs/{model}"
    at, uri = f"{run}/checkpoints/weights/{name}", f"tinker://{model}/weights/{name}"
    sampler, data = f"{session}:sample:0", passing(datum([1, 2, 3]))
    prompt = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]}, "sampling_params": {"max_tokens": 1}}
    new = {"session_id": session, "base_model": "tiny"}
    numbered = {"model_id": model, "seq_id": 90}
    posts: list[tuple[str, dict[str, Any]]] = [
        ("session_heartbeat", {"session_id": session}),
        (f"sessions/{session}/finish", {}),
        ("create_model", {**new, "model_seq_id": 0, "lora_config": {"rank": 4}}),
        ("create_sampling_session", {**new, "sampling_session_seq_id": 0}),
        ("get_info", {"model_id": model}),
        ("unload_model", {"model_id": model}),
        ("forward", {**numbered, "forward_input": data}),
        ("forward_backward", {**numbered, "forward_backward_input": data}),
        ("forward_backward", {**numbered, "forward_backward_input": 7}),
        ("optim_step", numbered),
        ("save_weights", {**numbered, "path": name, "overwrite": True}),
        ("save_weights_for_sampler", {**numbered, "sampling_session_seq_id": 0}),
        ("save_weights_external", {**numbered, "path": name}),
        ("load_weights", {**numbered, "path": uri}),
        ("load_weights", {"model_id": own, "path": uri}),
        ("load_weights", {"path": uri, "session_id": own.partition(":")[0], "model_seq_id": 90}),
        ("weights_info", {"tinker_path": uri}),
        ("asample", {**prompt, "sampling_session_id": sampler, "seq_id": 0}),
        ("asample", {**prompt, "model_path": uri}),
        ("retrieve_future", {"request_id": request}),
        ("cancel_future", {"request_id": request}),
        (f"{at}/publish", {}),
    ]
    gets = [f"sessions/{session}", run, f"{run}/checkpoints", f"samplers/{sampler}", f"{at}/archive"]
    found = [("POST", path, fields) for path, fields in posts] + [("GET", path, {}) for path in gets]
    found += [("GET", f"{at}/external_weights_urls".replace("/weights/", "/external_weights/"), {})]
    return [*found, ("DELETE", at, {}), ("DELETE", f"{at}/publish", {}), ("PUT", f"{at}/ttl", {"ttl_seconds": 3600})]


def test_each_route_that_names_something_is_probed() -> None:
    """Made from the router, so that a new route is probed below, or is added to those that name nothing."""
    app = build_app(cast(Any, None), Keys([KEY]))
    asked = [(method, f"/api/v1/{path}") for method, path, _ in probes("s", "m", "o", "x", "r")]
    for route in app.routes:
        assert isinstance(route, Route)
        is_probed = any(route.path_regex.match(path) and method in (route.methods or ()) for method, path in asked)
        path = route.path.removeprefix("/api/v1/")
        assert is_probed or path in NAMES_NOTHING or path in {each.removeprefix("/") for each in REFUSED}, path


@pytest.mark.slow
def test_anothers_ids_and_their_neighbours_are_as_unknown_ones(clients: tuple[Client, Client]) -> None:
    """Each answer to B about what is A's is that about an id that never was, but for the id; and A's is as it was."""
    mine, other = clients
    model, own = mine.new_model(), other.new_model()
    mine.call("save_weights", model_id=model, seq_id=1, path="x")
    mine.call("save_weights_external", model_id=model, seq_id=2, path="x")
    mine.post("create_sampling_session", session_id=mine.session, sampling_session_seq_id=0, base_model="tiny")
    listed = mine.http.get("checkpoints").json()
    near = f"{int(mine.session, 16) ^ 1:032x}"
    there = [mine.session, model, own, "x", f"{model}:1"]
    cases = [there, [*there[:4], f"{model}:2"], [near, f"{near}:train:0", own, "x", f"{near}:train:0:1"]]
    cases.append([mine.session, f"{mine.session}:train:1", own, "x", f"{mine.session}:0"])
    nobody = uuid.uuid4().hex
    unknown = probes(nobody, f"{nobody}:train:0", own, "x", f"{nobody}:train:0:1")
    for ids in cases:
        for asked, plain in zip(probes(*ids), unknown, strict=True):
            found, wanted = answered(other, *asked), answered(other, *plain)
            assert found == wanted, asked
            assert found[0] >= 400 or "no checkpoint" in found[1], (asked, found)
    assert mine.http.get("checkpoints").json() == listed
    assert mine.post("get_info", model_id=model)["model_id"] == model
    assert "path" in mine.post("retrieve_future", request_id=f"{model}:1")


def answered(client: Client, method: str, path: str, fields: dict[str, Any]) -> tuple[int, str]:
    """The status and the text of the answer, or of the failure that it promises, without the ids in it."""
    answer = client.http.request(method, path, json=fields if method != "GET" else None)
    text = answer.text
    if answer.status_code == 200 and "request_id" in answer.json():
        text = str(client.result(answer.json()["request_id"]))
    return answer.status_code, re.sub(r"[0-9a-f]{32}(:train:\d+|:sample:\d+)?(:\d+)?", "ID", text)
