"""`art serve`: checkpoints behind an OpenAI-compatible API. Prints working example commands."""

import json
import logging
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer
from typer import Argument, Option

from art_cli import cli
from art_cli.runtime.errors import UsageError, printable

if TYPE_CHECKING:
    from art_cli.config.schema import EngineConfig
    from art_cli.loop.engine_choice import Machine
    from art_cli.runs.run_checkpoints import Which
    from art_cli.serving.served_model import Source

log = logging.getLogger(__name__)

# Longest time for a thread to block the interpreter while parsing a hostile request. With Python's default, 5 ms, the
# median latency of other requests under attack was 38 ms (benchmarks/attacks/serve_attack.py).
SWITCH_S = 0.0005

KEY_VARIABLE = "ART_API_KEY"


def run(
    context: typer.Context,
    checkpoints: Annotated[
        list[str],
        Argument(metavar="[NAME=]CHECKPOINT...", help="Checkpoint, run, adapter or base model.", show_default=False),
    ],
    is_best: cli.Best = False,
    is_last: cli.Last = False,
    is_following: Annotated[bool, Option("--follow", help="Switch to a run's new checkpoints.")] = False,
    base: cli.Base = None,
    engine: Annotated[
        str, Option("--engine", metavar="NAME", help="auto, embedded or vllm; for a prompt also openai.")
    ] = "auto",
    knobs: Annotated[list[str] | None, Option("--set", metavar="KEY=VALUE", help="Engine setting; repeatable.")] = None,
    is_trusted: Annotated[
        bool, Option("--trust", help="Start programs and send your key to endpoints that the run's config.json names.")
    ] = False,
    dtype: Annotated[str | None, Option("--dtype", help="float32 or bfloat16; default: the run's.")] = None,
    host: cli.Host = "127.0.0.1",
    port: cli.Port = 8000,
    api_key: cli.ApiKey = None,
    api_key_file: Annotated[Path | None, Option("--api-key-file", metavar="FILE", help="A key per line.")] = None,
    concurrency: Annotated[int, Option("--concurrency", min=1, help="Limit on concurrent requests.")] = 256,
    queue: Annotated[int, Option("--queue", min=0, help="Limit on waiting requests; others get 429.")] = 1024,
    max_body_mib: cli.MaxBody = 32.0,
    drain_s: cli.Drain = 30.0,
    logprobs_mode: Annotated[
        Literal["raw_logprobs", "processed_logprobs"],
        Option("--logprobs-mode", help="Logprobs before or after temperature, as in vLLM."),
    ] = "raw_logprobs",
    logs_content: Annotated[bool, Option("--log-content", help="Log prompts and replies.")] = False,
    as_json: cli.Json = False,
) -> None:
    """Put checkpoints behind an OpenAI-compatible API.

    \b
    art serve runs/mine                           the best evaluated checkpoint, as model `mine`
    art serve runs/mine --last --follow           the newest checkpoint, updated during training
    art serve small=runs/a large=runs/b/checkpoints/step_0040
    ART_API_KEY=... art serve runs/mine --host 0.0.0.0

    SIGTERM and Ctrl-C finish running requests, and refuse new requests with 503.
    """
    from art_cli.chat.api_keys import Keys, check_exposure, read_key_texts
    from art_cli.runtime import threads
    from art_cli.runtime.scratch import scratch
    from art_cli.serving.serve_service import Limits, Service
    from art_cli.serving.served_policies import Loader, Policies, ServedPolicy

    warn_of_open_key(context)
    which = cli.which_checkpoint(is_best, is_last)
    if is_following and any("://" in text for text in checkpoints):
        raise UsageError("--follow: name a run's directory on this machine; an object store is read once")
    keys = Keys(read_key_texts(api_key, api_key_file))
    check_exposure(host, keys)
    with scratch("serve") as directory:
        sources = _find_sources(checkpoints, which=which, base=base, dtype=dtype, directory=directory)
        if is_following and not all(source.run is not None for source in sources):
            raise UsageError("--follow: name a run (or a checkpoint in one); nothing else has new checkpoints")
        loader = Loader(_choose_engine(engine, knobs or [], sources, is_trusted=is_trusted), directory, len(sources))
        if loader.swaps_adapters and not _fit_in_one_server(sources):
            raise UsageError(
                "--engine vllm serves adapters on one base; start one server per base, or --engine embedded"
            )
        log.info("loading %s into %s", ", ".join(map(str, sources)), loader.config.name)
        service = Service(
            Policies([ServedPolicy(source, loader) for source in sources]),
            keys=keys,
            limits=Limits(concurrency, queue, int(max_body_mib * 2**20), drain_s=drain_s),
            follows=which if is_following else None,
            logs_content=logs_content,
            is_processed=logprobs_mode == "processed_logprobs",
        )
        key = how_to_get_key(bool(keys), api_key_file)
        sys.setswitchinterval(SWITCH_S)
        threads.run(service.run(host, port, lambda root: _greet(root, sources, key, as_json)))


def warn_of_open_key(context: typer.Context) -> None:
    source = context.get_parameter_source("api_key")
    if source is not None and source.name == "COMMANDLINE":
        log.warning(
            "--api-key: anyone on this machine can see it in `ps`; set %s, or give --api-key-file", KEY_VARIABLE
        )


def _find_sources(
    texts: Sequence[str], *, which: "Which", base: str | None, dtype: str | None, directory: Path
) -> "list[Source]":
    """Resolves every `[NAME=]CHECKPOINT`. Raises UsageError if one is neither here nor on the hub."""
    from art_cli.models.base_source import find_base, require_base
    from art_cli.serving.served_model import find_source

    if base is not None:
        base = find_base(base, directory=Path.cwd(), built=directory / "base", named="--base")
    bases = directory / "bases"
    sources = [find_source(cli.named_policy(text), which=which, base=base, dtype=dtype, built=bases) for text in texts]
    for source in (each for each in sources if not each.is_hosted):
        require_base(source.base, source.named)
    return sources


def _choose_engine(
    name: str,
    knobs: Sequence[str],
    sources: "Sequence[Source]",
    machine: "Machine | None" = None,
    *,
    is_trusted: bool = False,
) -> "EngineConfig":
    """Returns the requested engine. Raises UsageError if an untrusted run names vLLM's program or an endpoint."""
    from art_cli.engines.vllm.arguments import ONLY_16_BITS
    from art_cli.loop.engine_choice import Machine, choose_engine
    from art_cli.serving.served_policies import check_trust, engine_config, read_knobs

    settings, trained, machine = read_knobs(knobs), _trained_engine(sources), machine or Machine()
    first = sources[0]
    obstacle = "" if _fit_in_one_server(sources) else "vLLM serves adapters on one base only"
    if any(source.dtype == "float32" for source in sources):
        obstacle = f"the policy has float32 weights, and {ONLY_16_BITS}"
    is_open = name == "auto" and not first.is_hosted
    may_be_vllm = name == "vllm" or (is_open and machine.has_gpu() and not obstacle)
    if may_be_vllm and not is_trusted and first.run is not None:
        check_trust(trained, settings, place=first.run.config_path)
    if name == "auto" and first.is_hosted:
        name = str(trained.get("name"))
        if not is_trusted and "base_url" not in settings:
            where = printable(str(trained.get("base_url")), limit=200)
            raise UsageError(
                f"{first}: would send every request and your key to {where}; add --trust if this run is yours, or "
                f"name the endpoint: --engine {name} --set base_url=URL --set model=NAME"
            )
    if name == "auto":
        of_trained = trained.get("python") if trained.get("name") == "vllm" else None
        named = settings.get("python", of_trained)
        python = Path(str(named)) if named else None
        choice = choose_engine(machine, obstacle=obstacle, base=first.base, python=python, quantize=first.quantize)
        log.info("engine %s (auto: %s)", choice.name, choice.reason)
        name = choice.name
    hosted = [_trained_engine([source]) if source.is_hosted else None for source in sources]
    endpoints = [each and [each.get(key) for key in ("name", "base_url", "model")] for each in hosted]
    if "base_url" not in settings and any(each != endpoints[0] for each in endpoints):
        raise UsageError("prompts that were searched for different endpoints: start one server for each")
    has_prompts = all(source.prompt is not None for source in sources)
    return engine_config(name, settings, trained, has_prompts=has_prompts, is_trusted=is_trusted)


def _fit_in_one_server(sources: "Sequence[Source]") -> bool:
    """Returns whether one vLLM server can serve all of them: one source, or adapters on the same base."""
    bases = {(each.base, each.dtype, each.max_length, each.quantize) for each in sources}
    return len(sources) == 1 or (len(bases) == 1 and all(each.adapter is not None for each in sources))


def _trained_engine(sources: "Sequence[Source]") -> dict[str, object]:
    from art_cli.runs.run_checkpoints import run_config

    section = run_config(sources[0].run).get("engine")
    return section if isinstance(section, dict) else {}


class Key(NamedTuple):
    """Shell and Python expressions that read the key. The key is never printed."""

    in_shell: str
    in_python: str


def how_to_get_key(has_keys: bool, file: Path | None) -> Key | None:
    if not has_keys:
        return None
    if file is None:
        return Key(f"${KEY_VARIABLE}", f'os.environ["{KEY_VARIABLE}"]')
    in_python = f'next(k.strip() for k in open({json.dumps(str(file))}) if k.strip() and k.strip()[0] != "#")'
    return Key(f"$(grep -v -e '^ *#' -e '^ *$' {shlex.quote(str(file))} | head -n 1 | tr -d ' ')", in_python)


def _greet(root: str, sources: "Sequence[Source]", key: Key | None, as_json: bool) -> None:
    models = [{"id": source.name, "step": source.step, "base": source.base} for source in sources]
    model, messages = json.dumps(sources[0].name), '[{"role": "user", "content": "Hello"}]'
    header = f'-H "Authorization: Bearer {key.in_shell}" ' if key else ""
    body = shlex.quote(f'{{"model": {model}, "messages": {messages}}}')
    program = (
        f"import openai, os; client = openai.OpenAI(base_url={json.dumps(root + '/v1')}, "
        f"api_key={key.in_python if key else json.dumps('none')}); "
        f"print(client.chat.completions.create(model={model}, messages={messages}).choices[0].message.content)"
    )
    text = (
        f"serving {', '.join(map(str, sources))} at {root}/v1\n\n"
        f"curl {root}/v1/chat/completions -H 'Content-Type: application/json' {header}-d {body}\n\n"
        f"python -c {shlex.quote(program)}"
    )
    cli.print_result({"url": f"{root}/v1", "models": models}, text, as_json)
