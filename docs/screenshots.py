"""Makes the pictures in docs/images: two recipes are trained, and `art view` of them is photographed.

python docs/screenshots.py            trains both, which takes some minutes
python docs/screenshots.py RUNS       uses the runs in this directory where they are there

The judge of e-mail search is a server that scores and explains by a rule. The pictures have the font Inter where it is
installed.
"""

import io
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image
from playwright.sync_api import Browser, Page

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from art_cli.runs.run_dir import RunDir  # noqa: E402
from tests.support.others.browser import chromium, viewing  # noqa: E402

IMAGES = ROOT / "docs/images"
STEPS, EVERY = 40, 8
RULE = "tests/support/judges/email_search_rule.py"
SIZE = {"width": 1280, "height": 800}
SCALE, COLOURS = 1.5, 256  # pixels per CSS pixel; colours of a picture, so that none has more than 150 kB


class Shot(NamedTuple):
    name: str
    place: str
    scheme: str = "light"
    keys: str = ""  # pressed before the picture is taken
    points_at: str = ""  # what the mouse is over then


def main(runs: Path) -> None:
    train(runs)
    IMAGES.mkdir(exist_ok=True)
    with chromium() as browser:
        with viewing(Path(runs.name) / "email-search", cwd=runs.parent) as root:
            for shot in shots_of_search(browser, root):
                take(browser, root, shot)
        with viewing(Path(runs.name) / "tictactoe-groups", cwd=runs.parent) as root:
            take(browser, root, shot_of_game(browser, root))


def train(runs: Path) -> None:
    """Trains what is not there yet."""
    with judging() as judge:
        configs = {
            "tictactoe-groups": ("tictactoe/config-groups.yaml", []),
            "email-search": ("email-search/config.yaml", judge),
        }
        for name, (config, settings) in configs.items():
            if not RunDir(runs / name).checkpoint_path(STEPS).is_dir():
                options = [f"runs={runs}", f"train.steps={STEPS}", f"eval.every={EVERY}", *settings]
                command = [sys.executable, "-m", "art_cli", "train", ROOT / "recipes" / config, *options]
                subprocess.run(command, cwd=ROOT, check=True)


@contextmanager
def judging() -> Iterator[list[str]]:
    """The settings of RULER with a judge that follows a rule, is never sure, and leans to the first attempt."""
    options = ["--noise", "0.05", "--bias", "0.04", "--group-rule", f"{RULE}:scores", "--words", f"{RULE}:words"]
    command = [sys.executable, "-m", "tests.support.judges.judge_server", *options]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        api_base = server.stdout.readline().strip()
        try:
            yield ["judge=ruler", f"judge.base_url={api_base}", "judge.model=rule", "judge.votes=3", "judge.cache=null"]
        finally:
            server.kill()


def shots_of_search(browser: Browser, root: str) -> list[Shot]:
    step = STEPS // 6
    rows = ask(browser, f"{root}/api/source/0/step/{step}/train/groups?sort=spread&order=desc")["rows"]
    groups = f"#/s/0/step/{step}/train?sort=spread&order=desc"
    group = f"#/s/0/step/{step}/train/group/{rows[0]['group_id']}"
    last = ask(browser, f"{root}/api/source/0/step/{STEPS}/eval/groups?min=1&limit=200")["rows"]
    first = ask(browser, f"{root}/api/source/0/step/0/eval/groups?max=0&limit=200")["rows"]
    learned = {row["scenario_id"] for row in last} & {row["scenario_id"] for row in first}
    scenario = min(learned, key=lambda name: (len(name), name))
    return [
        Shot("curves", "#/curves"),
        Shot("groups", groups),
        Shot("group", group),
        Shot("diff", f"#/s/0/scenario/{scenario}"),
    ]


def shot_of_game(browser: Browser, root: str) -> Shot:
    """The least likely game that was won, of the groups in which others were lost."""
    rows = ask(browser, f"{root}/api/source/0/step/2/train/groups?sort=spread&order=desc&min=1&limit=4")["rows"]
    won = [id for row in rows for id, reward in zip(row["ids"], row["rewards"], strict=True) if reward == 1]
    chosen = min(won, key=lambda id: logprob(ask(browser, f"{root}/api/source/0/trajectory/{id}")))
    return Shot("attempt", f"#/s/0/t/{chosen}", "dark", keys="jjjjj", points_at=".is-unlikely[data-at]")


def logprob(answer: Any) -> float:
    segments = [segment for turn in answer["turns"] for segment in turn["segments"]]
    return sum(sum(segment["logprobs"] or ()) for segment in segments)


def ask(browser: Browser, url: str) -> Any:
    page = browser.new_page()
    answer = page.goto(url)
    assert answer is not None and answer.ok, url
    found = answer.json()
    page.close()
    return found


def take(browser: Browser, root: str, shot: Shot) -> None:
    page = browser.new_page(viewport=SIZE, color_scheme=shot.scheme, device_scale_factor=SCALE)
    page.goto(f"{root}/{shot.place}")
    settle(page)
    for key in shot.keys:
        page.keyboard.press(key)
    if shot.points_at:
        page.locator(shot.points_at).first.hover()
    settle(page)
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    picture = picture.quantize(COLOURS, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    path = IMAGES / f"view-{shot.name}.png"
    picture.save(path, optimize=True)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")
    page.close()


def settle(page: Page) -> None:
    page.locator("h1").wait_for()
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(300)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]).resolve())
    else:
        with tempfile.TemporaryDirectory() as made:
            main(Path(made) / "runs")
