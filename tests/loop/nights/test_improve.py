"""`art improve` from end to end: a gateway of its own process, real clients, training, gates, canary and verdict."""

import asyncio
import contextlib
import json
import os
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from art_cli.config.compose import LoadedConfig, load_config
from art_cli.loop.nights.canary_test import Rating
from art_cli.loop.nights.night import GateResult, Night, Nights, Trial, _begin, _gated_sets, _start, improve, roll_back
from art_cli.loop.nights.traffic import Traffic
from art_cli.loop.record import claim_config
from art_cli.runs.durable import lock_directory, read_lines, write_lines
from art_cli.runs.feedback import FeedbackEntry
from art_cli.runs.manifest import Manifest, new_checkpoint, verify_checkpoint
from art_cli.runs.run_dir import RunDir
from art_cli.runs.served import Canary, Served, read_served, write_served
from art_cli.runs.trajectory import Trajectory
from art_cli.runtime.errors import CheckpointError, ConfigError, RunError, UsageError
from tests.support.paths import LETTERS
from tests.support.processes import forked

KEY = "sk-ann-0123456789"
SETTINGS = """
gateway: {feedback: {thumbs: {type: boolean}}, group_size: 4}
improve:
  canary: {metric: thumbs, share: 0.5}
  scenario: "traffic.py:scenario"
  min_scenarios: 4
  steps: 1
  gates: {tasks: "reward>=0", traffic: "reward>=0"}
"""
TRAFFIC = """
def scenario(conversation, feedback):
    asked = [message["content"] for message in conversation["messages"] if message["role"] == "user"]
    return {"ask": asked[0]} if asked[0] != "leave me out" else None
"""
WORDS = ["apple", "pear", "plum", "fig", "date", "lime", "kiwi", "nut", "oat", "rye", "corn", "bean"]


class Project:
    """A directory with a run of one step, and the commands in it."""

    def __init__(self, directory: Path, *, is_new: bool = True) -> None:
        self.directory, self.root = directory, directory / "runs" / "letters"
        if not is_new:
            return
        shutil.copytree(LETTERS, directory, ignore=shutil.ignore_patterns("runs", "__pycache__"))
        config = directory / "config.yaml"
        config.write_text(config.read_text() + SETTINGS)
        (directory / "traffic.py").write_text(TRAFFIC)

    def art(self, *words: str, code: int = 0) -> str:
        done = forked.run([words[0], "config.yaml", *words[1:]], cwd=self.directory, timeout=300)
        assert done.returncode == code, done.stderr
        return done.stdout if code == 0 else done.stderr

    def improve(self, *words: str) -> Any:
        return json.loads(self.art("improve", "--json", *words))

    @contextlib.contextmanager
    def gateway(self) -> Iterator["Clients"]:
        words = ["gateway", "config.yaml", "--follow", "--port", "0", "--json"]
        environment = {**os.environ, "ART_API_KEY": KEY}
        with forked.Forked(words, cwd=self.directory, stdout=forked.PIPE, env=environment) as process:
            try:
                assert process.stdout is not None
                url = json.loads(process.stdout.readline())["url"]
                with httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEY}"}, timeout=60) as http:
                    yield Clients(http, self.root / "gateway")
            finally:
                process.terminate()
                process.wait(60)

    def policies(self) -> dict[str, list[str]]:
        """The policies of each recorded conversation."""
        paths = sorted((self.root / "gateway").glob("trajectories-*.jsonl"))
        found = [each for path in paths for each in read_lines(path, Trajectory)]
        return {each.id: sorted({turn.policy for turn in each.turns}) for each in found}


class Clients:
    def __init__(self, http: httpx.Client, directory: Path) -> None:
        self._http, self._directory = http, directory

    def ask(self, text: str, name: str, num_calls: int = 1) -> list[str]:
        """Returns the ids of a conversation's replies."""
        ids = []
        for number in range(num_calls):
            asked = {"role": "user", "content": text + " again" * number}
            body = {"model": "letters", "max_tokens": 4, "messages": [asked]}
            response = self._http.post("/chat/completions", json=body, headers={"X-Art-Conversation": name})
            assert response.status_code == 200, response.text
            assert "x-art-policy" not in response.headers, "clients must not see which policy answered"
            ids.append(response.json()["id"])
        return ids

    def rate(self, reply: str, value: bool) -> None:
        body = {"metric_name": "thumbs", "value": value, "inference_id": reply}
        assert self._http.post("/feedback", json=body).status_code == 200

    def policy_of(self, replies: Sequence[str]) -> list[str]:
        """Rates the replies for a look at the policies, which only the files name."""
        for reply in replies:
            self._http.post("/feedback", json={"metric_name": "comment", "value": "seen", "inference_id": reply})
        entries = list(read_lines(self._directory / "feedback.jsonl", FeedbackEntry))
        by_reply = {entry.reply: entry.policy for entry in entries}
        return [by_reply[reply.removeprefix("chatcmpl-")] for reply in replies]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = Project(tmp_path_factory.mktemp("improve") / "letters")
    project.art("train", "train.steps=1")
    return project


@pytest.mark.slow
def test_two_nights_one_promoted_one_taken_back(project: Project) -> None:
    """The second night's candidate is rated badly. Clients see no failed request and always one policy."""
    with project.gateway() as clients:
        for number, word in enumerate(WORDS):
            clients.ask(f"say {word} please", f"first {number}", num_calls=2)
        clients.ask("leave me out", "odd")
    night = project.improve()["night"]
    assert (night["number"], night["num_scenarios"], night["num_held_out"], night["outcome"]) == (1, 10, 2, "")
    assert {gate["scenarios"] for gate in night["gates"]} <= {"tasks", "traffic"}
    served = read_served(project.root)
    assert served is not None and served.canary is not None and served.canary.policy != served.policy
    assert project.improve()["night"]["trial"]["num_promoted"] == 0, "no feedback yet"

    with project.gateway() as clients:
        replies = [clients.ask("say it", f"second {number}", num_calls=2) for number in range(80)]
        policies = [clients.policy_of(ids) for ids in replies]
        assert all(len(set(each)) == 1 for each in policies), "a conversation keeps its policy"
        num_candidate = sum(each[0] == served.canary.policy for each in policies)
        assert 20 <= num_candidate <= 60
        for ids, (policy, _) in zip(replies, policies, strict=True):
            clients.rate(ids[-1], policy == served.canary.policy)
        result = project.improve()["night"]
        assert result["outcome"] == "promoted", result
        # the gateway follows without a restart, and no conversation sees the old policy any more
        promoted = read_served(project.root)
        assert promoted is not None and promoted.policy == served.canary.policy and promoted.canary is None
        _wait_for(lambda number: clients.policy_of(clients.ask("say it", f"later {number}"))[0] == promoted.policy)
        for number, word in enumerate(WORDS):
            clients.ask(f"sing a {word} song", f"third {number}")
    assert RunDir(project.root).checkpoint_steps() == [0, 1], "nights have runs of their own"
    night = project.improve()["night"]
    assert night["number"] == 2 and night["baseline"] == promoted.checkpoint and not night["outcome"], night

    with project.gateway() as clients:
        served = read_served(project.root)
        assert served is not None and served.canary is not None
        for number in range(80):
            (id,) = clients.ask("say it", f"fourth {number}")
            clients.rate(id, clients.policy_of([id])[0] != served.canary.policy)
    assert project.improve()["night"]["outcome"] == "rolled back"
    assert read_served(project.root) == promoted
    history = project.improve("--history")["nights"]
    assert [each["outcome"] for each in history] == ["promoted", "rolled back"]
    assert project.improve("--rollback")["checkpoint"] == history[0]["baseline"]
    assert "nothing was promoted" in project.art("improve", "--rollback", code=1)


@pytest.fixture
def filled(project: Project, tmp_path: Path) -> Project:
    """A copy of the project with new traffic, and no night yet."""
    shutil.copytree(project.directory, tmp_path / "letters", ignore=shutil.ignore_patterns("nights", "served.json"))
    copy = Project(tmp_path / "letters", is_new=False)
    shutil.rmtree(copy.root / "gateway", ignore_errors=True)
    with copy.gateway() as clients:
        for number, word in enumerate(WORDS):
            clients.ask(f"say {word} please", f"first {number}")
    return copy


@pytest.mark.slow
def test_a_night_that_is_killed_at_any_instant_resumes(filled: Project) -> None:
    draw = random.Random(0)
    for _ in range(4):
        with forked.Forked(
            ["improve", "config.yaml"], cwd=filled.directory, stdout=forked.DEVNULL, stderr=forked.DEVNULL
        ) as process:
            time.sleep(draw.uniform(0, 3))
            process.kill()
        served = read_served(filled.root)
        assert served is None or served.canary is None or filled.improve("--history")["nights"][0]["gates"]
    night = filled.improve()["night"]
    served = read_served(filled.root)
    assert served is not None and served.canary is not None and served.canary.checkpoint == night["candidate"]
    assert (night["number"], night["outcome"], night["num_scenarios"]) == (1, "", 10)
    run = RunDir(filled.root / "nights" / "night_0001" / "run")
    assert run.checkpoint_steps()[-1] == RunDir(filled.root).checkpoint_steps()[0] + 1
    paths = sorted((filled.root / "nights" / "night_0001" / "gates").glob("*.jsonl"))
    for path in paths:  # each scenario once by each policy
        ids = [each.scenario_id for each in read_lines(path, Trajectory)]
        assert len(ids) == len(set(ids)) > 0


@pytest.mark.slow
def test_another_machine_goes_on_with_a_night_from_the_store(filled: Project, tmp_path: Path) -> None:
    store = f"store=file://{tmp_path}/bucket"
    begun = filled.improve(store)["night"]
    assert not begun["outcome"] and begun["trial"]
    there = Project(tmp_path / "there", is_new=False)
    shutil.copytree(filled.directory, there.directory, ignore=shutil.ignore_patterns("runs"))
    assert there.improve(store)["night"] == begun
    served = read_served(there.root)
    assert served is not None and served == read_served(filled.root) and served.canary is not None
    for checkpoint in (served.checkpoint, served.canary.checkpoint):
        assert verify_checkpoint(there.root / checkpoint)
    assert not list((tmp_path / "bucket").rglob("*lock"))
    with there.gateway() as clients:
        for number in range(40):
            (id,) = clients.ask("say it", f"there {number}")
            clients.rate(id, clients.policy_of([id])[0] == served.canary.policy)
    assert there.improve(store)["night"]["outcome"] == "promoted"
    assert [each["outcome"] for each in filled.improve(store, "--history")["nights"]] == [""]
    filled.improve(store)  # overtaken: it gets what the other machine made
    assert read_served(filled.root) == read_served(there.root)


@pytest.mark.slow
def test_a_candidate_that_misses_a_gate_is_never_served(filled: Project) -> None:
    gate = "improve.gates={traffic: 'reward>=baseline+1.5'}"
    night = filled.improve(gate)["night"]
    served = read_served(filled.root)
    assert night["outcome"] == "gates missed" and "traffic: reward>=baseline+1.5, found" in night["reason"]
    assert served is not None and served.canary is None and served.checkpoint == night["baseline"]
    assert "0 new scenarios in 0 conversations" in filled.improve(gate)["text"]
    report = filled.root / "nights" / "night_0001" / "night.json"
    files = [str((filled.root / file).resolve()) for file in night["files"]]
    relative = report.read_text()
    report.write_text(json.dumps(json.loads(relative) | {"files": files}))  # as an earlier version wrote it
    assert "0 new scenarios in 0 conversations" in filled.improve(gate)["text"]
    report.write_text(relative)
    moved = Project(filled.directory.rename(filled.directory.with_name("moved")), is_new=False)
    assert "0 new scenarios in 0 conversations" in moved.improve(gate)["text"]


@pytest.mark.slow
def test_a_night_that_fails_says_why_and_is_given_up_after_three_tries(filled: Project) -> None:
    (filled.directory / "broken.py").write_text("async def rollout(policy, scenario):\n    raise OSError('no shop')\n")
    night = filled.improve("rollout.entry=broken.py:rollout")["night"]
    assert night["outcome"] == "no update" and "no shop" in night["reason"]

    shutil.rmtree(filled.root / "nights")
    night = filled.improve("train.max_kl=1e-12")["night"]
    assert night["outcome"] == "no update" and "train.max_kl" in night["reason"]

    shutil.rmtree(filled.root / "nights")
    (checkpoint,) = filled.root.glob(f"{night['baseline']}/adapter_model.safetensors")
    checkpoint.chmod(0o600)
    checkpoint.write_bytes(b"damaged")
    for _ in range(2):
        assert "adapter_model.safetensors" in filled.art("improve", code=1)
    assert "adapter_model.safetensors" in filled.art("improve", code=1), "an outage of an hour gives no night up"
    (report,) = filled.root.glob("nights/*/night.json")
    report.write_text(json.dumps(json.loads(report.read_text()) | {"started_at": time.time() - 90_000}))
    night = filled.improve()["night"]
    assert (night["outcome"], night["num_failures"]) == ("failed", 4) and "adapter_model" in night["reason"]
    assert "adapter_model.safetensors" in filled.art("improve", code=1), "the next night reads the same conversations"
    served = read_served(filled.root)
    assert served is not None and served.canary is None


@pytest.mark.slow
def test_a_candidate_that_cannot_be_loaded_answers_nobody(filled: Project) -> None:
    filled.improve()
    served = read_served(filled.root)
    assert served is not None and served.canary is not None
    adapter = filled.root / served.canary.checkpoint / "adapter_model.safetensors"
    adapter.chmod(0o600)
    adapter.write_bytes(adapter.read_bytes()[:-1] + b"?")
    with filled.gateway() as clients:
        replies = [clients.ask("say it", f"damaged {number}")[0] for number in range(20)]
        assert set(clients.policy_of(replies)) == {served.policy}


@pytest.mark.slow
def test_files_that_somebody_changed_are_one_line(filled: Project) -> None:
    path = filled.root / "served.json"
    path.write_text('{"checkpoint": "../../../etc", "policy": ""}')
    assert "not in the run" in filled.art("improve", code=1)
    path.write_text("[]")
    assert str(path.name) in filled.art("improve", code=1)
    path.unlink()
    assert "improve.canary.metric" in filled.art("improve", "improve.canary.metric=stars", code=2)
    remote = ("learner=tinker", "engine=tinker", "engine.base_url=http://127.0.0.1:1")
    assert "no weights here" in filled.art("improve", *remote, code=2)
    typo = filled.art("improve", "improve.gates={traffic: 'rewrd>=baseline'}", code=2)
    assert "improve.gates.traffic: no metric 'rewrd'" in typo
    assert "no improve section" in filled.art("improve", "improve=null", code=2)
    filled.art("train", "train.steps=1", "improve.steps=7")  # the section is no part of a run's identity
    assert filled.art("improve", "--history") == "no night yet\n"


BASELINE, CANDIDATE = "checkpoints/step_0000", "nights/night_0001/run/checkpoints/step_0001"


def _night(number: int, **fields: Any) -> Night:
    counts = {"num_conversations": 9, "num_scenarios": 8, "num_held_out": 1}
    return Night(number=number, started_at=1.0, baseline=BASELINE, files=[], **counts, **fields)


@pytest.fixture
def gated(tmp_path: Path) -> LoadedConfig:
    """A run with a night whose candidate has passed its gates. Its checkpoints have no weights."""
    project = Project(tmp_path / "letters")
    night = _night(1, candidate=CANDIDATE, gates=[GateResult("traffic", "reward>=0", True)])
    for step, path in enumerate((BASELINE, CANDIDATE)):
        with new_checkpoint(project.root / path, Manifest(step=step, base="nothing", config_hash="")) as directory:
            (directory / "adapter.txt").write_text("nothing")
    Nights(project.root).write(night)
    write_served(project.root, Served(BASELINE, ""))
    return load_config(project.directory / "config.yaml", [])


def look(loaded: LoadedConfig) -> tuple[Night, Served]:
    night, served = asyncio.run(improve(loaded)).night, read_served(loaded.config.runs / "letters")
    assert night is not None and served is not None
    return night, served


def test_a_night_trains_with_the_context_and_dtype_of_its_run(
    gated: LoadedConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's first training chose them from the GPU's memory; the fork of a night has no config.json to say so."""
    root, seen = gated.config.runs / "letters", list[LoadedConfig]()
    recorded = {"model": {"dtype": "bfloat16", "max_length": 321}, "auto": {"max_length": "what the cache holds"}}
    (root / "config.json").write_text(json.dumps(recorded))

    async def prepare(loaded: LoadedConfig, nights: Nights, night: Night, served: Served) -> None:
        seen.append(loaded)
        night.outcome = "failed"

    monkeypatch.setattr("art_cli.loop.nights.night._prepare", prepare)
    asyncio.run(improve(gated))
    assert (seen[0].config.model.max_length, seen[0].config.model.dtype) == (321, "bfloat16")


def test_a_canary_that_a_kill_left_without_its_night_goes_on(gated: LoadedConfig) -> None:
    path = gated.config.runs / "letters/nights/night_0001/night.json"
    before = path.read_bytes()
    _, served = look(gated)
    assert served.canary is not None and served.canary.checkpoint == CANDIDATE
    path.write_bytes(before)  # killed before the night's report had the canary
    night, again = look(gated)
    assert night.trial is not None and again == served, "the same conversations"


def test_a_canary_that_was_ended_is_not_served_again(gated: LoadedConfig) -> None:
    """By --rollback, which needs no earlier promotion, or by the verdict, with a kill before the night's report."""
    look(gated)
    assert roll_back(gated.config.runs / "letters") == Served(BASELINE, "")
    night, served = look(gated)
    assert night.outcome == "rolled back" and served == Served(BASELINE, "")
    with pytest.raises(RunError, match="no canary"):
        roll_back(gated.config.runs / "letters")


@pytest.mark.parametrize(
    ("num_ratings", "candidate", "margin", "outcome"),
    [
        (48, 0.3, 0.0, ""),
        (60, 0.3, 0.0, "undecided"),
        (100, 0.5, 0.0, ""),
        (104, 0.5, 0.0, "undecided"),
        (104, 0.6, 0.0, ""),
        (200, 0.52, 0.0, "undecided"),
        (104, 0.45, 0.1, ""),
        (104, 0.45, 0.05, "undecided"),
    ],
)
def test_a_canary_that_is_behind_ends_early(
    gated: LoadedConfig,
    monkeypatch: pytest.MonkeyPatch,
    num_ratings: int,
    candidate: float,
    margin: float,
    outcome: str,
) -> None:
    """A candidate may be worse by the margin, and then still be promoted."""
    means = {False: 0.5, True: candidate}
    ratings = [
        Rating(is_candidate, means[is_candidate], f"key {number % 50}")
        for number in range(num_ratings // 2)
        for is_candidate in (False, True)
    ]
    monkeypatch.setattr("art_cli.loop.nights.night.read_ratings", lambda *_, **__: ratings)
    loaded = load_config(gated.path, ["improve.canary.max_ratings=200", f"improve.canary.margin={margin}"])
    night, served = look(loaded)
    assert night.outcome == outcome and (served.canary is None) == bool(outcome)


@pytest.mark.parametrize(("candidate", "start"), [(0.58, CANDIDATE), (0.57, BASELINE)])
def test_a_night_trains_a_promising_candidate_on(gated: LoadedConfig, candidate: float, start: str) -> None:
    """After 100 ratings of each, with means of 0.5, the standard error of the difference is 0.07."""
    nights, served = Nights(gated.config.runs / "letters"), Served(BASELINE, "")
    trial = Trial(1.0, num_promoted=100, promoted=0.5, num_candidate=100, candidate=candidate)
    night = _night(1, candidate=CANDIDATE, trial=trial, outcome="undecided")
    assert _start(nights, [night], served) == start
    assert _start(nights, [night, _night(2, outcome="no update")], served) == start
    assert _start(nights, [night, _night(2, outcome="gates missed")], served) == BASELINE
    assert _start(nights, [night, _night(2, outcome="failed")], served) == BASELINE, "its start may be why"
    night.outcome = "rolled back"
    assert _start(nights, [night], served) == BASELINE
    night.outcome = "promoted"
    assert _start(nights, [night], Served(CANDIDATE, "", [BASELINE])) == CANDIDATE
    assert not Trial(1.0, num_promoted=1, promoted=0.0, num_candidate=1, candidate=1.0).is_promising


def test_a_candidate_whose_files_are_gone_is_not_promoted(gated: LoadedConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    ratings = [Rating(number % 2 == 1, float(number % 2), f"key {number}") for number in range(100)]
    look(gated)
    shutil.rmtree(gated.config.runs / "letters/nights/night_0001/run")
    monkeypatch.setattr("art_cli.loop.nights.night.read_ratings", lambda *_, **__: ratings)
    night, served = look(gated)
    assert (night.outcome, served) == ("rolled back", Served(BASELINE, "")) and "no manifest.json" in night.reason


def test_a_night_whose_report_was_removed_is_not_taken_for_the_next_one(
    gated: LoadedConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its run has learned from other scenarios, and its checkpoint may be served."""
    nights, asked = Nights(gated.config.runs / "letters"), [{"id": word, "ask": word} for word in WORDS]
    (nights.path(1) / "night.json").unlink()
    monkeypatch.setattr("art_cli.loop.nights.night.read_traffic", lambda *_, **__: Traffic([], 12, asked))
    night = _begin(gated, nights, nights.all(), Served(BASELINE, ""))
    assert isinstance(night, Night) and night.number == 2


def test_what_earlier_nights_trained_on_is_held_out_last(gated: LoadedConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The night trained on all but two words, which are not the newest; now all words come again."""
    nights, asked = Nights(gated.config.runs / "letters"), [{"id": word, "ask": f"say {word}"} for word in WORDS]
    write_lines(nights.path(1) / "scenarios.jsonl", [each for each in asked if each["id"] not in ("pear", "fig")])
    monkeypatch.setattr("art_cli.loop.nights.night.read_traffic", lambda *_, **__: Traffic([], 12, asked))
    night = _begin(load_config(gated.path, ["improve.held_out=0.25"]), nights, nights.all(), Served(BASELINE, ""))
    assert isinstance(night, Night) and night.num_held_out == 3
    lines = (nights.path(2) / "held_out.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["pear", "fig", "bean"]
    assert {json.loads(line)["id"] for line in (nights.path(2) / "scenarios.jsonl").read_text().splitlines()} >= {
        word for word in WORDS if word not in ("pear", "fig", "bean")
    }


def test_scenarios_test_for_a_week_and_those_of_a_failed_night_not_at_all(gated: LoadedConfig) -> None:
    """So nights do not run out of scenarios where users ask the same again."""
    nights = Nights(gated.config.runs / "letters")
    for number, (age_days, outcome) in enumerate(((8, "promoted"), (6, "promoted"), (1, "failed")), 2):
        night = _night(number, outcome=outcome)
        night.started_at = time.time() - age_days * 86_400
        nights.write(night)
        write_lines(nights.path(number) / "held_out.jsonl", [{"id": str(number), "ask": "apple"}])
    assert [each["id"] for each in _gated_sets(gated, nights)["traffic"]] == ["3"]


def test_a_night_whose_configuration_changes_while_it_trains_trains_anew(
    gated: LoadedConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a setting that made the training fail can be corrected. Without a change the training goes on."""
    nights = Nights(gated.config.runs / "letters")
    nights.write(_night(1))
    kept = []

    async def train(loaded: LoadedConfig) -> None:
        run = RunDir(loaded.config.runs / "run")
        kept.append(run.config_path.exists())
        claim_config(run, loaded)
        raise CheckpointError("does not fit this model")

    monkeypatch.setattr("art_cli.loop.nights.night.train", train)
    for changes in (["model.lora.rank=8"], ["model.lora.rank=8"], []):
        with contextlib.suppress(CheckpointError):
            asyncio.run(improve(load_config(gated.path, changes)))
    assert kept == [False, True, False]


def test_a_canary_goes_on_after_the_clock_was_set_back(gated: LoadedConfig) -> None:
    """It would wait for a day without a rating."""
    night, _ = look(gated)
    assert night.trial is not None
    night.trial.since += 86_400
    write_served(gated.config.runs / "letters", Served(BASELINE, "old", canary=Canary(CANDIDATE, "new", 0.5, "salt")))
    Nights(gated.config.runs / "letters").write(night)
    now = look(gated)[0].trial
    assert now is not None and now.since <= time.time()
    entries = [
        FeedbackEntry(
            id=f"f{number}",
            at=time.time(),
            client=f"key {number}",
            conversation=f"c{number}",
            policy="new" if number % 2 else "old",
            answered_at=time.time(),
            metric="thumbs",
            value=number % 2 == 1,
        )
        for number in range(60)
    ]
    write_lines(gated.config.runs / "letters/gateway/feedback.jsonl", entries)
    assert look(gated)[0].outcome == "promoted"


def test_a_rollback_passes_over_checkpoints_that_are_gone(gated: LoadedConfig, tmp_path: Path) -> None:
    root = gated.config.runs / "letters"
    write_served(root, Served(CANDIDATE, "", [BASELINE, "nights/night_0000/run/checkpoints/step_0001"]))
    assert roll_back(root) == Served(BASELINE, "")
    write_served(root, Served(CANDIDATE, "", ["nights/night_0000/run/checkpoints/step_0001"]))
    with pytest.raises(CheckpointError, match=r"step_0001: no manifest\.json"):
        roll_back(root)
    with pytest.raises(RunError, match="no checkpoint"):
        roll_back(tmp_path / "typo")
    assert not (tmp_path / "typo").exists()


def test_traffic_that_is_not_there_is_named(gated: LoadedConfig) -> None:
    shutil.rmtree(gated.config.runs / "letters/nights")
    assert f"0 conversations of {gated.config.runs}/letters/gateway" in asyncio.run(improve(gated)).text
    with pytest.raises(UsageError, match=r"improve\.traffic: .*nowhere: no such directory"):
        asyncio.run(improve(load_config(gated.path, ["improve.traffic=[nowhere]"])))


def test_a_rollback_needs_no_wait_for_a_night_whose_candidate_is_then_never_served(gated: LoadedConfig) -> None:
    root = gated.config.runs / "letters"
    nights = Nights(root)
    write_served(root, Served(BASELINE, "", [CANDIDATE]))
    with lock_directory(nights.root, nights.root / "lock"):
        assert roll_back(root) == Served(CANDIDATE, "")
    night, served = look(gated)
    assert night.outcome == "rolled back" and "baseline" in night.reason and served == Served(CANDIDATE, "")


@pytest.mark.parametrize("gates", ["{traffic: bad}", "{traffic: 'rewrad>=0'}", "{traffic: 'reward>=other'}"])
def test_gates_that_cannot_hold_are_refused_before_a_night(gated: LoadedConfig, gates: str) -> None:
    with pytest.raises(UsageError, match="gate"):
        asyncio.run(improve(load_config(gated.path, [f"improve.gates={gates}"])))


def test_a_night_that_is_resumed_after_a_week_still_has_its_held_out_scenarios(gated: LoadedConfig) -> None:
    nights = Nights(gated.config.runs / "letters")
    write_lines(nights.path(1) / "held_out.jsonl", [{"id": "a", "ask": "apple"}])
    assert [scenario["id"] for scenario in _gated_sets(gated, nights)["traffic"]] == ["a"]


def test_a_candidate_is_not_left_untested(gated: LoadedConfig) -> None:
    text = gated.path.read_text()
    for gates in ("gates: {}", "gates: {traffic: reward>=0}\n  safety: safety.jsonl"):
        gated.path.write_text(text.replace('gates: {tasks: "reward>=0", traffic: "reward>=0"}', gates))
        with pytest.raises(ConfigError, match=r"improve\.gates"):
            load_config(gated.path, [])


def _wait_for(is_done: Any) -> None:
    for number in range(60):
        if is_done(number):
            return
        time.sleep(0.5)
    raise AssertionError("not within half a minute")
