"""Mirror: uploads a run to an object store while it trains, in background threads.

Training never waits for the store. If the store fails, hangs or refuses, one warning is logged and uploads are retried
until they succeed. The end of the run waits for pending uploads up to a deadline, then logs the remaining files. The
next start uploads them.
"""

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import AsyncIterator
from concurrent import futures

import msgspec

from art_cli.runs.run_dir import RunDir
from art_cli.runs.storage import fetch
from art_cli.runs.storage.object_store import RENEW_S, Lease, Marker, ObjectStore, read_marker, take, write_marker
from art_cli.runs.storage.uploads import Uploads
from art_cli.runtime.errors import ArtError, Interrupted, RunError, StorageError, describe
from art_cli.runtime.threads import call_in_thread, start_in_thread

log = logging.getLogger(__name__)

PAUSE_S = 5.0  # minimum pause between upload rounds; otherwise short training steps would upload very often
LOOK_S = 15.0  # interval between checks of growing files
FIRST_RETRY_S, LAST_RETRY_S = 1.0, 60.0  # pauses after failures; each doubles the previous pause
NUM_LAST_TRIES, LAST_WAIT_S = 4, 4.0  # attempts after training ends, and the longest pause between attempts
INTERRUPTED_S = 25.0  # maximum wait for uploads after Ctrl-C or SIGTERM; spot machines get 30 s or more
END_S = 3600.0  # maximum wait after training, as long as uploads succeed
MAX_NAMED = 4  # number of pending files listed in a warning


class Mirror:
    """A run's upload thread and lease renewal thread. `NoMirror` has the same methods and does nothing."""

    def __init__(self, run: RunDir, lease: Lease, *, keep: int, keeps_best: bool) -> None:
        self.run, self.lease, self.store = run, lease, lease.store
        self.uploads = Uploads(run, lease.store, keep=keep, keeps_best=keeps_best, confirm=lease.confirm)
        self._refusal: RunError | None = None  # another machine took the run over
        self._is_warned = False
        self._wake, self._is_over, self._is_ending = threading.Event(), threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=target, name=f"mirror {target.__name__}", daemon=True)
            for target in (self._upload, self._renew)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def nudge(self) -> None:
        self._wake.set()

    def check(self) -> None:
        """Raises RunError if another machine took over the run; this machine must then stop."""
        if self._refusal is not None:
            raise RunError(f"{self._refusal}; what it has is in {self.run.root}")

    async def close(self, timeout_s: float) -> None:
        """Uploads pending files and releases the lease. After `timeout_s` it logs the remaining files instead."""
        self._is_ending.set()
        self._wake.set()
        await call_in_thread(self._end, timeout_s)

    # --- threads ------------------------------------------------------------------------------------------------------

    def _upload(self) -> None:
        """Uploads until the end or until another machine takes over. The final upload has few attempts."""
        wait_s, num_last = 0.0, NUM_LAST_TRIES
        while self._refusal is None and not self._is_over.is_set() and num_last:
            if self._is_ending.is_set():
                self._is_over.wait(min(wait_s, LAST_WAIT_S))
            elif wait_s:
                self._is_ending.wait(wait_s)
            else:
                self._is_ending.wait(PAUSE_S)
                self._wake.wait(LOOK_S)
            self._wake.clear()
            is_ending = self._is_ending.is_set()
            if not self._try(everything=is_ending):
                wait_s = min(max(FIRST_RETRY_S, 2 * wait_s), LAST_RETRY_S)
                num_last -= is_ending
                continue
            wait_s = 0.0
            if is_ending:
                return

    def _try(self, *, everything: bool) -> bool:
        """Returns True when every due file is in the store. Logs the first failure."""
        try:
            while self.uploads.send(everything=everything) and not self._is_over.is_set():
                pass
        except RunError as error:
            self._lose(error)
            return False
        except Exception as error:  # boundary to the store's client; training continues after any error
            self._warn(error)
            return False
        if self._is_warned:
            log.info("%s: uploads continue", self.store.address)
            self._is_warned = False
        return True

    def _renew(self) -> None:
        while self._refusal is None and not self._is_over.wait(RENEW_S):
            try:
                self.lease.renew()
            except RunError as error:
                self._lose(error)
            except Exception as error:
                self._warn(error)

    def _lose(self, error: RunError) -> None:
        if self._refusal is None:
            self._refusal = error
            log.warning("%s", error)

    def _warn(self, error: Exception) -> None:
        text = str(error) if isinstance(error, ArtError) else describe(error)
        if self._is_warned:
            log.debug("%s", text)
            return
        self._is_warned = True
        log.warning("%s; training continues, and uploads are tried again", text)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _end(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        self._threads[0].join(timeout_s)
        self._is_over.set()
        self._wake.set()
        if self._refusal is not None:
            return
        owed = self.uploads.owed()
        if owed:
            named = ", ".join(owed[:MAX_NAMED]) + (
                f" and {len(owed) - MAX_NAMED} more" if len(owed) > MAX_NAMED else ""
            )
            log.warning(
                "%s: not uploaded: %s; the same command on this machine uploads it from %s",
                self.store.address, named, self.run.root,
            )  # fmt: skip
        if owed and self._threads[0].is_alive():
            return  # the store hangs; the lease runs out by itself
        giving_s = max(5.0, deadline - time.monotonic()) if timeout_s < END_S else 60.0
        futures.wait([start_in_thread(self._give_back)], timeout=giving_s)

    def _give_back(self) -> None:
        try:
            self.lease.give_back()
        except (RunError, StorageError) as error:
            log.debug("%s", error)


class NoMirror:
    """The mirror for runs without a store."""

    def nudge(self) -> None:
        return None

    def check(self) -> None:
        return None


@contextlib.asynccontextmanager
async def mirrored(
    run: RunDir, address: str | None, *, keep: int, keeps_best: bool
) -> AsyncIterator[Mirror | NoMirror]:
    """Mirrors the run at `address`/<run name> while the block runs. Changes from other machines are downloaded first.

    Raises RunError if another machine is using the run, StorageError if the store is unreachable, and UsageError for
    unusable addresses.
    """
    if address is None:
        yield NoMirror()
        return
    mirror = await call_in_thread(open_mirror, run, f"{address}/{run.root.name}", keep, keeps_best)
    mirror.start()
    timeout_s = INTERRUPTED_S
    try:
        yield mirror
        timeout_s = END_S
    except Interrupted:
        raise
    except Exception:
        timeout_s = END_S
        raise
    finally:
        await mirror.close(timeout_s)


def open_mirror(run: RunDir, address: str, keep: int, keeps_best: bool) -> Mirror:
    """Takes the lease, updates the directory, and returns the mirror. Raises RunError, StorageError, UsageError."""
    store = ObjectStore(address)
    marker = read_marker(run.root)
    own = marker if marker is not None and marker.address == store.address else None
    last = own or Marker(address=store.address, token="", is_whole=False)
    token = last.next_token or uuid.uuid4().hex  # reuse the token if an earlier start failed before taking the lease
    write_marker(run.root, msgspec.structs.replace(last, next_token=token))
    lease = take(store, token, own=last.token, begun=last.next_token)
    try:
        if not (last.is_whole and lease.record.after == last.token):
            fetch.restore(run, store, token, own=own)
        write_marker(run.root, Marker(address=store.address, token=token, is_whole=True))
        mirror = Mirror(run, lease, keep=keep, keeps_best=keeps_best)
        mirror.uploads.look()
        log.info("%s: kept at %s", run.root, store.address)
        return mirror
    except BaseException:
        with contextlib.suppress(RunError, StorageError):
            lease.give_back()
        raise
