"""RunWriter: writes a run's checkpoints and metrics; find_start: the step from which the run continues."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from art_cli.config.compose import LoadedConfig
from art_cli.config.config_identity import config_hash
from art_cli.config.schema import RunConfig
from art_cli.learners import Learner
from art_cli.loop.claim_run import RunData
from art_cli.loop.interrupts import Interrupts
from art_cli.loop.warm_up import WarmUp, make_warm_up
from art_cli.models.policy_spec import PolicySpec
from art_cli.reports.trackers.tracker_dispatch import Trackers
from art_cli.runs.chain import add_link
from art_cli.runs.manifest import Manifest, Origin, Probe, digest_of, new_checkpoint, read_manifest
from art_cli.runs.run_checkpoints import log_policy
from art_cli.runs.run_dir import RunDir
from art_cli.runs.storage.mirror import Mirror, NoMirror
from art_cli.runtime import threads


@dataclass(frozen=True)
class RunWriter:
    """Writes a run's checkpoints and metrics.jsonl lines, and notifies trackers and mirror."""

    config: RunConfig
    files: RunDir
    policy: PolicySpec | None  # unless the engine brings its model
    origin: Origin | None  # the same at every step; None for prompts
    learner: Learner
    trackers: Trackers
    mirror: Mirror | NoMirror
    interrupts: Interrupts

    async def save(self, step: int, metrics: dict[str, float]) -> Path:
        """Writes the checkpoint of `step` in a thread, because rollouts of later steps may be running.

        The checkpoint contains the step's metrics, so a kill before recording loses no line of metrics.jsonl.
        """
        path = self.files.checkpoint_path(step)
        base, dtype = (self.config.model.base, "") if self.policy is None else (self.policy.base, self.policy.dtype)
        manifest = Manifest(
            step=step,
            base="../../base" if base == str(self.files.base) else base,
            config_hash=config_hash(self.config),
            dtype=dtype,
            origin=self.origin,
            metrics=metrics,
        )

        def write() -> None:
            if self.policy is not None and self.origin is not None:
                manifest.probe = self.learner.measure(self._probe_before())
            with new_checkpoint(path, manifest) as directory:
                self.learner.save(directory)
            add_link(self.files, manifest)

        await self.interrupts.off_loop(write)
        self.trackers.log_checkpoint(step, path)
        self.mirror.nudge()
        return path

    def _probe_before(self) -> Probe | None:
        """Returns the newest checkpoint's probe if it was measured in this dtype."""
        steps = self.files.checkpoint_steps()
        manifest = read_manifest(self.files.checkpoint_path(steps[-1])) if steps else None
        return None if manifest is None or manifest.origin != self.origin else manifest.probe

    def record(self, step: int, split: str, metrics: dict[str, float], policy: str = "") -> None:
        self.trackers.log(self.files.append_metrics(step, split, metrics, policy))

    def backfill(self, manifest: Manifest) -> None:
        """Writes the metrics line that a kill right after the checkpoint would have lost."""
        split, step = ("sft", 0) if manifest.step == 0 else ("train", manifest.step - 1)
        if manifest.metrics and not any((line.step, line.split) == (step, split) for line in self.files.metrics()):
            self.record(step, split, manifest.metrics, digest_of(manifest))


async def find_start(writer: RunWriter, loaded: LoadedConfig, data: RunData) -> int:
    """Loads the newest valid checkpoint, or makes step 0, after sft if configured. Returns its step."""
    files, newest = writer.files, writer.files.newest_checkpoint()
    files.set_aside(above=-1 if newest is None else newest[1].step)
    if newest is not None:
        path, manifest = newest
        writer.learner.load(path)
        writer.backfill(manifest)
        add_link(files, manifest, rest=manifest.step)
        log_policy(path, f"step {manifest.step}, the newest; training continues from it to {loaded.config.train.steps}")
        return manifest.step
    metrics = await _warm_up(writer, loaded, data) if loaded.config.sft is not None else {}
    await writer.save(0, metrics)
    if metrics:
        writer.record(0, "sft", metrics, digest_of(read_manifest(files.checkpoint_path(0))))
    return 0


async def _warm_up(writer: RunWriter, loaded: LoadedConfig, data: RunData) -> dict[str, float]:
    """Returns the warm-up's metrics. An interrupt stops after the current update and saves the state."""
    examples = await threads.call_in_thread(lambda: data.examples)
    assert writer.policy is not None, "a prompt has no warm-up"
    make = partial(WarmUp, writer.learner, loaded, examples, base=writer.policy.base, start=None)
    return await make_warm_up(await threads.call_in_thread(make), writer.interrupts)
