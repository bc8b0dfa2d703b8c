"""Places: where every configuration key got its last value, as "file:line" or "command line"."""

from pathlib import Path

import yaml

from art_cli.config.sections.base_config import OLD_NAMES

COMMAND_LINE = "command line"


class Places:
    """Example: {"": "config.yaml:1", "train": "config.yaml:5", "train.steps": "command line"}."""

    def __init__(self) -> None:
        self._places: dict[str, str] = {}

    def add_file(self, path: Path, text: str, *, package: str = "") -> None:
        """Records the locations of a YAML file's keys, below the dotted key `package`."""
        shown = show(path)
        if not package:
            self._places.setdefault("", f"{shown}:1")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is not None:
            self._add_node(root, package, shown)

    def _add_node(self, node: yaml.Node, key: str, shown: str) -> None:
        if isinstance(node, yaml.MappingNode):
            for name, value in node.value:
                if name.tag == "tag:yaml.org,2002:merge":  # `<<: *anchor` merges the anchor's keys
                    self._add_node(value, key, shown)
                else:
                    below = join(key, str(name.value))
                    self._places[below] = f"{shown}:{name.start_mark.line + 1}"
                    self._add_node(value, below, shown)
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self._places[join(key, str(index))] = f"{shown}:{item.start_mark.line + 1}"
                self._add_node(item, join(key, str(index)), shown)

    def put(self, key: str, place: str) -> None:
        """Records the key's location, and removes the locations of nested keys."""
        for known in [known for known in self._places if known.startswith(f"{key}.")]:
            del self._places[known]
        self._places[key] = place

    def has(self, key: str) -> bool:
        return key in self._places

    def of(self, key: str) -> str:
        """Returns the location of the key, of a nested key, or of the nearest enclosing section."""
        section, _, name = key.rpartition(".")
        written = (join(section, old) for old, new in OLD_NAMES.items() if new == name)
        key = next((old for old in written if key not in self._places and old in self._places), key)
        while key and key not in self._places:
            if below := [place for known, place in self._places.items() if known.startswith(f"{key}.")]:
                return below[0]
            key = key.rpartition(".")[0]
        return self._places.get(key, COMMAND_LINE)


def join(section: str, name: str) -> str:
    """Returns the dotted key of `name` in `section`; "" is the root."""
    return f"{section}.{name}" if section else name


def show(path: Path) -> str:
    """Returns the path, relative to the working directory if it is inside."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
