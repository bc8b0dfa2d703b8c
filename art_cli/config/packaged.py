"""Packaged directories: `configs/`, `recipes/`, `docs/`, and `.agents/` for coding agents."""

import re
from pathlib import Path

_DOCUMENT = re.compile(r"(?<![\w/.])docs/([\w-]+\.md)(?!:)")  # NAME.md:3 is a line in a user's file
_PACKAGE = Path(__file__).resolve().parent.parent


def packaged(name: str) -> Path:
    """Returns a packaged directory. In a checkout, all except ".agents" are next to the package."""
    inside, beside = _PACKAGE / name, _PACKAGE.parent / name
    if inside.is_dir():
        return inside
    is_checkout = (_PACKAGE.parent / "pyproject.toml").is_file()
    assert is_checkout and beside.is_dir(), f"{name}/ is missing in {_PACKAGE} and next to it: a broken installation"
    return beside


def packaged_options(group: str) -> list[str]:
    directory = packaged("configs") / group if group.isidentifier() else None
    return sorted(file.stem for file in directory.glob("*.yaml")) if directory is not None else []


def packaged_groups() -> list[str]:
    """Returns the sorted names of the groups with packaged options, such as "hardware"."""
    return sorted(folder.name for folder in packaged("configs").iterdir() if folder.is_dir())


def with_documents(text: str) -> str:
    """Replaces names such as "docs/view.md" in the text by their paths."""

    def locate(match: re.Match[str]) -> str:
        path = packaged("docs") / match[1]
        return str(path) if path.is_file() else match[0]

    return _DOCUMENT.sub(locate, text)
