"""Downloads: checkpoints and their files that a client may fetch for a while, by an address that only it knows."""

import os
import secrets
import tarfile
import tempfile
import time
from collections import OrderedDict
from pathlib import Path

from art_cli.chat.errors import ChatError

OFFER_S = 900.0  # how long an address works
MAX_OFFERS = 10_000


class Downloads:
    def __init__(self) -> None:
        self._offers: OrderedDict[str, tuple[Path, float]] = OrderedDict()

    @staticmethod
    def token() -> str:
        return secrets.token_hex(16)

    def offer(self, root: str, path: Path) -> tuple[str, float]:
        """The address of a file or directory on the server at `root`, and until when it works."""
        token, expires = self.token(), time.time() + OFFER_S
        self._offers[token] = path, expires
        while len(self._offers) > MAX_OFFERS:
            self._offers.popitem(last=False)
        return f"{root.rstrip('/')}/api/v1/downloads/{token}", expires

    def take(self, token: str) -> Path:
        """Raises ChatError 404: no such address, or its time is over."""
        path, expires = self._offers.get(token, (None, 0.0))
        if path is None or expires < time.time() or not path.exists():
            raise ChatError(404, "this address does not work, or no longer; ask for another")
        return path


def pack(directory: Path) -> Path:
    """A temporary tar file of the directory's files. The caller removes it."""
    handle, name = tempfile.mkstemp(suffix=".tar")
    try:
        with os.fdopen(handle, "wb") as file, tarfile.open(fileobj=file, mode="w") as archive:
            for path in sorted(directory.rglob("*")):
                if path.is_file():
                    archive.add(path, arcname=str(path.relative_to(directory)))
    except BaseException:
        os.unlink(name)
        raise
    return Path(name)
