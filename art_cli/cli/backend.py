"""`art backend`: a server for the Tinker protocol, which trains adapters and samples from them."""

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from art_cli.cli import ApiKey, ClientKeyFile, Drain, Host, Json, MaxBody, Port, print_result
from art_cli.cli.serve import Key, how_to_get_key, warn_of_open_key
from art_cli.runtime.errors import UsageError

if TYPE_CHECKING:
    from art_cli.config.compose import LoadedBackend
    from art_cli.config.schema import EngineConfig
    from art_cli.tinker.server.base_model import Base

log = logging.getLogger(__name__)


def run(
    context: typer.Context,
    arguments: Annotated[
        list[str] | None,
        Argument(metavar="[CONFIG] [KEY=VALUE...]", help="Model, engine, learner.", show_default=False),
    ] = None,
    base: Annotated[str | None, Option("--base", metavar="MODEL", help="The base model: hub id or directory.")] = None,
    directory: Annotated[
        str, Option("--checkpoints", metavar="DIR", help="Stores the clients' checkpoints.")
    ] = "backend",
    host: Host = "127.0.0.1",
    port: Port = 8100,
    api_key: ApiKey = None,
    api_key_file: ClientKeyFile = None,
    models: Annotated[int, Option("--models", min=1, help="Limit on adapters in training; others wait.")] = 8,
    samplers: Annotated[int, Option("--samplers", min=1, help="Number of policies kept ready for sampling.")] = 8,
    rank: Annotated[int, Option("--max-rank", min=1, help="Largest adapter rank.")] = 128,
    quota_gib: Annotated[
        float | None, Option("--quota", metavar="GIB", min=0.001, help="Disk limit for a client's checkpoints.")
    ] = None,
    session_s: Annotated[
        float, Option("--session", metavar="SECONDS", min=1, help="End a session after this silence.")
    ] = 3600.0,
    max_body_mib: MaxBody = 64.0,
    drain_s: Drain = 30.0,
    as_json: Json = False,
) -> None:
    """Serve the Tinker protocol.

    \b
    art backend --base Qwen/Qwen3-8B              on the machine with the GPU
    art backend config.yaml learner.micro_batch_tokens=16384
    ART_API_KEY=tml-... art backend --base Qwen/Qwen3-8B --host 0.0.0.0

    \b
    Clients are the tinker SDK (0.24.1 or later), tinker-cookbook, and other programs:
      TINKER_BASE_URL=http://127.0.0.1:8100 TINKER_API_KEY=tml-... python their_script.py
    SDK keys begin with tml-. If the server has no key, clients can use any key.

    Clients share the base model and train separate adapters. Checkpoints are written to DIR/RUN/weights/NAME, for art
    serve and art export, and survive restarts. SIGTERM and Ctrl-C finish running work. See docs/backend.md, also for
    SkyPilot, Kubernetes, Slurm and Modal.
    """
    from art_cli.tinker.client.remote_server import load_sdk

    load_sdk()  # the server uses the SDK's message types; a missing SDK is one line with the extra
    from art_cli.chat.api_keys import Keys, check_exposure, read_key_texts
    from art_cli.runtime import threads
    from art_cli.runtime.scratch import scratch
    from art_cli.tinker.server import BackendLimits
    from art_cli.tinker.server.tinker_service import BackendService

    warn_of_open_key(context)
    keys = Keys(read_key_texts(api_key, api_key_file))
    check_exposure(host, keys)
    root = Path(directory).resolve()
    loaded = _load(arguments or [], base)
    engine = _choose_engine(loaded)
    body, quota = int(max_body_mib * 2**20), None if quota_gib is None else int(quota_gib * 2**30)
    limits = BackendLimits(
        models=models,
        samplers=samplers,
        rank=rank,
        body_bytes=body,
        session_s=session_s,
        quota_bytes=quota,
        drain_s=drain_s,
    )
    made = _load_base(loaded, root, base, rank)

    key = how_to_get_key(bool(keys), api_key_file)

    async def serve() -> None:
        with scratch("backend") as logs:
            service = BackendService(made, root=root, engine=engine, keys=keys, limits=limits, logs=logs)
            await service.run(host, port, lambda address: _greet(address, made.name, key, as_json))

    threads.run(serve())


def _load(arguments: list[str], base: str | None) -> "LoadedBackend":
    """Loads model, engine and learner. Raises UsageError without a model, and for unusable settings."""
    from art_cli.config.compose import load_backend

    has_file = bool(arguments) and "=" not in arguments[0]
    path, overrides = (Path(arguments[0]), arguments[1:]) if has_file else (None, arguments)
    if path is None and base is None:
        raise UsageError("which model? art backend --base MODEL, or art backend CONFIG")
    loaded = load_backend(path, [*overrides, *([] if base is None else [f"model.base={json.dumps(base)}"])])
    if loaded.model.lora is None and loaded.engine.swaps_adapters:
        raise UsageError("model.lora: null trains all weights, and vLLM swaps adapters: engine=embedded, or set it")
    if "server" in (loaded.learner.weights, loaded.engine.weights):
        raise UsageError("engine, learner: tinker is what a client of this server has; here: engine=auto learner=auto")
    if not loaded.learner.trains_weights:
        raise UsageError("learner: 'prompt' changes no weight, and clients of this server train weights: learner=auto")
    if loaded.learner.nodes > 1:
        raise UsageError("learner.nodes: adapters of several clients are trained on one machine; set learner.processes")
    if loaded.learner.name == "unsloth" and loaded.model.lora is None:
        raise UsageError("model.lora: null trains all weights, and Unsloth adapters only: learner=torch, or set it")
    return loaded


def _choose_engine(loaded: "LoadedBackend") -> "EngineConfig":
    """Returns the engine. Raises UsageError if the engine cannot load several adapters."""
    from art_cli.config.schema import AutoEngineConfig, EmbeddedEngineConfig, VllmEngineConfig

    engine, is_unsloth = loaded.engine, loaded.learner.name == "unsloth"
    if isinstance(engine, AutoEngineConfig):
        return VllmEngineConfig(name="vllm") if is_unsloth else EmbeddedEngineConfig()
    if isinstance(engine, EmbeddedEngineConfig) and is_unsloth:
        raise UsageError("engine: embedded cannot sample from Unsloth's model: engine=vllm, or learner=torch")
    if not isinstance(engine, EmbeddedEngineConfig | VllmEngineConfig):
        raise UsageError(f"engine: {engine.name} cannot load several adapters: engine=embedded or vllm")
    if isinstance(engine, VllmEngineConfig) and engine.sleep in (1, 2):
        raise UsageError("engine.sleep: samples are drawn while the learner works, so vLLM never sleeps here")
    return engine


def _load_base(loaded: "LoadedBackend", root: Path, named: str | None, rank: int) -> "Base":
    """Loads the base model. Raises UsageError on failure."""
    from art_cli.config.schema import BaseLearnerConfig
    from art_cli.models.base_source import find_base
    from art_cli.models.loading import load_weights
    from art_cli.models.precision import gpu_bytes
    from art_cli.models.run_memory import GPU_TOKENS, checkpoint_from, model_size, run_memory
    from art_cli.tinker.server.base_model import Base

    given = named or loaded.model.base
    path = find_base(loaded.model.base, directory=loaded.directory, built=root / "base")
    bare = loaded.model.model_copy(update={"lora": None})
    learner = loaded.learner
    if learner.name == "unsloth":
        from art_cli.learners import unsloth

        weights = load_weights(bare, path, device=learner.device, load=unsloth.load_bare)
        unsloth.check_adapters(weights)
    else:
        weights = load_weights(bare, path, device=learner.device)
    total = gpu_bytes(learner.device)  # after `load_weights` has checked the device
    if total and isinstance(learner, BaseLearnerConfig) and learner.gradient_checkpointing == "auto":
        size, element, is_4bit = model_size(path), weights.dtype.itemsize, bare.quantize is not None
        is_beside = loaded.engine.name == "vllm"
        run = run_memory(size, element=element, is_4bit=is_4bit, rank=rank, tokens=GPU_TOKENS, is_beside=is_beside)
        learner = learner.model_copy(update={"gradient_checkpointing": checkpoint_from(total, run)})
    lora = loaded.model.lora if "lora" in loaded.model.model_fields_set else None
    is_whole, template = loaded.model.lora is None, loaded.model.chat_template
    if is_whole:
        log.info("model.lora is null: each client trains a copy of all weights, at any requested rank")
    return Base(weights, name=given, lora=lora, learner=learner, is_whole=is_whole, chat_template=template)


def _greet(root: str, name: str, key: Key | None, as_json: bool) -> None:
    text = (
        f"{name} is trained and sampled at {root}\n\n"
        f"TINKER_BASE_URL={root} TINKER_API_KEY={key.in_shell if key else 'tml-any'} python -c 'import tinker; "
        f"print(tinker.ServiceClient().get_server_capabilities())'"
    )
    print_result({"url": root, "base_model": name}, text, as_json)
