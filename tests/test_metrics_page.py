"""docs/metrics.md holds every metric that a run writes, and none that the code does not know."""

import ast
import asyncio
import re
from pathlib import Path

import pytest

from art_cli.config.compose import load_config
from art_cli.config.metric_names import ALWAYS, FAMILIES, NEEDS, OF_SOURCES, SHADOW, SHADOW_KINDS
from art_cli.learners import StepMetrics
from art_cli.learners.prompt.prompt_learner import PromptMetrics
from art_cli.learners.sft.sft_batches import Sums
from art_cli.loop.evaluate import COUNTS, KNOWN
from art_cli.loop.train import train
from art_cli.runs.run_dir import RunDir
from tests.support.paths import LETTERS, ROOT

PAGE = ROOT / "docs/metrics.md"
PLACE = re.compile(r"NAME|SOURCE|KIND")  # a part of a metric's name that a run gives
# Settings that bring further metrics
COARSE = "rollout.entry=rollout.py:coarse"
SETTINGS = (
    ("loss.kl=0.1", "train.max_kl=1", "train.epochs_per_step=2", COARSE, "rollout.refill=1"),
    ("loss=ppo", "loss.off_policy.name=truncate"),
)


def _names() -> set[str]:
    """Returns the metrics of the page, which stand in the first cells of its tables."""
    cells = re.findall(r"^\| (`[^|]+) \|", PAGE.read_text(), re.MULTILINE)
    assert len(cells) > 60
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def _patterns(names: set[str]) -> list[re.Pattern[str]]:
    return [re.compile(PLACE.sub("[^.]+", re.escape(name))) for name in names]


def _is_on_page(metric: str) -> bool:
    return any(pattern.fullmatch(metric) for pattern in _patterns(_names()))


def _words_of_code() -> set[str]:
    """Returns every string, name of a field and of an argument in the package."""
    words = set[str]()
    for path in (ROOT / "art_cli").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                words.add(node.value)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                words.add(node.target.id)
    return words


def test_the_page_has_each_metric_that_a_step_or_an_evaluation_may_have() -> None:
    fields = {*StepMetrics.__struct_fields__, *PromptMetrics.__struct_fields__}
    families = {f"{prefix}some" for prefix in FAMILIES} | {f"{name}.some" for name in OF_SOURCES}
    shadow = {f"{SHADOW}some.{kind}" for kind in SHADOW_KINDS} | {f"{SHADOW}some"}
    warm_up = Sums(num_updates=1, evaluations=[(1, 0.5)]).numbers(epoch_updates=1, patience=1, is_done=True)
    evaluated = {"num_prompt", "num_completion", *COUNTS, *KNOWN}
    expected = {*ALWAYS, *NEEDS, *fields, *families, *shadow, *warm_up, *evaluated} - {"eval.some"}
    assert not sorted(name for name in expected if not _is_on_page(name))


def test_the_code_knows_each_metric_of_the_page() -> None:
    known = _words_of_code()
    families = (*FAMILIES, *(f"{name}." for name in OF_SOURCES), SHADOW)
    named = {name for name in _names() if PLACE.search(name)}
    assert all(name.startswith(families) for name in named), named
    kinds = {name.rpartition(".")[2] for name in named if name.startswith(f"{SHADOW}NAME.")}
    assert kinds == set(SHADOW_KINDS)
    assert not sorted(_names() - named - known)


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS, ids=["grpo", "ppo"])
def test_each_metric_that_a_training_writes_is_on_the_page(settings: tuple[str, ...], tmp_path: Path) -> None:
    loaded = load_config(LETTERS / "config.yaml", [f"runs={tmp_path}", "train.steps=2", *settings])
    lines = RunDir(asyncio.run(train(loaded)).root).metrics()
    written = {name for line in lines if line.split == "train" for name in line.metrics}
    evaluated = {name for line in lines if line.split == "eval" for name in line.metrics} - {
        "length"
    }  # the agent's own
    assert len(written) > 45 and {"reward", "failed"} <= evaluated
    assert not sorted(name for name in written | evaluated if not _is_on_page(name))


def test_a_name_like_that_of_a_metric_is_not_on_the_page() -> None:
    assert not any(map(_is_on_page, ("reward_mean_of_all", "num_dreams", "shadow/some.dreams")))
