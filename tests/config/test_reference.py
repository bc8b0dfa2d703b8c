"""docs/config.md is what docs/config.py makes of the schema, and names every key."""

import importlib.util
from types import ModuleType

from art_cli.config.overrides import all_keys
from art_cli.config.schema import RunConfig
from tests.support.paths import ROOT


def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_config", ROOT / "docs/config.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_made_from_the_schema() -> None:
    """After a change of the schema: python docs/config.py."""
    assert (ROOT / "docs/config.md").read_text() == maker().reference()


def test_the_reference_has_every_key_with_its_meaning() -> None:
    page = (ROOT / "docs/config.md").read_text()
    inside_lists = (
        "judge.panel.",
        "judge.judges.",
        "judge.first.",
        "judge.then.",
        "judge.otherwise.",
        "trackers.",
        "shadow.",
    )
    inside_lists += tuple(
        f"rollout.sources.NAME.{below}." for below in ("judge", "environment", "scenarios", "eval_scenarios")
    )
    for key in all_keys(RunConfig):
        key = key.replace("rollout.sources.", "rollout.sources.NAME.").replace("feedback.", "feedback.NAME.")
        if not key.startswith(inside_lists) and key.rpartition(".")[2] != "name":
            assert f"\n| `{key}` |" in page or f"\n## {key}\n" in page, key
    assert not [line for line in page.splitlines() if line.startswith("| `") and line.endswith("|  |")]
