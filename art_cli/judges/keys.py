"""API keys: where they come from (the environment, or a .env file) and how they are kept out of everything else.

A key is handed to the provider and to nothing else. Every text that comes back from a provider goes through `Secrets`
before it can reach a file, a log or an error.
"""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
_LINE = re.compile(r"""\s*(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(.*?)\s*$""")
_USERINFO = re.compile(r"(?<=://)[^/@\s]+@")
MIN_LENGTH = 6  # a shorter value is not a key, and replacing it would garble texts


class Secrets:
    """The values that must not be shown."""

    def __init__(self, values: Iterable[str]) -> None:
        self._values = sorted({value for value in values if len(value) >= MIN_LENGTH}, key=len, reverse=True)

    def redact(self, text: str) -> str:
        """The text with every secret, and every user:password of a URL, as ***."""
        for value in self._values:
            text = text.replace(value, "***")
        return _USERINFO.sub("***@", text)

    def __repr__(self) -> str:
        return f"Secrets({len(self._values)} values)"


def load_environment(directory: Path) -> None:
    """Adds what `.env` of the working directory, then of `directory`, says and the environment does not."""
    for folder in dict.fromkeys((Path.cwd(), directory.resolve())):
        for name, value in read_dotenv(folder / ".env").items():
            os.environ.setdefault(name, value)


def read_dotenv(path: Path) -> dict[str, str]:
    """NAME=value lines; quotes around a value go, lines of another shape are passed over."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    found = {}
    for line in lines:
        if match := _LINE.match(line):
            name, value = match.groups()
            if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
                value = value[1:-1]
            else:
                value = value.partition(" #")[0].rstrip()
            found[name] = value
    return found


def find_secrets(environment: Mapping[str, str], *, names: Iterable[str] = ()) -> Secrets:
    """The values of variables that are named like secrets, and of `names`."""
    named = set(names)
    return Secrets(value for name, value in environment.items() if name in named or _SECRET_NAME.search(name))
