"""Directories that ship with the package: `configs/`, `recipes/`, `docs/`, and `.agents/` for coding agents."""

import re
from pathlib import Path

_DOCUMENT = re.compile(r"(?<![\w/.])docs/([\w-]+\.md)(?!:)")  # NAME.md:3 is a place in a file of the user
_PACKAGE = Path(__file__).resolve().parent.parent


def packaged(name: str) -> Path:
    """Returns the directory "configs", "recipes" or "docs": in a wheel inside the package, in a checkout beside it.

    ".agents" is always inside.
    """
    inside, beside = _PACKAGE / name, _PACKAGE.parent / name
    if inside.is_dir():
        return inside
    is_checkout = (_PACKAGE.parent / "pyproject.toml").is_file()
    assert is_checkout and beside.is_dir(), f"{name}/ is neither in {_PACKAGE} nor beside it: a broken installation"
    return beside


def packaged_options(group: str) -> list[str]:
    """Returns the names of the packaged options of a group, such as those of "hardware", sorted."""
    directory = packaged("configs") / group if group.isidentifier() else None
    return sorted(file.stem for file in directory.glob("*.yaml")) if directory is not None else []


def packaged_groups() -> list[str]:
    """Returns the names of the groups that have packaged options: "algorithm", "hardware", "judge", "model"."""
    return sorted(folder.name for folder in packaged("configs").iterdir() if folder.is_dir())


def with_documents(text: str) -> str:
    """Returns the text with the path of each document that it names as "docs/view.md"."""

    def locate(match: re.Match[str]) -> str:
        path = packaged("docs") / match[1]
        return str(path) if path.is_file() else match[0]

    return _DOCUMENT.sub(locate, text)
