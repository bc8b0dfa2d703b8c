"""Finds what ships with the package, `configs/` (Hydra groups) and `recipes/`, and lists a group's options."""

from collections.abc import Sequence
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


def packaged(name: str) -> Path:
    """The directory "configs" or "recipes": inside the package in a wheel, beside it in a checkout."""
    inside, beside = _PACKAGE / name, _PACKAGE.parent / name
    if inside.is_dir():
        return inside
    is_checkout = (_PACKAGE.parent / "pyproject.toml").is_file()
    assert is_checkout and beside.is_dir(), f"{name}/ is neither in {_PACKAGE} nor beside it: a broken installation"
    return beside


def options(group: str, directories: Sequence[Path]) -> list[str]:
    """The names that `group=NAME` can choose: the YAML files in the group's folder in any of the directories."""
    return sorted({file.stem for directory in directories for file in (directory / group).glob("*.yaml")})
