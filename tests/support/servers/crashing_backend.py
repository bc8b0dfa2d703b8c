"""`art backend` whose process is killed after its second optimizer step, before anybody hears of it."""

import os
import runpy
import signal

from art_cli.learners.optimizer import Adam
from art_cli.tinker.server.adapter_learner import AdapterLearner


class Crashing(AdapterLearner):
    def update(self, adam: Adam, *, max_norm: float) -> float:
        norm = super().update(adam, max_norm=max_norm)
        if self.num_updates == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return norm


if __name__ == "__main__":
    from art_cli.tinker.server import base_model as base

    base.AdapterLearner = Crashing  # type: ignore[misc]
    runpy.run_module("art_cli", run_name="__main__")
