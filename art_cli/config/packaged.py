"""Finds what ships with the package: `recipes/`."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


def packaged(name: str) -> Path:
    """The directory "recipes": inside the package in a wheel, beside it in a checkout."""
    inside, beside = _PACKAGE / name, _PACKAGE.parent / name
    if inside.is_dir():
        return inside
    is_checkout = (_PACKAGE.parent / "pyproject.toml").is_file()
    assert is_checkout and beside.is_dir(), f"{name}/ is neither in {_PACKAGE} nor beside it: a broken installation"
    return beside
