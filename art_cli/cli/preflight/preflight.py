"""Preflight: tries every requirement of a run once, from cheap to expensive, until the first failure.

Slow checks log an estimated time. Nothing is written outside a temporary directory. A paid judge is called once, about
two short attempts, and the finding reports the cost.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from art_cli.cli import Finding
from art_cli.cli.doctor import check_gpu
from art_cli.cli.preflight import judge_checks, model_checks, rollout_checks, setup_checks
from art_cli.cli.preflight.opened import Opened, SourcePart
from art_cli.config.compose import LoadedConfig
from art_cli.config.schema import VllmEngineConfig
from art_cli.runtime import threads
from art_cli.runtime.errors import ArtError


class Check(NamedTuple):
    """One check. `find` returns None if the check does not apply."""

    name: str
    find: Callable[[Opened, SourcePart], Finding | None]
    is_per_source: bool = False
    needs_weights: bool = False  # skipped by a search for a prompt, which trains no weights


BEFORE_MODEL = (
    Check("store", setup_checks.check_store),
    Check("nodes", setup_checks.check_nodes),
    Check("run", setup_checks.check_run),
    Check("trackers", setup_checks.check_trackers),
    Check("retirement", judge_checks.check_retirement),
    Check("scenarios", rollout_checks.check_scenarios, is_per_source=True),
    Check("cluster", setup_checks.check_cluster),
    Check("entries", rollout_checks.check_entries, is_per_source=True),
    Check("shadow", judge_checks.check_shadow),
)
AFTER_MODEL = (
    Check("rollout", rollout_checks.check_rollout, is_per_source=True),
    Check("tools", rollout_checks.check_tools, is_per_source=True),
    Check("tokens", model_checks.check_tokens, is_per_source=True, needs_weights=True),
    Check("update", model_checks.check_update, needs_weights=True),
    Check("judge", judge_checks.check_judge, is_per_source=True),
    Check("disk", model_checks.check_disk, needs_weights=True),
)


class Preflight:
    """Runs all checks. `parts` maps source names to parts; a run without sources has the part ""."""

    def __init__(self, loaded: LoadedConfig, scratch: Path, asks_judge: bool = True) -> None:
        self.opened = Opened(loaded, scratch, asks_judge)
        self.parts = {name: SourcePart(name, of_source) for name, of_source in loaded.by_source.items()}

    def check(self) -> Iterator[Finding]:
        engine = self.opened.loaded.config.engine
        vllm = engine if isinstance(engine, VllmEngineConfig) else None
        for found in check_gpu(vllm.python if vllm else None):
            yield found if vllm else found._replace(is_good=True)  # only vLLM needs the compiler
            if vllm and not found.is_good:
                return
        yield (finding := setup_checks.check_engine(self.opened))
        if not finding.is_good:
            return
        for check in (*BEFORE_MODEL, Check("model", self._open_model), *AFTER_MODEL):
            if check.needs_weights and not self.opened.loaded.config.learner.trains_weights:
                continue
            for part in self.parts.values() if check.is_per_source else [self._whole()]:
                begin, took = time.perf_counter(), ""
                try:
                    found_now = check.find(self.opened, part)
                    took = f" ({time.perf_counter() - begin:.1f} s)"
                except ArtError as error:
                    found_now = Finding(check.name, False, str(error))
                if found_now is not None:
                    name = f"{found_now.name} {part.source}".rstrip()
                    yield found_now._replace(name=name, message=found_now.message + took)
                    if not found_now.is_good:
                        return

    def close(self) -> None:
        if self.opened.learner is not None:
            self.opened.learner.close()
        for part in self.parts.values():
            if part.judge is not None:
                threads.run(part.judge.close())

    def _whole(self) -> SourcePart:
        played = [attempt for part in self.parts.values() for attempt in part.played]
        return SourcePart("", self.opened.loaded, played=played)

    def _open_model(self, opened: Opened, part: SourcePart) -> Finding:
        self.opened, finding = model_checks.open_model(opened)
        for name, loaded in self.opened.loaded.by_source.items():
            self.parts[name].loaded = loaded
        return finding
