"""Adds the variables of .env files to the environment of this process.

A variable of the environment wins over a .env file. Values of a .env file are taken as they are written: python-dotenv
neither expands variables in them here, nor does it ever run anything.
"""

import os
from pathlib import Path

from dotenv import dotenv_values

from art_cli.runtime.errors import UsageError, one_line


def load_environment(directory: Path) -> None:
    """Adds to the environment what it lacks and a .env file has: the working directory's, then that of `directory`.

    Raises UsageError: a .env file cannot be read.
    """
    for path in dict.fromkeys((Path.cwd() / ".env", directory.resolve() / ".env")):
        try:
            for name, value in dotenv_values(path, interpolate=False, encoding="utf-8-sig").items():
                if value is not None:
                    os.environ.setdefault(name, value)
        except (OSError, ValueError) as error:  # ValueError: bytes that are not UTF-8, a name or value with a NUL
            raise UsageError(f"{path}: {one_line(error)}") from error
