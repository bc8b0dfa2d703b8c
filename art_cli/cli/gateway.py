"""`art gateway`: the capturing gateway. Prints addresses for clients, and finally the written files."""

import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer import Option

from art_cli import cli
from art_cli.cli.serve import KEY_VARIABLE, warn_of_open_key
from art_cli.runtime.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from art_cli.config.compose import LoadedConfig, LoadedGateway
    from art_cli.engines import Endpoint, Engine
    from art_cli.models.policy_spec import PolicySpec
    from art_cli.models.weights import Weights
    from art_cli.runs.run_checkpoints import Which
    from art_cli.runtime.secrets import Secrets
    from art_cli.serving.gateway.gateway_service import Totals
    from art_cli.serving.gateway.served_run import ServedRun
log = logging.getLogger(__name__)

PORT = 8000
MAX_ESCAPES = 1_000_000  # escapes per message; enough for a 10 MB tool result with JSON in JSON


def run(
    context: typer.Context,
    config: cli.Config,
    overrides: cli.Overrides = None,
    checkpoint: cli.Checkpoint = None,
    is_best: cli.Best = False,
    is_last: cli.Last = False,
    is_following: Annotated[
        bool, Option("--follow", help="Answer with what art improve promotes, and with its canary.")
    ] = False,
    host: Annotated[str | None, Option("--host", help="Default: 127.0.0.1; others need a key.")] = None,
    port: Annotated[int | None, Option("--port", min=0, max=65535, help="0: any free port. [default: 8000]")] = None,
    api_key: cli.ApiKey = None,
    api_key_file: cli.ClientKeyFile = None,
    max_body_mib: cli.MaxBody = 32.0,
    drain_s: cli.Drain = 30.0,
    as_json: cli.Json = False,
) -> None:
    """Record the model calls of agents in production.

    A proxy for an endpoint or a checkpoint. Clients change only base URL and key. It writes trajectories to
    runs/NAME/gateway, for art judge and art step.

    \b
    art gateway gateway.yaml                      for an endpoint; the file may contain only
                                                    engine: {name: openai, base_url: https://host/v1, model: NAME}
    art gateway config.yaml --checkpoint runs/mine
                                                  for a checkpoint and its configuration
    art gateway config.yaml --follow              for the run's best checkpoint, and what art improve makes of it
    ART_API_KEY=... art gateway gateway.yaml --host 0.0.0.0
    cat runs/NAME/gateway/trajectories-*.jsonl > seen.jsonl && art judge seen.jsonl

    Calls that continue earlier replies form a conversation, and so do all calls with a key KEY:NAME. Replies are saved
    before they are sent, so a kill loses nothing. Ctrl-C and SIGTERM finish running calls and write the last file. See
    docs/gateway.md.
    """
    from art_cli.chat.api_keys import check_exposure, read_key_texts
    from art_cli.config.compose import load_gateway
    from art_cli.engines import engine_traits
    from art_cli.runtime import threads
    from art_cli.serving.gateway.client_names import name_clients
    from art_cli.serving.gateway.gateway_service import Clients, GatewayService
    from art_cli.serving.gateway.journal import Journal

    warn_of_open_key(context)
    which = cli.which_checkpoint(is_best, is_last)
    loaded = load_gateway(config, overrides or [])
    keys = read_key_texts(api_key, api_key_file)
    clients = Clients(keys)
    settings = loaded.gateway
    host, port = settings.host if host is None else host, (settings.port or PORT) if port is None else port
    check_exposure(host, clients)
    limits: dict[str, Any] = {"drain_s": drain_s, "max_body_bytes": int(max_body_mib * 2**20)}
    greet = partial(_greet, loaded, has_keys=bool(clients), file=api_key_file, as_json=as_json)
    size, age = settings.rotate_mb * 1e6, settings.rotate_s
    made_journal = Journal(loaded.trajectories, group_size=settings.group_size, rotate_bytes=size, rotate_s=age)
    with made_journal as journal, _policy_engine(loaded, checkpoint, which, is_following) as made:
        clients = Clients(keys, name_clients(loaded.trajectories, keys))

        async def serve() -> "Totals":
            async with _started(made) as (engine, policy):
                known = _known_secrets(keys, engine.endpoint)
                limits["enforces_formats"] = engine_traits(loaded.engine, loaded.directory).enforces_formats
                service = GatewayService(
                    engine,
                    journal,
                    settings,
                    clients=clients,
                    secrets_known=known,
                    policy=policy,
                    is_blind=is_following,
                    **limits,
                )
                await service.run(host, port, lambda root: greet(engine, root))
                return service.totals

        totals = threads.run(serve())
    summary = {"directory": str(loaded.trajectories), **totals._asdict()}
    text_only = totals.num_trajectories - totals.num_exact
    kinds = "all token for token" if not text_only else f"{text_only} of them with calls that are text only"
    wrote = f"{totals.num_trajectories} trajectories in {totals.num_files} files, {kinds}"
    wrote = f"{wrote if totals.num_files else 'nothing'}: {loaded.trajectories}"
    cli.print_result(summary, f"{totals.num_calls} calls answered; wrote {wrote}", as_json)


class _Made(NamedTuple):
    engine: "Engine | ServedRun"
    checkpoint: Path | None
    step: int
    policy: "Weights | PolicySpec | None"  # None for the endpoint's model


@contextlib.contextmanager
def _policy_engine(
    loaded: "LoadedGateway", checkpoint: Path | None, which: "Which", is_following: bool
) -> Iterator[_Made]:
    """Yields the engine for an endpoint, for a run's checkpoint, or for what a run serves from time to time."""
    from art_cli.engines import engine_traits, make_engine
    from art_cli.loop.decide import decide_engine
    from art_cli.loop.references import check_ready
    from art_cli.loop.stage_policy import dtype_of, find_policy, open_policy
    from art_cli.runs.run_checkpoints import log_policy
    from art_cli.runs.system_prompt import is_prompt

    logs, directory, run = loaded.trajectories / "logs", loaded.directory, loaded.run
    if run is None or not engine_traits(loaded.engine, directory).can_train:
        if is_following:
            raise UsageError("--follow: nothing to follow; name a configuration with model and rollout")
        if named := _named(checkpoint, which):
            raise UsageError(f"{named}: engine {loaded.engine.name!r} answers with its own model; leave one out")
        log_policy(loaded.name, "the engine's own model")
        yield _Made(make_engine(loaded.engine, None, name=loaded.name, logs=logs, directory=directory), None, 0, None)
        return
    if is_following:
        yield _Made(_served_run(run, checkpoint, which, logs), None, 0, None)
        return
    source = find_policy(run, checkpoint, which=which)
    if source.checkpoint is not None and is_prompt(source.checkpoint):
        raise UsageError(f"{source.checkpoint}: a prompt, which art gateway cannot add to calls; art serve can")
    check_ready(run, ("model", "engine"))
    run = decide_engine(run, trained_in=[dtype_of(run, source)])
    with open_policy(run, source) as policy:
        name, step = run.config.name, source.step
        made = make_engine(run.config.engine, policy, name=name, step=step, logs=logs, directory=directory)
        yield _Made(made, source.checkpoint, step, policy)


def _served_run(run: "LoadedConfig", checkpoint: Path | None, which: "Which", logs: Path) -> "ServedRun":
    from art_cli.loop.decide import decide_engine
    from art_cli.loop.record import follow
    from art_cli.loop.references import check_ready
    from art_cli.runs.run_dir import RunDir
    from art_cli.serving.gateway.served_run import ServedRun
    from art_cli.serving.served_policies import ENGINES, Loader

    if named := _named(checkpoint, which):
        raise UsageError(f"--follow takes what the run offers; leave out {named}")
    files = RunDir(run.config.runs / run.config.name)
    if not files.checkpoint_steps():
        raise UsageError(f"--follow: {files.root} has no checkpoint; train it first")
    check_ready(run, ("model", "engine"))
    engine = decide_engine(follow(run, files)).config.engine
    if engine.name not in ENGINES:
        raise UsageError(
            f"--follow: engine {engine.name!r} cannot change checkpoints here; take {' or '.join(ENGINES)}"
        )
    return ServedRun(files, Loader(engine, logs, num_policies=2), name=run.config.name)


def _named(checkpoint: Path | None, which: "Which") -> str:
    """Returns the option that names a checkpoint, "" without one."""
    from art_cli.runs.run_checkpoints import option

    return f"--checkpoint {checkpoint}" if checkpoint is not None else option(which)


@contextlib.asynccontextmanager
async def _started(made: _Made) -> "AsyncIterator[tuple[Engine | ServedRun, str]]":
    """Starts the engine; yields it with the policy's digest, "" without a proof."""
    from art_cli.engines.proof import WeightProof
    from art_cli.loop.policy_sampler import read_origin
    from art_cli.runs.manifest import read_manifest
    from art_cli.serving.gateway.served_run import ServedRun

    await made.engine.start()
    try:
        proven = None
        if made.checkpoint is not None and made.policy is not None and not isinstance(made.engine, ServedRun):
            await made.engine.load(made.checkpoint, made.step)
            origin = await read_origin(made.policy)
            proven = await WeightProof().prove(made.engine, read_manifest(made.checkpoint), origin)
        yield made.engine, "" if proven is None else proven.digest
    finally:
        await made.engine.close()


def _greet(
    loaded: "LoadedGateway",
    engine: "Engine | ServedRun",
    root: str,
    *,
    has_keys: bool,
    file: Path | None,
    as_json: bool,
) -> None:
    model = engine.endpoint.model
    source = f"one of the keys in {file}" if file is not None else f"the key in {KEY_VARIABLE}"
    key = source if has_keys else "any word, because this gateway has no keys and only this machine reaches it"
    text = (
        f"recording {model} in {loaded.trajectories}\n\n"
        f"OpenAI clients      base_url {root}/v1   (OPENAI_BASE_URL)\n"
        f"Anthropic clients   base_url {root}   (ANTHROPIC_BASE_URL)\n"
        f"model               {model}\n"
        f"key                 {key};\n"
        f"                    KEY:NAME makes all calls with it the conversation NAME\n\n"
        f"Ctrl-C ends it and writes the last file; art judge reads each file"
    )
    cli.print_result({"url": f"{root}/v1", "model": model, "directory": str(loaded.trajectories)}, text, as_json)


def _known_secrets(keys: "Sequence[str]", endpoint: "Endpoint") -> "Secrets":
    """Returns the keys for clients and endpoint, with any password in the endpoint's URL."""
    from art_cli.runtime.secrets import find_secrets

    values, urls = [*keys, endpoint.api_key], [endpoint.base_url or ""]
    return find_secrets({}, values=values, urls=urls, max_escapes=MAX_ESCAPES)
