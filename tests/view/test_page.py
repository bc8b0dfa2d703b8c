"""The page of art view in a real Chromium: it shows what the files hold, and no text in them does anything."""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from playwright.sync_api import Browser, BrowserContext, Locator, Page, expect

from art_cli.runs.run_dir import RunDir
from tests.support.others.browser import chromium, faults, viewing
from tests.support.paths import ROOT
from tests.support.processes import forked
from tests.support.processes.waiting import wait_until
from tests.support.records.viewed import (
    ATTEMPTS,
    BIDI,
    GROUPS,
    STEPS,
    append,
    attempt,
    write_hostile,
    write_promise,
    write_viewed_run,
)
from tests.support.servers.chat_server import ChatServer, chatting

PLACES = {
    "curves": "#/curves",
    "groups": "#/s/0/step/1/train",
    "group": "#/s/0/step/1/train/group/s0001-g0002",
    "attempt": "#/s/0/t/s0001-g0002-a03",
    "scenario": "#/s/0/scenario/thing-2",
    "judge": "#/judge",
    "plan": "#/plan",
    "config": "#/config",
}  # views of the first run, by name

Open = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    run = write_viewed_run(tmp_path_factory.mktemp("viewed") / "run")
    write_promise(run)
    return run


@pytest.fixture(scope="module")
def root(run: RunDir) -> Iterator[str]:
    """A page with the run, another run, and a file with hostile text."""
    other = write_viewed_run(run.root.parent / "other", steps=2)
    write_hostile(run.root.parent / "hostile.jsonl")
    with viewing(run.root, other.root, run.root.parent / "hostile.jsonl") as address:
        yield address


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[RunDir]:
    """The demo's run without warm-up; killed at the end."""
    runs = tmp_path
    recipe = ROOT / "recipes/tictactoe/config.yaml"
    words = ["train", recipe, f"runs={runs}", "sft=null", "eval=null"]
    words += ["rollout.groups_per_step=8", "train.steps=100000"]  # short steps, more than the tests wait for
    with (runs / "log").open("w") as log, forked.Forked(words, stdout=log, stderr=log, cwd=ROOT) as training:
        os.setpriority(os.PRIO_PROCESS, training.pid, 10)  # the page comes first
        yield RunDir(runs / "tictactoe")
        training.kill()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Opens an address. At the end of the test no page may have said anything to the console or run foreign script."""
    contexts: list[BrowserContext] = []
    said: list[str] = []

    def opened(address: str, **options: object) -> Page:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})  # type: ignore[arg-type]
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(15_000)
        page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on(
            "response", lambda answer: said.append(f"{answer.status}: {answer.url}") if answer.status >= 400 else None
        )
        page.on("dialog", lambda dialog: said.append(f"dialog: {dialog.message}"))
        page.goto(address)
        return page

    yield opened
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.callback(context.close)
            for page in context.pages:
                assert page.evaluate("window.owned === undefined && document.title !== 'owned'")
    assert said == []


def shown(page: Page) -> None:
    """Waits until the view has its heading."""
    page.locator("h1").first.wait_for()
    expect(page.locator(".waiting", has_text="Reading")).to_have_count(0)


# --- displayed content ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_group_opens_from_its_row_and_an_attempt_from_the_group(open_page: Open, root: str) -> None:
    page = open_page(f"{root}/{PLACES['groups']}")
    page.locator("[data-row='2'] a").first.click()
    expect(page).to_have_url(re.compile(re.escape(PLACES["group"]) + "$"))
    expect(page.locator(".attempt")).to_have_count(ATTEMPTS)
    spans = page.locator(".node").evaluate_all("nodes => nodes.map(node => node.style.gridColumn)")
    # Shared by all: system, user. Attempts 0 and 1 answer first with the same word, and share the tool's result too.
    assert sorted(spans, key=lambda span: -int(span[-1]))[:4] == ["1 / span 4"] * 2 + ["3 / span 2"] * 2
    expect(page.locator(".attempt").first).to_contain_text("attempt 3")
    expect(page.locator(".attempt").first).to_contain_text("The answer amber names the thing 2.")
    page.locator(".attempt a").first.click()
    expect(page).to_have_url(re.compile(re.escape(PLACES["attempt"]) + "$"))
    expect(page.locator(".message")).to_have_count(5)
    page.go_back()
    expect(page.locator(".attempt")).to_have_count(ATTEMPTS)
    page.go_back()
    expect(page.locator("h1")).to_have_text("Step 1")


@pytest.mark.slow
def test_a_link_opens_the_attempt_and_each_token_says_its_numbers(open_page: Open, root: str) -> None:
    page = open_page(f"{root}/{PLACES['attempt']}")
    wanted = attempt(1, 2, 3)
    expect(page.locator("h1")).to_have_text("thing 2 is")
    sampled = page.locator(".segment.is-sampled")
    expect(sampled).to_have_count(2)
    for place, turn in enumerate(wanted.turns):
        sampled.nth(place).locator("[data-at='0']").hover()
        expect(page.locator(".tip")).to_contain_text("sampled by step 1")
        tip, token = (page.locator(name).nth(at).bounding_box() for name, at in ((".tip", 0), ("[data-at='0']", place)))
        assert tip and token and 0 < tip["y"] - token["y"] < 60 and tip["x"] == pytest.approx(token["x"], abs=1)
        expect(page.locator(".tip")).to_contain_text(f"\u2212{-turn.logprobs[0]:.3f}")
        expect(page.locator(".tip")).to_contain_text(str(turn.sampled_ids[0]))
    page.locator("text=every token").click()
    kinds = page.locator(".kind").all_inner_texts()
    assert kinds == ["template", "message", "template", "message", "template", "sampled", "context", "template", "tool",
                     "template", "sampled"]  # fmt: skip
    page.locator("button", has_text="plain").click()
    expect(page.locator(".tok[style*=shade]")).to_have_count(0)


@pytest.mark.slow
def test_the_histogram_and_the_search_filter_the_groups(open_page: Open, root: str) -> None:
    page = open_page(f"{root}/{PLACES['groups']}")
    rows = page.locator("[data-row]")
    expect(rows).to_have_count(GROUPS)
    page.get_by_role("button", name=re.compile("rewards 0.75")).click()
    expect(rows).to_have_count(GROUPS - 1)  # attempt 3 of group 0 failed
    expect(page).to_have_url(re.compile("min=0.75"))
    page.keyboard.press("Escape")
    expect(rows).to_have_count(GROUPS)
    page.keyboard.press("/")
    page.keyboard.type("amber names the thing 4")
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("thing 4 is")
    page.get_by_role("searchbox").fill("")
    expect(rows).to_have_count(GROUPS)
    page.get_by_label("only groups with failed attempts").check()
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("timeout")


def test_the_groups_of_a_run_with_sources_are_filtered_by_them(
    open_page: Open, root: str, tmp_path: Path, art: Callable[..., tuple[int, str, str]]
) -> None:
    page = open_page(f"{root}/{PLACES['groups']}")
    expect(page.locator("[data-row]")).to_have_count(GROUPS)
    expect(page.get_by_label("Source")).to_have_count(0)  # the run has none
    desk = [msgspec.structs.replace(attempt(0, g, i), source="desk") for g in range(2) for i in range(ATTEMPTS)]
    echo = [msgspec.structs.replace(attempt(0, 2, i), source="echo") for i in range(ATTEMPTS)]
    append(tmp_path / "mixed.jsonl", [*desk, *echo])
    assert art("view", tmp_path / "mixed.jsonl", "--html", tmp_path / "page.html")[0] == 0
    with viewing(tmp_path / "mixed.jsonl") as address:
        for place in (address, (tmp_path / "page.html").as_uri()):  # the page of a server, and a page in one file
            page.goto(f"{place}#/s/0/step/0/train")
            page.get_by_label("Source").select_option("desk")
            expect(page.locator("[data-row]")).to_have_count(2)
            expect(page.locator("[data-row='0']")).to_contain_text("desk/thing-0")
            page.get_by_label("Source").select_option("all sources")
            expect(page.locator("[data-row]")).to_have_count(3)


@pytest.mark.slow
def test_the_keys_go_through_groups_attempts_and_messages(open_page: Open, root: str) -> None:
    page = open_page(f"{root}/{PLACES['groups']}")
    expect(page.locator("[data-row]")).to_have_count(GROUPS)
    for key in ("j", "j", "k", "ArrowDown"):
        page.keyboard.press(key)
    expect(page.locator("[data-row='1'] a").first).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("thing 1 is")
    page.keyboard.press("ArrowRight")
    expect(page.locator("h1")).to_have_text("thing 2 is")
    page.goto(f"{root}/{PLACES['attempt']}")
    expect(page.locator(".message").last).to_contain_text("amber")
    page.keyboard.press("ArrowLeft")
    expect(page).to_have_url(re.compile("s0001-g0002-a02$"))
    expect(page.locator(".message").last).to_contain_text("blue")
    page.keyboard.press("j")
    expect(page.locator("[data-item='0']")).to_be_focused()
    page.keyboard.press("/")
    page.keyboard.type("is it")
    page.keyboard.press("Enter")
    expect(page.locator("[data-item='3']")).to_be_focused()
    expect(page.locator("mark")).to_have_text("is it")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_contain_text("next message")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.keyboard.press("u")
    expect(page.locator(".attempt")).to_have_count(ATTEMPTS)


def test_the_same_scenario_across_steps_is_a_diff(open_page: Open, root: str) -> None:
    page = open_page(f"{root}/#/s/0/scenario/thing-2?a=s0000-g0002-a01&b=s0002-g0002-a03")
    expect(page.locator("del").first).to_have_text("red")
    assert page.locator("del").all_inner_texts() == ["red", "green"]
    assert page.locator("ins").all_inner_texts() == ["blue", "amber"]
    expect(page.locator("select").first.locator("option")).to_have_count(STEPS * ATTEMPTS)


def test_several_runs_lie_over_each_other_and_the_config_says_how_they_differ(open_page: Open, root: str) -> None:
    page = open_page(f"{root}/#/curves")
    expect(page.locator(".runs tbody tr")).to_have_count(3)
    expect(page.locator(".legend").first).to_contain_text("other, evaluation")
    page.locator(".runs tr", has_text="other").get_by_role("checkbox").uncheck()
    expect(page.locator(".legend").first).not_to_contain_text("other, evaluation")
    page.goto(f"{root}/#/config")
    expect(page.locator("tr[data-different]")).to_have_text(re.compile(rf"train\.steps\s*{STEPS}\s*2"))


def test_a_plan_has_its_four_questions_its_pilots_and_what_happened(open_page: Open, root: str) -> None:
    page = open_page(f"{root}/#/curves")
    page.get_by_role("link", name="Plan").click()
    expect(page.locator("main h2")).to_have_text(["run"])  # neither the other run nor the file was planned
    questions = ["can this reward be learned?", "with which settings?", "does it fit?"]
    expect(page.locator("main h3")).to_have_text(
        [*questions, f"how long, how much? {STEPS} steps, 2 evaluations", "what it promised, and what happened"]
    )
    [doubt, cure] = page.locator("tr:has(th.failed), tr:has(th.failed) + tr").all_inner_texts()
    assert "<b>no</b> attemptuserU+202Egnih" in doubt and "\u202e" not in doubt and "try: easier scenarios" in cure
    expect(page.locator(".pilots tbody tr")).to_have_text([re.compile("0.012.*2.0 s"), re.compile("\u2013.*3.0 s")])
    happened = page.locator(".promised tbody tr", has_text="training")
    expect(happened).to_have_text(re.compile("4.5 sinside"))


# --- how it looks -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault(open_page: Open, root: str, scheme: str) -> None:
    page = open_page(f"{root}/", color_scheme=scheme)
    for name, place in PLACES.items():
        page.goto(f"{root}/{place}")
        shown(page)
        assert faults(page) == [], name
    page.keyboard.press("?")
    assert faults(page) == []


# --- hostile text -----------------------------------------------------------------------------------------------------


def test_hostile_text_is_shown_as_text(open_page: Open, root: str) -> None:
    page = open_page(f"{root}/#/s/2/step/0/train")
    expect(page.locator("[data-row]")).to_have_count(7)
    page.goto(f"{root}/#/s/2/t/script")
    expect(page.locator(".message").first).to_contain_text("</script><script>document.title = 'owned'")
    page.goto(f"{root}/#/s/2/t/bidi")
    expect(page.locator(".message").first).to_contain_text("userU+202Egnihtemos")
    text = page.locator("main").inner_text()
    assert not set(BIDI) & set(text) - set("abcdefghijklmnopqrstuvwxyz ")
    page.goto(f"{root}/#/s/2/t/odd")
    expect(page.locator(".message").first).to_contain_text("seen")
    page.goto(f"{root}/#/s/2/step/0/train")
    page.locator("[data-row='6'] a").first.click()
    expect(page.locator(".node").first).to_contain_text("half \ufffd a pair \ufffd")


def test_a_line_of_a_megabyte_and_ten_thousand_calls_stay_usable(open_page: Open, root: str) -> None:
    page = open_page(f"{root}/#/s/2/t/long")
    expect(page.locator(".folded")).to_contain_text("994,000 more characters")
    assert len(page.locator(".message .text").first.inner_text()) < 10_000
    page.goto(f"{root}/#/s/2/t/calls")
    expect(page.locator(".call")).to_have_count(20)
    page.goto(f"{root}/#/s/2/t/many")
    expect(page.locator(".message").first).to_contain_text("message 0")  # the search is this trajectory's now
    page.get_by_role("searchbox").fill("message 4321")
    page.keyboard.press("Enter")
    expect(page.locator("[data-current]")).to_contain_text("message 4321")
    assert page.locator(".message").count() < 100


# --- a drawing, a chat ------------------------------------------------------------------------------------------------

DRAWING = """
addEventListener("message", async (event) => {
  const { trajectory, message_index } = event.data;
  const tries = {
    network: () => fetch("http://127.0.0.1:9/"),
    page: () => parent.document.title = "owned",
    storage: () => localStorage.length,
  };
  const reached = [];
  for (const [name, attempt] of Object.entries(tries)) {
    try { await attempt(); reached.push(name); } catch {}
  }
  document.body.textContent = `${trajectory.messages[message_index].content}, reached: ${reached.join() || "nothing"}`;
});
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_file", [False, True])
def test_a_drawing_follows_the_message_and_reaches_neither_page_nor_storage_nor_network(
    browser: Browser, run: RunDir, tmp_path: Path, art: Callable[..., tuple[int, str, str]], is_file: bool
) -> None:
    script = tmp_path / "view.js"
    script.write_text(DRAWING)
    with contextlib.ExitStack() as stack:
        if is_file:
            assert art("view", run.root, "--drawing", script, "--html", tmp_path / "run.html")[0] == 0
            root = (tmp_path / "run.html").as_uri()
        else:
            root = stack.enter_context(viewing(run.root, arguments=("--drawing", str(script)))) + "/"
        context = stack.enter_context(contextlib.closing(browser.new_context()))
        page = context.new_page()
        page.goto(f"{root}{PLACES['attempt']}")
        drawn = page.frame_locator("iframe").locator("body")
        expect(drawn).to_have_text("amber, reached: nothing")
        page.locator("[data-item='1']").focus()
        expect(drawn).to_have_text("thing 2 is, reached: nothing")
        assert page.title() != "owned"


@pytest.mark.slow
def test_a_chat_goes_on_from_a_message(open_page: Open, run: RunDir) -> None:
    with (
        chatting(
            ChatServer(lambda body, number: f"<b>reply {number}</b> to {body['messages'][-1]['content']}")
        ) as model,
        viewing(run.root, arguments=("--endpoint", model.api_base, "--model", "mine")) as root,
    ):
        page = open_page(f"{root}/{PLACES['attempt']}")
        page.locator("[data-item='1']").get_by_role("button", name="chat from here").click()
        page.get_by_label("Your message").fill("and now?")
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".chat")).to_contain_text("<b>reply 1</b> to and now?")
        page.goto("about:blank")
    assert [message["content"] for message in model.asked[0]["messages"]] == [
        "Name the colour of the thing .", "thing 2 is", "and now?"]  # fmt: skip


# --- a file -----------------------------------------------------------------------------------------------------------


def test_the_page_in_one_file_needs_no_server(
    open_page: Open, run: RunDir, tmp_path: Path, art: Callable[..., tuple[int, str, str]]
) -> None:
    file = tmp_path / "run.html"
    code, _, said = art("view", run.root, "--html", file)
    assert code == 0, said
    page = open_page(file.as_uri(), offline=True)
    expect(page.locator(".chart").first).to_have_attribute("aria-label", re.compile("training: "))
    for place in PLACES.values():
        page.goto(f"{file.as_uri()}{place}")
        shown(page)
        expect(page.locator(".notice")).to_have_count(0)
    page.goto(f"{file.as_uri()}{PLACES['groups']}?text=amber names the thing 4&sort=reward")
    expect(page.locator("[data-row]")).to_have_count(1)
    page.goto(f"{file.as_uri()}{PLACES['attempt']}")
    expect(page.locator(".segment.is-sampled")).to_have_count(2)


# --- a growing run ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_curves_grow_while_the_demo_trains(open_page: Open, demo: RunDir) -> None:
    """The page is loaded once. The chart's last value equals the value in metrics.jsonl."""
    wait_until(lambda: len(demo.metrics()) > 0, timeout_s=120)
    with viewing(demo.root) as root:
        page = open_page(f"{root}/")
        chart = page.locator(".chart").first
        expect(page.locator(".state")).to_contain_text("training")
        expect(chart).to_have_attribute("aria-label", re.compile("^Reward by step. training: "))
        first = last_step(chart)
        expect(chart).not_to_have_attribute("aria-label", re.compile(f" step {first};"), timeout=60_000)
        value, step = re.findall(r"training: .*?([\d.]+) at step (\d+);", chart.get_attribute("aria-label") or "")[0]
        [line] = [line for line in demo.metrics() if line.step == int(step) and line.split == "train"]
        assert float(value) == pytest.approx(line.metrics["reward_mean"], abs=5e-4)
        page.locator("nav[aria-label=Views] >> text=Groups").click()
        page.locator("[data-row='0'] a").first.click()
        page.locator(".attempt a").first.click()
        page.get_by_role("button", name="Run view.js").click()
        expect(page.frame_locator("iframe").locator("body")).to_contain_text("X")  # the recipe's drawing of the board
        page.goto("about:blank")  # its polling would fail after the server stops


def last_step(chart: Locator) -> int:
    found = re.search(r"training: .*? step (\d+);", chart.get_attribute("aria-label") or "")
    assert found
    return int(found[1])
