"""WarmUp: the supervised phase before the first step, saved regularly and shared between runs.

    runs/.warm/<digest>/    a run directory; its step N is the policy after N optimizer steps

The digest covers all inputs: base model, examples, settings and start checkpoint. A killed warm-up continues from the
newest save. Other runs with the same warm-up reuse the result.
"""

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from art_cli.config.compose import LoadedConfig
from art_cli.learners import SFT_DIRECTORY, Learner, Progress, SftProgress
from art_cli.learners.sft.examples import Examples, without_source
from art_cli.loop.interrupts import Interrupts
from art_cli.models.base_files import base_digest
from art_cli.runs.durable import remove
from art_cli.runs.manifest import Manifest, new_checkpoint, verify_checkpoint
from art_cli.runs.run_dir import RunDir
from art_cli.runtime import log as logs
from art_cli.runtime.errors import RunError

log = logging.getLogger(__name__)

HOME = ".warm"
VERSION = 1  # version of the computation; increase it when the same inputs give another result
TAKE_S = 1.0  # target duration of a `take`; interrupts are handled between takes
SAVE_EVERY_S = 10.0  # minimum interval between saves
SAVE_SHARE = 0.05  # largest share of the time for saving
LOG_EVERY_S = 5.0  # interval between log lines if no progress bar is shown
WAIT_S = 0.5  # interval of checks for another process's result


class WarmUp:
    """One warm-up, from `begin` on. Between calls it can be saved, and another process can continue it.

    Call `acquire` first, which locks it against other processes, and `release` last.
    """

    def __init__(
        self, learner: Learner, loaded: LoadedConfig, examples: Examples, *, base: str, start: Path | None
    ) -> None:
        """`base` is the id or directory of the learner's base, `start` its loaded checkpoint."""
        self.learner, self.examples, self.base = learner, examples, base
        self.digest = digest(loaded, examples, base=base, start=start)
        self.run = RunDir(loaded.config.runs / HOME / self.digest)
        self.num_updates = self.num_done = self._num_at_begin = 0
        self.is_done = False
        self.metrics: dict[str, float] = {}
        self._lock = ExitStack()
        self._save_s = self._update_s = 0.0

    def acquire(self) -> bool:
        """Tries to take the warm-up's lock; returns False if another process holds it."""
        try:
            self._lock.enter_context(self.run.lock())
        except RunError as error:
            log.debug("%s", error)
            return False
        self.run.clean()
        return True

    def release(self) -> None:
        self._lock.close()

    def begin(self) -> None:
        """Prepares the learner and loads the newest saved state. Raises LearnerError for an invalid example."""
        trained, evaluated = self.examples
        self.num_updates = self.learner.begin_sft(trained, evaluated)
        held_out = f", {len(evaluated)} to evaluate on" if evaluated else ""
        log.info("sft: %d examples%s, %d updates", len(trained), held_out, self.num_updates)
        newest = self.run.newest_checkpoint()
        if newest is not None:
            path, manifest = newest
            self.is_done = not (path / SFT_DIRECTORY).is_dir()  # a finished warm-up keeps no sft state
            self.metrics = dict(manifest.metrics)
            if self.is_done:
                self.learner.end_sft()
                log.info("sft: taken from %s, made before; remove that directory to repeat it", self.run.root)
            else:
                log.info("sft: continues from update %d of %d", manifest.step, self.num_updates)
            self.learner.load(path)
            self.num_done = manifest.step
        self._num_at_begin, self._began = self.num_done, time.monotonic()
        self._saved = self._logged = self._began

    def take(self, progress: Progress | None = None) -> None:
        """Computes for about `TAKE_S` seconds, at least one update; saves and reports progress when due."""
        count = max(1, int(TAKE_S / self._update_s)) if self._update_s else 1
        count, begin = min(count, self.num_updates - self.num_done), time.monotonic()
        taken = self.learner.take_sft(count)
        now = time.monotonic()
        self._update_s = (now - begin) / max(1, taken.num_updates - self.num_done)
        self._log_evaluation(taken)
        self.num_done, self.is_done, self.metrics = taken.num_updates, taken.is_done, taken.numbers
        if progress is not None:
            progress(self.num_done, self.num_updates)
        elif now - self._logged >= LOG_EVERY_S or self.is_done:
            self._logged = now
            self._log_progress(now)
        if self.is_done:
            self.learner.end_sft()
            self.save()
        elif now - self._saved >= max(SAVE_EVERY_S, self._save_s / SAVE_SHARE):
            self.save()

    def _log_progress(self, now: float) -> None:
        left = (self.num_updates - self.num_done) * (now - self._began) / (self.num_done - self._num_at_begin)
        text = "sft: update %d of %d (%.0f %%)  loss %.3g  %.0f s left"
        share, loss = 100 * self.num_done / self.num_updates, self.metrics["loss"]
        log.info(text, self.num_done, self.num_updates, share, loss, 0.0 if self.is_done else left)

    def _log_evaluation(self, taken: SftProgress) -> None:
        """Logs a new evaluation loss, and the result of early stopping."""
        numbers = taken.numbers
        if numbers.get("num_evaluations", 0) > self.metrics.get("num_evaluations", 0):
            log.info("sft: update %d of %d  eval_loss %.4g", taken.num_updates, self.num_updates, numbers["eval_loss"])
        if taken.is_done and "best_update" in numbers:
            stop = "" if taken.num_updates >= self.num_updates else ", stopped early"
            text = "sft: %d updates%s; keeps the weights of update %.0f, eval_loss %.4g"
            log.info(text, taken.num_updates, stop, numbers["best_update"], numbers["eval_loss_best"])

    def save(self) -> None:
        """Writes the current state and removes older ones."""
        begin, path = time.monotonic(), self.run.checkpoint_path(self.num_done)
        if self.num_done == 0:
            return
        manifest = Manifest(step=self.num_done, base=self.base, config_hash=self.digest, metrics=self.metrics)
        with new_checkpoint(path, manifest) as directory:
            self.learner.save(directory)
        for step in self.run.checkpoint_steps():
            if step != self.num_done:
                remove(self.run.checkpoint_path(step))
        self._saved = time.monotonic()
        self._save_s = self._saved - begin


def run_warm_up(
    warm_up: WarmUp, is_stopped: Callable[[], bool], progress: Progress | None = None
) -> dict[str, float] | None:
    """Runs a warm-up in this thread and returns its metrics; saves the state and returns None if `is_stopped`."""
    is_logged = False
    while not warm_up.acquire():
        if is_stopped():
            return None
        if not is_logged:
            log.info("sft: another process makes the same warm-up; its result is taken when it is done")
            is_logged = True
        time.sleep(WAIT_S)
    try:
        warm_up.begin()
        while not warm_up.is_done:
            if is_stopped():
                warm_up.save()
                return None
            warm_up.take(progress)
        return warm_up.metrics
    finally:
        warm_up.release()


async def make_warm_up(warm_up: WarmUp, interrupts: Interrupts) -> dict[str, float]:
    """Returns the metrics of a warm-up made in a thread. Raises Interrupted after saving the state."""
    is_left = threading.Event()  # set when this task is cancelled; the thread itself cannot be cancelled

    def is_stopped() -> bool:
        return interrupts.num > 0 or is_left.is_set()

    try:
        with logs.shown_bar("sft: updates") as progress:
            metrics = await interrupts.off_loop(run_warm_up, warm_up, is_stopped, progress)
    finally:
        is_left.set()
    if metrics is None:
        interrupts.stop_if_any()
    assert metrics is not None, "only an interrupt ends it early"
    return metrics


def digest(loaded: LoadedConfig, examples: Examples, *, base: str, start: Path | None) -> str:
    """Returns 16 hexadecimal digits that identify all inputs of the warm-up."""
    config = loaded.config
    assert config.sft is not None, "a warm-up needs an sft section"
    template = config.model.chat_template
    facts = {
        "version": VERSION,
        "model": config.model.model_dump(mode="json", exclude={"base", "chat_template"}),
        "template": None if template is None else template.read_text(encoding="utf-8"),
        "base": base_digest(base),
        "sft": config.sft.model_dump(mode="json", exclude={"demos", "eval_demos", "best_of", "min_reward", "held_out"}),
        "demos": [without_source(each) for each in examples.trained],
        "evaluated": [without_source(each) for each in examples.evaluated],
        "seed": config.train.seed,
        "learner": config.learner.name,
        "start": None if start is None else verify_checkpoint(start).files,
    }
    if config.engine.server is not None:  # the weights exist only on the server
        facts["server"] = config.engine.server
    text = json.dumps(facts, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
