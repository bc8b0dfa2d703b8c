"""`art join`: adds this machine to a learner on several nodes."""

from typing import Annotated

from typer import Option

from art_cli.cli import Config, Overrides
from art_cli.runtime.errors import UsageError


def run(
    config: Config,
    overrides: Overrides = None,
    wait_s: Annotated[
        float, Option("--wait", metavar="SECONDS", min=1, max=31_536_000, help="Longest wait for the first node.")
    ] = 600.0,
) -> None:
    """Join a learner of several machines.

    One machine runs `art train CONFIG`; the others run `art join CONFIG` with the same settings and end with the run.
    They need the base model and your algorithm, but no scenarios, rollout or judge. Set ART_NODES_SECRET to the same
    value on all machines.

    \b
    art train config.yaml learner.nodes=2 learner.rendezvous=10.0.0.4:29500     # on 10.0.0.4
    art join config.yaml learner.nodes=2 learner.rendezvous=10.0.0.4:29500      # on the other machine
    """
    from pathlib import Path

    from art_cli.config.compose import load_config
    from art_cli.learners.processes.job import make_job
    from art_cli.learners.processes.joined_node import join
    from art_cli.loop.decide import decide_by_base
    from art_cli.models.base_source import find_base
    from art_cli.runtime import threads
    from art_cli.runtime.scratch import scratch

    loaded = load_config(config, overrides or [])
    learner = loaded.config.learner
    if learner.nodes == 1:
        raise UsageError(f"{config}: learner.nodes is 1, so no node can join; set it and learner.rendezvous")
    with scratch("node") as directory:
        base = find_base(loaded.config.model.base, directory=loaded.directory, built=directory / "base")
        decided = decide_by_base(loaded, base).config  # same choices as the run; dtype and rate come from the run
        model = loaded.config.model.model_copy(update={"max_length": decided.model.max_length})
        train = loaded.config.train.model_copy(update={"max_kl": decided.train.max_kl})
        chosen = {"learner": decided.learner, "model": model, "train": train, "loss": decided.loss}
        own = loaded.config.model_copy(update=chosen)
        job = make_job(own, base, directory=loaded.directory, dtype=model.dtype)
        threads.run(join(job, files=Path(directory), logs=Path(directory), wait_s=wait_s))
