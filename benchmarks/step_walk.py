"""Counts what a reader of one training step needs: modules, public classes and code lines, from its functions down.

    python -m benchmarks.step_walk                                                                        this tree
    git archive 37cb3d3 | tar -x -C /tmp/old
    python -m benchmarks.step_walk --root /tmp/old --start training_run:TrainingRun._take_step batches:Batches._make

The configuration is the embedded engine, a Python rollout, GRPO and the torch learner. The source is read: from
each reached function to the functions and classes that its code names, and to methods of reached classes that have
the name of an attribute in reached code. Of `__init__`, which no step runs, only classes are followed.
"""

import argparse
import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

START = ("loop.train:take_groups", "loop.train:update", "loop.train:publish", "loop.batches:Batches._make")
# classes that set-up code, and no step, names: the parts of a run, and what stands behind its protocols
PARTS = ("Batches", "Sampler", "Gateway", "Runner", "EmbeddedEngine", "TorchLearner", "RolloutJudge", "FunctionRollout")
NOT_TAKEN = re.compile(
    # other engines, learners, judges, agents and presets
    r"tinker|backend\b|remote|vllm|unsloth|judges\.(?!rollout|judge_groups|groups|costs)|command|environments|tables|"
    r"process|parallel|worker|crew|ranks|nodes|cluster|adaptive|replay|scenario_|splits|rollouts\.(scenarios|attempt)|loop\.choice|preset|gae|ppo|covariance|"
    r"entropy_floor|off_policy|trust_region|step_credit|reliability|teach|critic|value_head|distill|sft|"
    # what only some machines or calls take: CPU kernels, forced formats, tool calls, and patches of clients
    r"decoder|openmp|allocator|product_attention|segment_batches|side_by_side|embedded\.(runs|grammars|formats|call_)|"
    r"tool_arguments|chat\.calls|local_http|plain_chat|wires|http_server|chat_app|chat\.app|own_key|per_attempt_key|"
    # what a step uses without a reader's having to know it: configuration, files, reports, errors
    r"config|storage|mirror|trackers|durable|json_lines|manifest|checkpoints|run_file|run_dir|plugins|loading|(^|\.)model$|"
    r"base_files|reports|pages|runtime|errors|state_key|threads|log$|history|failures|(^|\.)record$|interrupts|open_|stop_rules|evaluate"
)
# the same by the names of classes and functions that stand in a module with others
NOT_TAKEN_NAMES = re.compile(
    r"^(SlotRun|RunPlanner|ChunkRun|ProductAttention|Division|SegmentBatch|ValueHead|EntropyState|side_by_side|shared_calls)\b"
)
Definition = tuple[str, str]  # module; "function", "Class" or "Class.method"
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


class Module(NamedTuple):
    source: str
    defined: dict[str, ast.AST]
    imported: dict[str, Definition]  # name in this module, anywhere in it -> its definition


def code_lines(source: str) -> set[int]:
    """Returns the numbers of the lines that hold a token which is neither comment nor docstring."""
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = [each for each in tokenize.generate_tokens(io.StringIO(source).readline) if each.type not in skipped]
    lines = {line for each in tokens for line in range(each.start[0], each.end[0] + 1)}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or 0) + 1))
    return lines


def read_module(path: Path) -> Module:
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    defined: dict[str, ast.AST] = {}
    for node in tree.body:
        if isinstance(node, FUNCTION | ast.ClassDef):
            defined[node.name] = node
        if isinstance(node, ast.ClassDef):
            defined |= {f"{node.name}.{each.name}": each for each in node.body if isinstance(each, FUNCTION)}
    imported = {
        alias.asname or alias.name: ((node.module or "").partition(".")[2], alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("art_cli")
        for alias in node.names
    }
    return Module(source, defined, imported)


class Walk:
    """The definitions that are reached."""

    def __init__(self, modules: dict[str, Module]) -> None:
        self.modules = modules
        self.reached: set[Definition] = set()
        self._attributes: set[str] = set()

    def follow(self, start: list[Definition]) -> None:
        while start:
            while start:
                one = start.pop()
                is_taken = not NOT_TAKEN.search(one[0]) and not NOT_TAKEN_NAMES.search(one[1])
                if one not in self.reached and one[1] in self.modules[one[0]].defined and is_taken:
                    self.reached.add(one)
                    start += self._named_by(*one)
            start = [
                (module, method)
                for module, name in self.reached
                for method in self.modules[module].defined
                if method.startswith(f"{name}.") and method.partition(".")[2] in self._attributes
                if (module, method) not in self.reached
            ]

    def lines_of(self, module: str) -> set[int]:
        """Returns the numbers of the lines of the module's reached functions, methods and classes without methods."""
        lines: set[int] = set()
        for where, name in self.reached:
            if where == module:
                node = self.modules[module].defined[name]
                lines |= set(range(node.lineno, node.end_lineno + 1))  # type: ignore[attr-defined]
                for method in node.body if isinstance(node, ast.ClassDef) else []:
                    if isinstance(method, FUNCTION) and (module, f"{name}.{method.name}") not in self.reached:
                        lines -= set(range(method.lineno, (method.end_lineno or 0) + 1))
        return lines

    def is_class(self, one: Definition) -> bool:
        return isinstance(self.modules[one[0]].defined.get(one[1]), ast.ClassDef)

    def _named_by(self, module: str, name: str) -> Iterator[Definition]:
        node = self.modules[module].defined[name]
        if not isinstance(node, ast.ClassDef):
            used = [each for each in ast.walk(node) if isinstance(each, ast.Attribute)]
            self._attributes |= {each.attr for each in used}
            own = [each.attr for each in used if isinstance(each.value, ast.Name) and each.value.id == "self"]
            yield from ((module, f"{name.rpartition('.')[0]}.{attribute}") for attribute in own)
            yield from self._mentions(module, node)
            return
        for base in node.bases:
            yield from self._mentions(module, base)
        for inner in node.body:
            if isinstance(inner, ast.AnnAssign) or getattr(inner, "name", "") == "__init__":
                yield from filter(self.is_class, self._mentions(module, inner))

    def _mentions(self, module: str, node: ast.AST) -> Iterator[Definition]:
        imported = self.modules[module].imported
        for each in ast.walk(node):
            if isinstance(each, ast.Name):
                there = imported.get(each.id, (module, each.id))
                if there[0] in self.modules:
                    yield there
            elif isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id in imported:
                whole = ".".join(imported[each.value.id]).strip(".")  # a function of an imported module
                if whole in self.modules:
                    yield whole, each.attr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="the directory that has art_cli")
    parser.add_argument("--start", nargs="+", default=START, metavar="MODULE:NAME", help="the functions of the step")
    parser.add_argument("--list", action="store_true", help="print each module, with its reached definitions")
    options, package = parser.parse_args(), parser.parse_args().root / "art_cli"
    names = {path: ".".join(path.relative_to(package).with_suffix("").parts) for path in sorted(package.rglob("*.py"))}
    modules = {name.removesuffix("__init__").rstrip("."): read_module(path) for path, name in names.items()}
    start = [(whole, name) for module, _, name in (each.partition(":") for each in options.start)
             for whole in modules if f".{whole}".endswith(f".{module}")]  # fmt: skip
    walk = Walk(modules)
    walk.follow(start + [(module, part) for module in modules for part in PARTS if part in modules[module].defined])
    reached = sorted({module for module, _ in walk.reached})
    for module in reached if options.list else []:
        print(f"{module}: {', '.join(sorted(name for where, name in walk.reached if where == module))}")
    num_classes = sum(walk.is_class(one) and not one[1].startswith("_") for one in walk.reached)
    in_modules = {module: code_lines(modules[module].source) for module in reached}
    num_lines = sum(len(walk.lines_of(module) & lines) for module, lines in in_modules.items())
    whole = sum(map(len, in_modules.values()))
    print(
        f"{len(reached)} modules, {num_classes} public classes, {num_lines:,} code lines of {whole:,} in these modules"
    )


if __name__ == "__main__":
    main()
