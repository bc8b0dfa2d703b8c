"""Downloads: checkpoints and their files that a client may fetch for a while, by an address that only it knows."""

import contextlib
import os
import secrets
import tarfile
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from art_cli.chat.chat_errors import ChatError

OFFER_S = 900.0  # how long an address works
MAX_OFFERS = 10_000
BLOCK = tarfile.BLOCKSIZE
PIECE_BYTES = 2**20


class Downloads:
    def __init__(self) -> None:
        self._offers: OrderedDict[str, tuple[Path, float]] = OrderedDict()

    @staticmethod
    def token() -> str:
        return secrets.token_hex(16)

    def offer(self, root: str, path: Path) -> tuple[str, float]:
        """Returns the address of a file or directory on the server at `root`, and until when it works."""
        token, expires = self.token(), time.time() + OFFER_S
        self._offers[token] = path, expires
        while len(self._offers) > MAX_OFFERS:
            self._offers.popitem(last=False)
        return f"{root.rstrip('/')}/api/v1/downloads/{token}", expires

    def take(self, token: str) -> Path:
        """Raises ChatError 404 if there is no such address, or its time is over."""
        path, expires = self._offers.get(token, (None, 0.0))
        if path is None or expires < time.time() or not path.exists():
            raise ChatError(404, "this address does not work, or no longer; ask for another")
        return path


def tar_length(directory: Path) -> int:
    """Bytes of the tar file of the directory's files."""
    size = sum(BLOCK + _padded(path.stat().st_size, BLOCK) for path in _files(directory))
    return _padded(size + 2 * BLOCK, tarfile.RECORDSIZE)


def tar_pieces(directory: Path) -> Iterator[bytes]:
    """Yields the pieces of the tar file, made while it is sent. All files are opened first: none is replaced."""
    with contextlib.ExitStack() as held:
        files = [(path, held.enter_context(path.open("rb"))) for path in _files(directory)]
        sent = 0
        for path, file in files:
            head = tarfile.TarInfo(str(path.relative_to(directory)))
            head.size = os.fstat(file.fileno()).st_size
            yield head.tobuf()
            while piece := file.read(PIECE_BYTES):
                yield piece
            yield bytes(_padded(head.size, BLOCK) - head.size)
            sent += BLOCK + _padded(head.size, BLOCK)
        yield bytes(_padded(sent + 2 * BLOCK, tarfile.RECORDSIZE) - sent)


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def _padded(size: int, unit: int) -> int:
    return -(-size // unit) * unit
