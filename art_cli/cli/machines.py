"""What `art backend --print` does: writes the file that starts the server elsewhere with the given options."""

import os
import sys
from typing import TYPE_CHECKING, Any

import typer
import yaml

from art_cli.cli.serve import is_on_line
from art_cli.runtime.errors import UsageError
from art_cli.tinker.server.machines import Server, check_image, check_printable, parse_gpu, writer

if TYPE_CHECKING:
    from art_cli.config.compose import LoadedBackend

APART = {"kind", "gpu", "image", "host", "port", "directory", "api_key", "api_key_file", "arguments"}
EVERYWHERE = "0.0.0.0"  # a client is on another machine


def print_file(context: typer.Context, kind: str, loaded: "LoadedBackend") -> None:
    """Raises UsageError: an option that this kind of machine cannot have, or one that holds a secret."""
    from art_cli.runtime.secrets import find_secrets

    text = writer(kind)(_server(context, kind, loaded))
    for name, value in os.environ.items():
        if find_secrets({name: value}).redact(text) != text:
            raise UsageError(f"--print: the file would hold the value of {name}, which is named like a secret")
    if find_secrets({}, params=[_sections(loaded)]).redact(text) != text:
        raise UsageError("--print: the file would hold a value of the configuration that is named like a secret")
    sys.stdout.write(text)


def _server(context: typer.Context, kind: str, loaded: "LoadedBackend") -> Server:
    given: dict[str, Any] = context.params
    is_shared = kind == "slurm"  # the file system of this machine is there too
    arguments = tuple(given["arguments"] or ())
    has_file = bool(arguments) and "=" not in arguments[0]
    options = _options(context)
    check_printable((*arguments, *options, given["directory"], given["host"], str(given["api_key_file"] or "")))
    check_image(given["image"])
    if not is_shared:
        _check_base(loaded)
    is_sent = has_file and not is_shared
    return Server(
        options=options if is_sent else (*arguments, *options),
        config=_as_yaml(_sections(loaded)) if is_sent else None,
        checkpoints=given["directory"] if is_on_line(context, "directory") else None,
        host=_host(context),
        port=_port(given["port"]),
        key_file=None if given["api_key_file"] is None else str(given["api_key_file"]),
        gpu=parse_gpu(given["gpu"]),
        image=given["image"],
        drain_s=given["drain_s"],
    )


def _options(context: typer.Context) -> tuple[str, ...]:
    """The options of the command line, but for those that the file says in its own way."""
    words: list[str] = []
    for parameter in context.command.params:
        if parameter.name is None or parameter.name in APART or not is_on_line(context, parameter.name):
            continue
        value, option = context.params[parameter.name], parameter.opts[0]
        if value is True:
            words.append(option)
        elif value is not False:
            text = str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
            words += [f"{option}={text}"] if text.startswith("-") else [option, text]
    return tuple(words)


def _check_base(loaded: "LoadedBackend") -> None:
    """Raises UsageError: the base model is a directory or a function of this machine."""
    base = str(loaded.model.base)
    if ".py:" in base or loaded.directory.joinpath(base).exists():
        raise UsageError(f"model.base: {base} is on this machine; name a model of the hub, or a directory over there")


def _sections(loaded: "LoadedBackend") -> dict[str, Any]:
    """What the file and the overrides say of model, engine and learner."""
    sections = {"model": loaded.model, "engine": loaded.engine, "learner": loaded.learner}
    plain = {name: section.model_dump(mode="json", exclude_unset=True) for name, section in sections.items()}
    return {name: section for name, section in plain.items() if section}


def _as_yaml(sections: dict[str, Any]) -> str:
    return yaml.safe_dump(sections, sort_keys=False, allow_unicode=True)


def _host(context: typer.Context) -> str:
    from art_cli.chat.api_keys import is_loopback

    if not is_on_line(context, "host"):
        return EVERYWHERE
    host: str = context.params["host"]
    if is_loopback(host):
        raise UsageError(f"--host {host}: clients of that server are on other machines; leave --host out")
    return host


def _port(port: int) -> int:
    if port < 1024:
        raise UsageError(f"--port {port}: a port from 1024 on, which the server may open and clients can know")
    return port
