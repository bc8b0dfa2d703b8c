"""The shipped page of art view equals the build of its sources, and names them."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.others.node import page_sources
from tests.support.paths import ROOT

APP = ROOT / "art_cli/view/app"


@pytest.mark.slow
def test_the_committed_page_is_what_its_sources_build(tmp_path: Path) -> None:
    """`make view` after a change; esbuild is pinned, so that the same sources give the same bytes."""
    subprocess.run(["node", "build.mjs", str(tmp_path)], cwd=page_sources(), check=True, timeout=60)
    built = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    shipped = {path.name: path.read_bytes() for path in APP.iterdir()}
    assert built.keys() == shipped.keys() == {"app.css", "app.js", "index.html"}
    assert built == shipped


def test_the_page_carries_the_licence_of_each_library_in_it() -> None:
    described = json.loads((ROOT / "art_cli/view/app_src/package.json").read_text())
    head = (APP / "app.js").read_text().partition("*/")[0]
    for name, version in described["dependencies"].items():
        assert f"{name} {version}" in head
    assert head.count("Copyright") >= len(described["dependencies"])


def test_the_page_can_stand_inside_an_html_file() -> None:
    """What would end a script element, or its comment, is not in the script; and it reads the same in any encoding."""
    script = (APP / "app.js").read_bytes()
    assert script.isascii()
    assert b"</script" not in script.lower() and b"<!--" not in script and b"<script" not in script.lower()
    assert b"</style" not in (APP / "app.css").read_bytes().lower()
