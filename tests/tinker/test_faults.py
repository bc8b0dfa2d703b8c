"""What the user is told of a server of the Tinker protocol that fails: one line each, exit code 1, nothing lost.

docs/backend.md has these lines in a table; a test holds the two together.
"""

import asyncio
import gc
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from art_cli.cli import app as cli
from art_cli.config.schema import GrpoConfig, LoraConfig, TinkerEngineConfig, TinkerLearnerConfig, TrainConfig
from art_cli.learners import LearnerSetup
from art_cli.models.adapters import with_adapter
from art_cli.models.policy_spec import PolicySpec, spec_of
from art_cli.runs.manifest import Manifest, new_checkpoint
from art_cli.runtime.errors import RemoteError
from art_cli.tinker.client import remote_server as connection
from art_cli.tinker.client.remote_server import server_at
from art_cli.tinker.server import BackendLimits, routes
from art_cli.tinker.server.adapter_learner import AdapterLearner
from art_cli.tinker.tinker_learner import TinkerLearner
from tests.support.attacks.lossy_proxy import Asked, LossyProxy, Rates
from tests.support.paths import ROOT
from tests.support.servers.backend_server import serving, tiny_base

# the SDK leaves the connections of its first request open
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
KEY = "tml-right"
IDS = [5, 6, 7, 8]
Answer = Callable[[Asked], httpx.Response | None]


class Setting:
    """A server of one model behind a proxy, and learners that use it."""

    def __init__(self, proxy: LossyProxy, address: str, policy: PolicySpec) -> None:
        self.proxy, self.address, self.policy = proxy, address, policy
        self._made: list[TinkerLearner] = []

    def learner(self, *, timeout_s: float = 20.0) -> TinkerLearner:
        engine = TinkerEngineConfig(name="tinker", url=self.address, base_model="tiny", timeout_s=timeout_s)
        loss = GrpoConfig(name="grpo")
        made = TinkerLearner(
            self.policy,
            LearnerSetup(train=TrainConfig(learning_rate=1e-5), loss=loss, learner=TinkerLearnerConfig(name="tinker")),
            engine=engine,
            lora=LoraConfig(rank=4),
        )
        self._made.append(made)
        return made

    def close(self) -> None:
        """Frees the server's one place, whatever a test left behind."""
        self.proxy.instead = lambda asked: None
        while self._made:
            self._made.pop().close()
        gc.collect()  # the SDK's open connections are found here, where the mark above allows them


@contextmanager
def proxied(address: str) -> Iterator[tuple[LossyProxy, str]]:
    """A proxy before the server that changes nothing by itself, in a thread of its own, and its address."""
    proxy, is_ready, found = LossyProxy(address, seed=0, rates=Rates.none()), threading.Event(), {}

    async def run() -> None:
        async with proxy.serve() as found["address"]:
            found["loop"], found["end"] = asyncio.get_running_loop(), asyncio.Event()
            is_ready.set()
            await found["end"].wait()

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    assert is_ready.wait(30)
    yield proxy, found["address"]
    found["loop"].call_soon_threadsafe(found["end"].set)
    thread.join(30)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    base = tiny_base(tmp_path_factory.mktemp("tiny"))
    root, limits = tmp_path_factory.mktemp("root"), BackendLimits(models=1)
    with serving(base, root, keys=(KEY,), limits=limits) as address, proxied(address) as (proxy, lossy):
        yield Setting(proxy, lossy, spec_of(with_adapter(base.weights, LoraConfig(rank=4), 0)))


@pytest.fixture(autouse=True)
def quick(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The right key and short waits; afterwards a free server."""
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    monkeypatch.setattr(connection, "PROBE_S", 0.1)
    monkeypatch.setattr(connection, "GONE_S", 0.3)
    yield
    setting.close()


def on(path: str, answer: httpx.Response) -> Answer:
    return lambda asked: answer if asked.target.endswith(path) else None


def gone(setting: Setting, directory: Path, patch: pytest.MonkeyPatch) -> None:
    learner = setting.learner()
    learner.score(IDS)

    def broken(asked: Asked) -> None:
        raise ConnectionError

    setting.proxy.instead = broken
    learner.score(IDS)


def not_there(setting: Setting, directory: Path, patch: pytest.MonkeyPatch) -> None:
    server_at("http://127.0.0.1:9", "TINKER_API_KEY").capabilities()


def another_server(setting: Setting, directory: Path, patch: pytest.MonkeyPatch) -> None:
    setting.proxy.instead = lambda asked: httpx.Response(404)
    setting.learner().score(IDS)


def another_model(setting: Setting, directory: Path, patch: pytest.MonkeyPatch) -> None:
    server_at(setting.address, "TINKER_API_KEY").find_model("Qwen/Qwen3-8B")


def wrong_key(setting: Setting, directory: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("TINKER_API_KEY", "tml-wrong")
    setting.learner().score(IDS)


def no_such_key(setting: Setting, directory: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("TINKER_API_KEY", "sk-1")
    setting.learner()


def slow(setting: Setting, directory: Path, patch: pytest.MonkeyPatch) -> None:
    waiting = httpx.Response(408, json={"type": "try_again", "request_id": "1", "queue_state": "active"})
    setting.proxy.instead = on("/retrieve_future", waiting)
    setting.learner(timeout_s=1).score(IDS)


def full(setting: Setting, directory: Path, patch: pytest.MonkeyPatch) -> None:
    first, second = setting.learner(), setting.learner(timeout_s=1)
    first.score(IDS)  # its adapter is the one that the server has room for
    second.score(IDS)


def older_server(setting: Setting, directory: Path, patch: pytest.MonkeyPatch) -> None:
    setting.proxy.instead = on("/forward_backward", httpx.Response(415, json={"detail": "requires another body"}))
    setting.learner().score(IDS)


def restarted(setting: Setting, directory: Path, patch: pytest.MonkeyPatch) -> None:
    learner = setting.learner()
    learner.score(IDS)
    setting.proxy.instead = on("/forward_backward", httpx.Response(404, json={"detail": "no model"}))
    learner.score(IDS)


def full_disk_there(setting: Setting, directory: Path, patch: pytest.MonkeyPatch) -> None:
    def save(learner: AdapterLearner, directory: Path, *, optimizer: bool) -> None:
        raise OSError(28, "No space left on device")

    patch.setattr(AdapterLearner, "save", save)
    save_to(setting, directory / "step_0001")


def full_disk_here(setting: Setting, directory: Path, patch: pytest.MonkeyPatch) -> None:
    def write(directory: Path, remote: object) -> None:
        raise OSError(28, "No space left on device", "remote.json")

    patch.setattr("art_cli.tinker.tinker_learner.write_remote", write)
    save_to(setting, directory / "step_0001")


def save_to(setting: Setting, checkpoint: Path) -> None:
    learner = setting.learner()
    learner.score(IDS)
    with new_checkpoint(checkpoint, Manifest(step=1, base="x", config_hash="")) as made:
        learner.save(made)


FAULTS: dict[str, tuple[Callable[[Setting, Path, pytest.MonkeyPatch], None], str]] = {
    "not there": (
        not_there,
        "URL: nothing answers (REASON); start it, or mend engine.base_url",
    ),
    "gone": (gone, "URL: it has not answered for N s (WHAT); is it gone?"),
    "restarted": (
        restarted,
        "URL: it no longer has this run's session (WHAT), as after a restart; run the same command again, and the run "
        "continues from its last checkpoint",
    ),
    "slow": (slow, "URL: WHAT was not there within N s (engine.timeout_s); the server is slow, or full"),
    "full": (full, "URL: WHAT was not there within N s (engine.timeout_s); the server is slow, or full"),
    "another version": (
        older_server,
        "URL: its protocol version differs from tinker VERSION here (WHAT); docs/backend.md lists versions that work "
        "together",
    ),
    "another server": (
        another_server,
        "URL: no server of the Tinker protocol answers there: status 404",
    ),
    "another model": (
        another_model,
        "URL: it has no base model 'NAME'; it has: 'NAME'. engine.base_model names one where it is called otherwise "
        "than in model.base",
    ),
    "wrong key": (wrong_key, "URL: it refused the key; set the environment variable TINKER_API_KEY to the server's"),
    "no such key": (
        no_such_key,
        "TINKER_API_KEY: the SDK tinker takes only keys that begin with tml-; give the server such a key",
    ),
    "full disk there": (
        full_disk_there,
        "URL: saving the weights: no space left on the server's disk; nothing was saved: free some there",
    ),
    "full disk here": (full_disk_here, "PATH: no space left on the disk; free some and run the same command again"),
}

PATTERNS = {
    "URL": r"http://127\.0\.0\.1:\d+",
    "WHAT": r"[a-z_' ]+",
    "REASON": r"[^()]+",
    "NAME": r"[\w/.-]+",
    "VERSION": r"[\d.]+",
    "PATH": r"\S+",
    "N": r"[\d.]+",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_one_line_with_exit_code_1_and_leaves_nothing_half(
    name: str, setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cause, line = FAULTS[name]
    with pytest.raises(Exception) as raised, monkeypatch.context() as patch:
        cause(setting, tmp_path, patch)
    lines, code = cli.report(raised.value)
    pattern = re.sub(r"\b[A-Z]+\b", lambda word: PATTERNS.get(word[0], word[0]), re.escape(line))
    pattern = pattern.replace("docs/", r"\S*docs/")  # the page is named by its whole path
    assert len(lines) == 1 and re.fullmatch(f"error: {pattern}", lines[0]), lines
    assert code == 1
    assert KEY not in lines[0]
    assert list(tmp_path.iterdir()) == []


def test_the_lines_are_those_of_the_docs() -> None:
    text = (ROOT / "docs" / "backend.md").read_text(encoding="utf-8")
    assert [line for _, line in FAULTS.values() if f"`{line}`" not in text] == []


@pytest.mark.slow
def test_a_full_server_says_what_is_waited_for(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(routes, "PAUSED_S", 0.1)
    first, second = setting.learner(), setting.learner(timeout_s=3)
    first.score(IDS)
    with pytest.raises(RemoteError, match="the server is slow, or full"):
        second.score(IDS)
    assert "is paused. Reason: the server trains 1 models at once." in caplog.text


def test_a_connection_that_breaks_once_is_asked_again(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so is a server that answers 503, as a proxy does while its server starts."""
    monkeypatch.setattr("art_cli.tinker.client.remote_server.PAUSE_S", 0.01)
    answers = iter([None, httpx.Response(503), httpx.Response(429)])

    def at_first(asked: Asked) -> httpx.Response | None:
        if not asked.target.endswith("/get_server_capabilities"):
            return None
        answer = next(answers, "passed")
        if answer is None:
            raise ConnectionError
        return answer if isinstance(answer, httpx.Response) else None

    setting.proxy.instead = at_first
    try:
        [model] = server_at(setting.address, "TINKER_API_KEY").capabilities()
    finally:
        setting.proxy.instead = lambda asked: None
    assert model.model_name == "tiny" and next(answers, None) is None
