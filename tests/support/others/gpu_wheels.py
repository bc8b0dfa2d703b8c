"""The names that GPU wheels define: flags, variables, routes, fields. Read from their source; nothing is imported.

    python -m tests.support.others.gpu_wheels tests/engines/gpu_wheels vllm-0.33.0*.whl unsloth-2026.10.9*.whl ...

writes one JSON file for each wheel, 5 to 40 KB, by which tests/engines/test_gpu_wheels.py holds what we send. Wheels
of vLLM for GPUs have 330 MB, too much for each run of the tests, and can be fetched on any machine:

    pip download --no-deps --only-binary=:all: --platform manylinux_2_28_x86_64 --platform manylinux_2_31_x86_64 \
        --python-version 3.12 -d DIR vllm==0.33.0 vllm-bnb-plugin==0.0.3 unsloth==2026.10.9
"""

import ast
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Json = dict[str, Any]
Function = ast.FunctionDef | ast.AsyncFunctionDef
VERBS = ("get", "post", "put", "delete", "api_route")
# The files that are read of each package, and what is kept of them.
SOURCES = {
    "vllm": r"vllm/(entrypoints|engine|envs|config|tool_parsers|v1/(metrics|worker|engine/__init__)|"
    r"model_executor/(layers/quantization|models)/__init__|plugins/__init__)",
    "unsloth": r"unsloth/(__init__|models/)",
    "unsloth_zoo": r"unsloth_zoo/",
    "vllm_bnb_plugin": r"vllm_bnb_plugin/",
}
FLAGS = re.compile(r"(Async)?EngineArgs|(Base)?FrontendArgs")  # classes whose fields are flags
FIELDS = re.compile(
    r"^(ChatCompletion|Completion|StreamOptions|Tokenize|\w*LoRAAdapterReq|DeltaMessage|ChatMessage|Model|Usage)"
)
LITERALS = ("LogprobsMode", "MaxLoRARanks", "ModelDType", "PauseMode", "QuantizationMethods")
METHODS = re.compile(r"Worker\.[a-z]|FastLanguageModel\.from_pretrained|Fast(Llama|Base)Model\.get_peft_model")
MODULES = re.compile(
    r"quantization.__init__$|models.__init__$|plugins.__init__$|^unsloth.__init__|openai.api_server$|"
    r"launchers.api_server.entry$|envs$"
)
CALLS = re.compile(r"headers\.get(list)?$|register_quantization_config$")  # their strings are kept


def names_of(wheel: Path) -> Json:
    """Returns all names of a wheel that a caller may have to know."""
    package = wheel.name.partition("-")[0]
    wanted = re.compile(SOURCES[package])
    found = _Names()
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".py") and wanted.match(name):
                source = archive.read(name).decode()
                found.variables.update(re.findall(r"\"(UNSLOTH_[A-Z_]+)\"", source))
                found.read(name.removesuffix(".py").replace("/", "."), ast.parse(source))
            elif name.endswith("entry_points.txt"):
                found.entry_points = archive.read(name).decode().split("\n")
    return {"wheel": "-".join(wheel.name.split("-")[:2]), **found.as_json()}


class _Names:
    def __init__(self) -> None:
        self.flags: dict[str, bool] = {}  # flag -> whether there is a --no- form
        self.variables: set[str] = set()
        self.routes: dict[str, list[str]] = {}  # "POST /sleep" -> parameters, and keys that it reads from the request
        self.classes: dict[str, tuple[list[str], list[str]]] = {}  # class -> its bases, its own fields
        self.literals: dict[str, list[Any]] = {}
        self.functions: dict[str, list[str]] = {}  # Class.method -> parameters; "**" if it takes any
        self.strings: set[str] = set()  # headers, metrics, tool parsers, a plugin's quantizations
        self.modules: dict[str, set[str]] = {}  # module -> its top-level names
        self.entry_points: list[str] = []

    def as_json(self) -> Json:
        classes = {name: self._fields(name) for name in sorted(self.classes) if FIELDS.search(name)}
        return {
            "flags": dict(sorted(self.flags.items())),
            "variables": sorted(self.variables),
            "routes": dict(sorted(self.routes.items())),
            "classes": {name: fields for name, fields in classes.items() if fields},
            "literals": dict(sorted(self.literals.items())),
            "functions": dict(sorted(self.functions.items())),
            "strings": sorted(self.strings),
            "modules": {name: sorted(names) for name, names in sorted(self.modules.items())},
            "entry_points": [line for line in self.entry_points if line],
        }

    def _fields(self, name: str) -> list[str]:
        bases, own = self.classes.get(name, ([], []))
        return sorted({*own, *(field for base in bases for field in self._fields(base))})

    def read(self, module: str, tree: ast.Module) -> None:
        if MODULES.search(module):
            self.modules[module.removesuffix(".__init__")] = set(_top_level(tree))
        for node in ast.walk(tree):
            match node:
                case ast.ClassDef():
                    self._read_class(node)
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    self.routes |= dict.fromkeys(_routes(node), [*_parameters(node), *_keys(node)])
                case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                    self._read_assignment(module, name, node.value)
                case ast.Call():
                    self._read_call(module, node)
                case _:
                    pass

    def _read_class(self, node: ast.ClassDef) -> None:
        bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
        annotated = [
            each for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        ]
        own = [each.target.id for each in annotated]  # type: ignore[union-attr]
        known = self.classes.get(node.name, ([], []))  # two classes of a name: the fields of both
        self.classes[node.name] = ([*known[0], *bases], [*known[1], *own])
        if FLAGS.fullmatch(node.name):
            for each in annotated:
                name = each.target.id.replace("_", "-")  # type: ignore[union-attr]
                self.flags[name] = "bool" in ast.unparse(each.annotation)
        for each in node.body:
            if isinstance(each, Function) and METHODS.match(name := f"{node.name}.{each.name}"):
                self.functions[name] = _parameters(each)

    def _read_assignment(self, module: str, name: str, value: ast.expr | None) -> None:
        if name in LITERALS and isinstance(value, ast.Subscript) and ast.unparse(value.value).endswith("Literal"):
            items = value.slice.elts if isinstance(value.slice, ast.Tuple) else [value.slice]
            self.literals[name] = [item.value for item in items if isinstance(item, ast.Constant)]
        if isinstance(value, ast.Dict):
            keys = [key.value for key in value.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
            if module == "vllm.envs":
                self.variables.update(keys)
            elif "tool_parsers" in module:
                self.strings.update(keys)

    def _read_call(self, module: str, node: ast.Call) -> None:
        texts = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        called = ast.unparse(node.func)
        if called.endswith("add_argument"):
            self.flags |= {text[2:]: False for text in texts if text.startswith("--") and text[2:] not in self.flags}
        if CALLS.search(called):
            self.strings.update(texts)
        for keyword in node.keywords:
            if keyword.arg == "name" and isinstance(keyword.value, ast.Constant) and "metrics" in module:
                self.strings.add(str(keyword.value.value))


def _top_level(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
    for node in tree.body:
        if isinstance(node, ast.ClassDef | Function):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def _routes(node: Function) -> Iterator[str]:
    for call in node.decorator_list:
        is_route = isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in VERBS
        if is_route and call.args and isinstance(call.args[0], ast.Constant):
            yield f"{call.func.attr.upper()} {call.args[0].value}"


def _keys(node: Function) -> Iterator[str]:
    """Yields the strings by which a function gets something out of a mapping."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and re.search(r"\.get(list)?$", ast.unparse(call.func)):
            yield from (
                arg.value for arg in call.args[:1] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
            )


def _parameters(node: Function) -> list[str]:
    arguments = node.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return [*names, *(["**"] if arguments.kwarg else [])]


def main() -> None:
    directory, *wheels = map(Path, sys.argv[1:])
    for wheel in wheels:
        names = names_of(wheel)
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in names.items()]
        (directory / f"{names['wheel']}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
