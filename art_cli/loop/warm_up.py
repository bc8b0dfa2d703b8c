"""WarmUp: the supervised phase before the first step, saved as it goes and made once.

Runs that need the same warm-up share it.

    runs/.warm/<digest>/    a run directory of its own: step N there is the policy after N optimizer steps

The digest covers everything that the result depends on: base model, transcripts, settings, and the checkpoint to start
from. So a killed warm-up continues from its last save, and a second run with the same warm-up takes the result.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from art_cli.base_files import base_digest
from art_cli.config.compose import LoadedConfig
from art_cli.errors import RunError
from art_cli.learners import Learner, Progress
from art_cli.run_dir import Manifest, RunDir, new_checkpoint, remove, verify_checkpoint

log = logging.getLogger(__name__)

HOME = ".warm"
VERSION = 1  # version of the computation; it is raised when the same inputs give another result
TAKE_S = 1.0  # duration of one `take`, if an update takes no longer; an interrupt is answered after it
SAVE_EVERY_S, SAVE_SHARE = 10.0, 0.05  # interval of saving; it grows if saving would take more than this share
TELL_EVERY_S = 5.0  # interval of log lines if no progress bar is shown
WAIT_S = 0.5  # interval between checks whether another process has finished the same warm-up


class WarmUp:
    """One warm-up, from `begin` to `finish`. Between two calls it can be saved, and another process can continue it.

    `acquire` comes first and locks it against other processes. `release` comes last.
    """

    def __init__(
        self, learner: Learner, loaded: LoadedConfig, demos: Sequence[dict[str, Any]], *, base: str, start: Path | None
    ) -> None:
        """`base` is the hub id or directory of the learner's base, `start` the checkpoint that it was loaded from."""
        self.learner, self.demos, self.base = learner, demos, base
        self.digest = digest(loaded, demos, base=base, start=start)
        self.run = RunDir(loaded.config.runs / HOME / self.digest)
        self.num_updates = self.num_done = self._num_at_begin = 0
        self._numbers: dict[str, float] = {}
        self._lock = ExitStack()
        self._save_s = self._update_s = 0.0

    def acquire(self) -> bool:
        """Whether this process holds the warm-up's lock now; False: another process holds it."""
        try:
            self._lock.enter_context(self.run.lock())
        except RunError as error:
            log.debug("%s", error)
            return False
        self.run.clean()
        return True

    def release(self) -> None:
        self._lock.close()

    @property
    def is_done(self) -> bool:
        return self.num_updates > 0 and self.num_done >= self.num_updates

    def begin(self) -> None:
        """Prepares the learner and loads the newest saved state. Raises LearnerError: a bad transcript."""
        self.num_updates = self.learner.begin_sft(self.demos)
        log.info("sft: %d transcripts, %d updates", len(self.demos), self.num_updates)
        newest = self.run.newest_checkpoint()
        if newest is not None:
            path, manifest = newest
            if manifest.step >= self.num_updates:
                self.learner.end_sft()
                self._numbers = dict(manifest.metrics)
                log.info("sft: taken from %s, made before; remove that directory to make it anew", self.run.root)
            else:
                log.info("sft: goes on from update %d of %d", manifest.step, self.num_updates)
            self.learner.load(path)
            self.num_done = manifest.step
        self._num_at_begin, self._began = self.num_done, time.monotonic()
        self._saved = self._told = self._began

    def take(self, progress: Progress | None = None) -> None:
        """Computes for about `TAKE_S`, at least one update; saves and reports progress when that is due."""
        count = max(1, int(TAKE_S / self._update_s)) if self._update_s else 1
        count, begin = min(count, self.num_updates - self.num_done), time.monotonic()
        self._numbers = self.learner.take_sft(count)
        now = time.monotonic()
        self.num_done += count
        self._update_s = (now - begin) / count
        if progress is not None:
            progress(self.num_done, self.num_updates)
        elif now - self._told >= TELL_EVERY_S or self.is_done:
            self._told = now
            self._tell(now)
        if self.is_done:
            self.learner.end_sft()
            self.save()
        elif now - self._saved >= max(SAVE_EVERY_S, self._save_s / SAVE_SHARE):
            self.save()

    def _tell(self, now: float) -> None:
        left = (self.num_updates - self.num_done) * (now - self._began) / (self.num_done - self._num_at_begin)
        log.info(
            "sft: update %d of %d (%.0f %%)  loss %.3g  %.0f s left",
            self.num_done,
            self.num_updates,
            100 * self.num_done / self.num_updates,
            self._numbers["loss"],
            left,
        )

    def save(self) -> None:
        """Writes the current state, then removes older ones."""
        begin, path = time.monotonic(), self.run.checkpoint_path(self.num_done)
        if self.num_done == 0:
            return
        manifest = Manifest(step=self.num_done, base=self.base, config_hash=self.digest, metrics=self._numbers)
        with new_checkpoint(path, manifest) as directory:
            self.learner.save(directory)
        for step in self.run.checkpoint_steps():
            if step != self.num_done:
                remove(self.run.checkpoint_path(step))
        self._saved = time.monotonic()
        self._save_s = self._saved - begin

    def finish(self) -> dict[str, float]:
        """The metrics of the whole warm-up, from the process that made it."""
        assert self.is_done, "take() until it is done"
        return self._numbers


def run_warm_up(
    warm_up: WarmUp, is_stopped: Callable[[], bool], progress: Progress | None = None
) -> dict[str, float] | None:
    """The metrics of a warm-up, made in this thread. None: `is_stopped` ended it, and its state is saved."""
    is_told = False
    while not warm_up.acquire():
        if is_stopped():
            return None
        if not is_told:
            log.info("sft: another process makes the same warm-up; its result is taken when it is done")
            is_told = True
        time.sleep(WAIT_S)
    try:
        warm_up.begin()
        while not warm_up.is_done:
            if is_stopped():
                warm_up.save()
                return None
            warm_up.take(progress)
        return warm_up.finish()
    finally:
        warm_up.release()


def digest(loaded: LoadedConfig, demos: Sequence[dict[str, Any]], *, base: str, start: Path | None) -> str:
    """16 hexadecimal digits of everything that the result depends on, except the machine's rounding."""
    config = loaded.config
    assert config.sft is not None, "a warm-up needs an sft section"
    template = config.model.chat_template
    facts = {
        "version": VERSION,
        "model": config.model.model_dump(mode="json", exclude={"base", "chat_template"}),
        "template": None if template is None else template.read_text(encoding="utf-8"),
        "base": base_digest(base),
        "sft": config.sft.model_dump(mode="json", exclude={"demos"}),
        "demos": demos,
        "seed": config.train.seed,
        "learner": config.learner.name,
        "start": None if start is None else verify_checkpoint(start).files,
    }
    text = json.dumps(facts, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
