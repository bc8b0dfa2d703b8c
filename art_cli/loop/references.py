"""Checks that the files, functions, hosts and programs named in a configuration exist.

The checks neither import user code nor write files: functions are looked up in their file's source, a base model's
modules in the headers of its weights. Names that only a hub or a builder can resolve are checked when they are loaded.
"""

import ast
import contextlib
import errno
import importlib.util
import json
import os
import re
import shutil
import socket
import warnings
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from art_cli.config import schema
from art_cli.config.checks import untrainable
from art_cli.config.compose import LoadedConfig, LoadedJudge
from art_cli.config.key_locations import show
from art_cli.config.sections.rollout_config import RayClusterConfig, is_dataset
from art_cli.config.store_address import missing_client
from art_cli.judges.blend import named_judges
from art_cli.models.base_files import gguf_files, gguf_problem
from art_cli.models.gguf_base import HUB_FILE, check_header, the_file
from art_cli.rollouts.environments import find_library, not_installed
from art_cli.runtime.errors import ConfigError, EngineError, Problem, UsageError
from art_cli.runtime.threads import start_in_thread

ALL = (
    *("runs", "store", "model", "rollout", "gateway", "engine", "judge", "shadow", "algorithm"),
    *("learner", "sft", "eval"),
    "trackers",
)
OF_SOURCES = ("rollout", "judge", "eval")  # sections that a source may override
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
HOST = re.compile(r"[\w.:%-]{0,253}", re.ASCII)  # an address or a host name; "" means all addresses of this machine
LOOKUP_TIMEOUT_S = 3.0  # longest wait for a host name lookup
MAX_HEADER = 64 * 1024 * 1024  # largest safetensors header in bytes; a model of a thousand layers has a few MiB


class Wrong(NamedTuple):
    """Example: Wrong("rollout.entry", "no such file: rolout.py")."""

    key: str
    message: str


def check_ready(loaded: LoadedConfig, sections: Sequence[str] = ALL, *, is_training: bool = False) -> None:
    """Raises ConfigError listing all missing things named in these sections.

    With `is_training`, the error also lists settings that cannot be trained. Raises EngineError if the port is in use.
    """
    wrong = [Wrong(*each) for each in untrainable(loaded.config)] if is_training else []
    for section in sections:
        for source, part in loaded.by_source.items() if section in OF_SOURCES else [("", loaded)]:
            wrong += [Wrong(loaded.config.key_in(source, key), message) for key, message in LOOKUPS[section](part)]
    if wrong:
        raise ConfigError([Problem(key, loaded.places.of(key), text) for key, text in dict.fromkeys(wrong)])


def check_judge(loaded: LoadedJudge) -> None:
    """Raises ConfigError listing all missing things that a judge without a run's configuration names."""
    if wrong := list(_judge(loaded)):
        raise ConfigError([Problem("", key, text) for key, text in wrong])


# --- the sections -----------------------------------------------------------------------------------------------------


def _runs(loaded: LoadedConfig) -> Iterator[Wrong]:
    nearest = loaded.config.runs / loaded.config.name
    try:
        while not _is_there(nearest):
            nearest = nearest.parent
    except OSError as error:
        yield Wrong("runs", f"{show(loaded.config.runs)[:100]}: {error.strerror}")
        return
    if not nearest.is_dir():
        yield Wrong("runs", f"{show(nearest)} is a file, expected a directory")
    elif not os.access(nearest, os.W_OK | os.X_OK):
        yield Wrong("runs", f"{show(nearest)}: no permission to write there")


def _store(loaded: LoadedConfig) -> Iterator[Wrong]:
    if loaded.config.store is not None and (problem := missing_client(loaded.config.store)):
        yield Wrong("store", problem)


def _weights(loaded: LoadedConfig) -> Iterator[Wrong]:
    if not loaded.config.learner.trains_weights:
        yield Wrong("learner", "'prompt' changes no weight, which this command needs; art train searches for a prompt")


def _model(loaded: LoadedConfig) -> Iterator[Wrong]:
    model = loaded.config.model
    if not loaded.config.engine.can_train:
        return
    yield from _base("model.base", model.base, loaded.directory)
    if model.chat_template is not None:
        yield from _text("model.chat_template", model.chat_template)
    if model.lora is not None:
        yield from _pattern(model.lora)
        if os.path.isdir(loaded.directory / model.base):
            yield from missing_targets(model, loaded.directory / model.base)


def _rollout(loaded: LoadedConfig) -> Iterator[Wrong]:
    rollout, directory = loaded.config.rollout, loaded.directory
    if rollout.python is not None:
        yield from _python("rollout.python", rollout.python)
    is_ours = rollout.python is None and rollout.cluster is None
    if rollout.cluster is not None:
        yield from _cluster(rollout.cluster)
    if rollout.entry is not None:
        yield from _entry("rollout.entry", rollout.entry, directory, is_ours=is_ours)
    if rollout.command is not None and rollout.cluster is None and not _is_program(rollout.command[0], directory):
        yield Wrong("rollout.command", f"no program {rollout.command[0]!r}; install it, or correct the path")
    if rollout.environment is not None:
        yield from _environment(rollout)
    if rollout.scenarios is not None:
        yield from _scenarios("rollout.scenarios", rollout.scenarios, directory)


def _environment(rollout: schema.RolloutConfig) -> Iterator[Wrong]:
    """Checks only the library. Environments and settings are only known after importing."""
    assert rollout.environment is not None
    try:
        library, _ = find_library(rollout.environment.name)
    except UsageError as error:
        yield Wrong("rollout.environment.name", str(error))
        return
    is_ours = rollout.python is None and rollout.cluster is None
    if is_ours and (problem := not_installed(library)):
        yield Wrong("rollout.environment.name", problem)
    if not library.makes_scenarios and rollout.scenarios is None:
        yield Wrong("rollout.scenarios", f"{rollout.environment.name} brings no scenarios; name a scenario file")


def _cluster(cluster: RayClusterConfig) -> Iterator[Wrong]:
    """Checks only the packages that can connect to the cluster."""
    if cluster.python is not None:
        yield from _python("rollout.cluster.python", cluster.python)
    elif importlib.util.find_spec("ray") is None:
        cure = "pip install 'art-cli[ray]', or name a Python that has it in rollout.cluster.python"
        yield Wrong("rollout.cluster", f"it needs the package ray: {cure}")


def _gateway(loaded: LoadedConfig) -> Iterator[Wrong]:
    host, port = loaded.config.gateway.host, loaded.config.gateway.port
    if not HOST.fullmatch(host):
        yield Wrong("gateway.host", f"{host!r} is not an address or host name; usually 127.0.0.1")
        return
    try:
        start_in_thread(_listen, host, port).result(LOOKUP_TIMEOUT_S)
    except (TimeoutError, ValueError):  # ValueError: the host name cannot be encoded
        yield Wrong("gateway.host", f"cannot listen on {host!r}: the name could not be looked up; usually 127.0.0.1")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            cure = "choose another port, or 0 for any free one"
            raise EngineError(f"cannot listen on {host}:{port}: the port is in use; {cure}") from None
        if error.errno == errno.EACCES:
            yield Wrong("gateway.port", f"cannot listen on {host}:{port}: {error.strerror}; 0 takes any free port")
        else:
            yield Wrong("gateway.host", f"cannot listen on {host!r}: {error.strerror or error}; usually 127.0.0.1")


def _listen(host: str, port: int) -> None:
    """Listens on the address for a moment. Raises OSError; a host name lookup may take long."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1)


def _engine(loaded: LoadedConfig) -> Iterator[Wrong]:
    engine = loaded.config.engine
    python, base_url, entry = (getattr(engine, key, None) for key in ("python", "base_url", "entry"))
    if python is not None and not _is_program(str(python), loaded.directory):
        yield Wrong("engine.python", f"no program {show(python)}; expected the Python with vLLM")
    if base_url is not None:
        yield from _url("engine.base_url", base_url)
    if entry is not None:
        yield from _entry("engine.entry", entry, loaded.directory)


def _judge(loaded: LoadedConfig | LoadedJudge) -> Iterator[Wrong]:
    judge = loaded.config.judge if isinstance(loaded, LoadedConfig) else loaded.config
    if isinstance(judge, schema.BlendJudgeConfig):
        for name, each in judge.judges.items():
            yield from _one_judge(f"judge.judges.{name}", each, loaded.directory)
    elif isinstance(judge, schema.CascadeJudgeConfig | schema.FeedbackJudgeConfig):
        for name, each in named_judges(judge).items():
            yield from _one_judge(f"judge.{name}", each, loaded.directory)
    else:
        yield from _one_judge("judge", judge, loaded.directory)


def _shadow(loaded: LoadedConfig) -> Iterator[Wrong]:
    for name, each in loaded.config.shadow.items():
        yield from _one_judge(f"shadow.{name}.judge", each.judge, loaded.directory)


def _one_judge(key: str, judge: schema.NamedJudgeConfig | schema.NoJudgeConfig, directory: Path) -> Iterator[Wrong]:
    if isinstance(judge, schema.FunctionJudgeConfig):
        yield from _entry(f"{key}.entry", judge.entry, directory)
    elif isinstance(judge, schema.RewardModelJudgeConfig):
        yield from _base(f"{key}.model", judge.model, directory, is_buildable=False)
    elif isinstance(judge, schema.RulerJudgeConfig):
        for name, path in (("rubric", judge.rubric), ("instructions", judge.instructions)):
            if path is not None:
                yield from _text(f"{key}.{name}", path, directory)
        if isinstance(judge.cache, Path):
            yield from _not_directory(f"{key}.cache", judge.cache, directory)
        asked: dict[str, schema.JudgeModelConfig] = {key: judge}
        asked |= {f"{key}.panel.{index}": member for index, member in enumerate(judge.panel)}
        for section, model in asked.items():
            if model.needs_litellm and importlib.util.find_spec("litellm") is None:
                yield Wrong(f"{section}.model", schema.no_litellm(model))
            if model.base_url is not None:
                yield from _url(f"{section}.base_url", model.base_url)


def _algorithm(loaded: LoadedConfig) -> Iterator[Wrong]:
    if loaded.config.algorithm is not None:
        yield from _entry("algorithm.entry", loaded.config.algorithm.entry, loaded.directory)
    elif isinstance(loaded.config.loss, schema.DistillConfig):
        teacher = loaded.config.loss.teacher
        if teacher.base_url is not None:
            yield from _url("loss.teacher.base_url", teacher.base_url)
        elif not os.path.isdir(loaded.directory / teacher.model):
            yield from _base("loss.teacher.model", teacher.model, loaded.directory, is_buildable=False)


def _learner(loaded: LoadedConfig) -> Iterator[Wrong]:
    learner = loaded.config.learner
    if (url := getattr(learner, "base_url", None)) is not None:
        yield from _url("learner.base_url", url)
    for name, path in getattr(learner, "parts", {}).items():
        yield from _text(f"learner.parts.{name}", path, loaded.directory)


def _sft(loaded: LoadedConfig) -> Iterator[Wrong]:
    sft = loaded.config.sft
    for key, spec in {"sft.demos": sft.demos, "sft.eval_demos": sft.eval_demos}.items() if sft is not None else ():
        if spec is not None and sft is not None and sft.best_of is None:
            yield from _data(key, spec, loaded.directory)
        elif spec is not None and not os.path.exists(loaded.directory / spec):
            path = loaded.directory / spec
            yield Wrong(key, f"{_absence(path)}; with sft.best_of, expected a scored file or a run directory")


def _eval(loaded: LoadedConfig) -> Iterator[Wrong]:
    if loaded.config.eval is not None and loaded.config.eval.scenarios is not None:
        yield from _scenarios("eval.scenarios", loaded.config.eval.scenarios, loaded.directory)


def _trackers(loaded: LoadedConfig) -> Iterator[Wrong]:
    numbered = {f"trackers.{index}": tracker for index, tracker in enumerate(loaded.config.trackers)}
    for key, tracker in ({"tracker": loaded.config.tracker} | numbered).items():
        if isinstance(tracker, schema.OwnTrackerConfig):
            yield from _entry(f"{key}.entry", tracker.entry, loaded.directory)


LOOKUPS = {
    "runs": _runs,
    "store": _store,
    "weights": _weights,
    "model": _model,
    "rollout": _rollout,
    "gateway": _gateway,
    "engine": _engine,
    "judge": _judge,
    "shadow": _shadow,
    "algorithm": _algorithm,
    "learner": _learner,
    "sft": _sft,
    "eval": _eval,
    "trackers": _trackers,
}


# --- files and functions ----------------------------------------------------------------------------------------------


def _data(key: str, spec: str, directory: Path) -> Iterator[Wrong]:
    """Checks a JSON-lines file, or "file.py:function"."""
    path = directory / spec
    if os.path.isfile(path):
        return
    if ":" in spec:
        yield from _entry(key, spec, directory)
    else:
        yield Wrong(key, f"{_absence(path)}; expected a JSON-lines file or 'file.py:function'")


def _scenarios(key: str, scenarios: schema.ScenariosConfig, directory: Path) -> Iterator[Wrong]:
    """Checks a file, a dataset directory, or "file.py:function". Hub datasets are checked when loaded."""
    path = directory / scenarios.source
    if scenarios.split is not None and not os.path.exists(path) and HUB_ID.fullmatch(scenarios.source):
        return
    if scenarios.query is None and is_dataset(path):
        return
    if ":" in scenarios.source and scenarios.query is scenarios.split is None:
        yield from _data(key, scenarios.source, directory)
    elif not os.path.isfile(path):
        hint = "" if scenarios.split or scenarios.query else "; a hub dataset also needs `split`"
        yield Wrong(key, f"{_absence(path)}; expected a file of scenarios or 'file.py:function'{hint}")


def _python(key: str, program: Path) -> Iterator[Wrong]:
    """Checks a user's Python. Its version is only known after starting it."""
    if not os.path.isfile(program):
        yield Wrong(key, f"{_absence(program)}; expected a Python, or the directory of a virtual environment")
    elif not os.access(program, os.X_OK):
        yield Wrong(key, f"{show(program)}: no permission to run it")


def _entry(key: str, spec: str, directory: Path, *, is_ours: bool = True) -> Iterator[Wrong]:
    """Checks a function in a file's source, or an installed package.

    `is_ours` is False if the function runs in another Python, whose syntax and packages may differ.
    """
    module, _, attribute = spec.rpartition(":")
    if not module or not attribute:
        yield Wrong(key, f"{spec!r}: expected 'file.py:function' or 'package.module:function'")
    elif module.endswith(".py"):
        path = directory / module
        if not os.path.isfile(path):
            yield Wrong(key, _absence(path))
        elif is_ours and (message := _missing_attribute(path, attribute)):
            yield Wrong(key, message)
    elif is_ours and not _is_module(module.partition(".")[0], directory):
        yield Wrong(key, f"no module {module!r} here; for a file, write {module}.py:{attribute}")


def _missing_attribute(path: Path, attribute: str) -> str | None:
    """Returns the reason why the file cannot have the attribute; None if unsure."""
    try:
        source = path.read_bytes()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # importing the file shows warnings about the user's escapes
            tree = ast.parse(source, filename=str(path))
    except SyntaxError as error:
        return f"{show(path)}:{error.lineno or 1}: {type(error).__name__}: {error.msg}"
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        return f"{show(path)}: {type(error).__name__}: {error}"
    if any(word in source for word in (attribute.encode(), b"import *", b"__getattr__")):
        return None
    if not all(_is_module(name, path.parent) for name in _imports(tree)):
        return None  # the import will report the missing module
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    near = get_close_matches(attribute, [each.name for each in tree.body if isinstance(each, kinds)], n=1)
    return f"{show(path)} has no {attribute!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def _imports(tree: ast.Module) -> Iterator[str]:
    """Yields the top-level module names that a file imports."""
    for statement in tree.body:
        if isinstance(statement, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            yield statement.module.partition(".")[0]


def _text(key: str, path: Path, directory: Path = Path()) -> Iterator[Wrong]:
    try:
        path = directory / path.expanduser()
        if not os.path.isfile(path):
            yield Wrong(key, _absence(path))
        elif not path.read_text(encoding="utf-8-sig").strip():
            yield Wrong(key, f"{show(path)}: an empty file")
    except RuntimeError as error:
        yield Wrong(key, f"{show(path)}: {error}")  # ~user, and the user does not exist
    except (OSError, UnicodeDecodeError) as error:
        yield Wrong(key, f"{show(path)}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}")


def _not_directory(key: str, path: Path, directory: Path) -> Iterator[Wrong]:
    try:
        if os.path.isdir(file := directory / path.expanduser()):
            yield Wrong(key, f"{show(file)}: expected a file, got a directory")
    except RuntimeError as error:
        yield Wrong(key, f"{show(path)}: {error}")


def _absence(path: Path) -> str:
    """Example: "scenaros.jsonl: no such file; did you mean 'scenarios.jsonl'?"."""
    with contextlib.suppress(OSError):
        if path.is_dir():
            return f"{show(path)}: expected a file, got a directory"
        if path.exists():
            return f"{show(path)}: not a regular file"
        near = get_close_matches(path.name, [other.name for other in path.parent.iterdir()], n=1)
        return f"{show(path)}: no such file" + (f"; did you mean {near[0]!r}?" if near else "")
    return f"{show(path)}: no such file"


def _is_there(path: Path) -> bool:
    """Returns True if the path exists. Raises OSError for an invalid name or missing permission."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _is_program(name: str, directory: Path) -> bool:
    return shutil.which(directory / name if "/" in name else name) is not None


def _is_module(name: str, directory: Path) -> bool:
    if not name.isidentifier():
        return False
    with contextlib.suppress(ImportError, ValueError):
        if importlib.util.find_spec(name) is not None:
            return True
    return os.path.isfile(directory / f"{name}.py") or os.path.isdir(directory / name)


# --- addresses --------------------------------------------------------------------------------------------------------


def _url(key: str, url: str) -> Iterator[Wrong]:
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_good = False
    if not is_good or any(letter.isspace() for letter in url):
        yield Wrong(key, f"{url[:100]!r} is not an address; expected one such as http://127.0.0.1:8000/v1")


# --- the base model ---------------------------------------------------------------------------------------------------


def _base(key: str, base: str, directory: Path, *, is_buildable: bool = True) -> Iterator[Wrong]:
    path = directory / base
    if is_buildable and (gguf_files(path) or HUB_FILE.fullmatch(base)):
        try:
            if (file := the_file(path)) is not None:  # hub files are checked after the download
                check_header(file)
        except UsageError as error:
            yield Wrong(key, str(error))
    elif os.path.isdir(path):
        if problem := gguf_problem(path):
            yield Wrong(key, problem)
        elif not os.path.isfile(path / "config.json"):
            yield Wrong(key, f"{show(path)}: not a model directory: no config.json")
    elif ":" in base and is_buildable:
        yield from _entry(key, base, directory)
    elif problem := gguf_problem(path):
        yield Wrong(key, problem)
    elif os.path.isfile(path):
        yield Wrong(key, f"{show(path)}: expected a model directory, got a file")
    elif base.startswith((".", "/", "~")):
        yield Wrong(key, f"{base!r}: no such directory")
    elif not HUB_ID.fullmatch(base):
        kinds = "neither a directory here nor a file.py:function" if is_buildable else "not a directory here"
        yield Wrong(key, f"{base[:100]!r} is {kinds}, and not a hub id (owner/name)")


def _pattern(lora: schema.LoraConfig) -> Iterator[Wrong]:
    """Checks `targets` given as a string: "all-linear" or a regular expression for whole module names."""
    if isinstance(lora.targets, str):
        try:
            re.compile(lora.targets)
        except (re.error, RecursionError, OverflowError) as error:
            yield Wrong("model.lora.targets", f"{lora.targets[:60]!r} is not a regular expression: {error}")


def missing_targets(model: schema.ModelConfig, base: Path) -> Iterator[Wrong]:
    """Yields the names in `model.lora.targets` that match no module of the model in directory `base`.

    Weights in other formats than safetensors are checked when the model is loaded.
    """
    if model.lora is None or isinstance(model.lora.targets, str):
        return
    modules = _modules(base)
    last_parts = sorted({module.rpartition(".")[2] for module in modules})
    for target in model.lora.targets:
        if modules and not any(module == target or module.endswith(f".{target}") for module in modules):
            near = get_close_matches(target, last_parts, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(last_parts[:12])}"
            yield Wrong("model.lora.targets", f"the model has no module {target!r}; {hint}")


def _modules(base: Path) -> set[str]:
    """Returns the dotted names of modules with weights."""
    names: set[str] = set()
    for file in sorted(base.glob("*.safetensors")):
        with contextlib.suppress(OSError, ValueError, RecursionError), file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(size)) if size <= MAX_HEADER else {}
            names.update(name for name in header if name != "__metadata__")
    return {name.rpartition(".")[0] for name in names}
