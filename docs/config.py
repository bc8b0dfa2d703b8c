"""Writes the keys in docs/config.md from the schema, below the part of the page that is written by hand.

python docs/config.py
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from art_cli.config.overrides import Schema, sections, variant_name, variants
from art_cli.config.schema import MAX_COUNT, YEAR_S, RunConfig

REFERENCE = Path(__file__).with_name("config.md")
MARK = "\n## Top level\n"  # the part above is written by hand
TABLE = ["| key | value | default | meaning |", "|---|---|---|---|"]
FIRST = dict[tuple[str, ...], str]()  # a key's last word and its cells -> the first such key
PLAIN = {bool: "true or false", int: "whole number", float: "number", str: "text", Path: "path", NoneType: "null"}


def reference() -> str:
    """Returns the whole page: its written part as it is, and the keys."""
    parts = [REFERENCE.read_text(encoding="utf-8").partition(MARK)[0]]
    plain = {name: field for name, field in RunConfig.model_fields.items() if not sections(field)}
    parts.append("## Top level\n\n" + _table("", plain))
    for name, field in RunConfig.model_fields.items():
        if chosen := variants(RunConfig, name):
            parts.append(_of_variants(name, chosen))
        elif get_origin(field.annotation) is list:
            is_known = any(variant_name(section) for section in sections(field))  # a group of that name has the keys
            keys = "" if is_known else "\n" + "\n".join(_table(name, each.model_fields) for each in sections(field))
            parts.append(f"## {name}\n\n{_text(field)}\n{keys}")
        elif get_origin(field.annotation) is dict:
            rows = [
                _row(f"{name}.NAME", key, each)
                for found in sections(field)[:1]
                for key, each in found.model_fields.items()
            ]
            parts.append(f"## {name}\n\n{_text(field)}\n\n" + "\n".join([*TABLE, *rows]) + "\n")
        elif found := sections(field):
            note = "" if field.is_required() or field.default is not None else " The section may be left out."
            parts.append(f"## {name}\n\n{_about(found[0])}{note}\n\n{_table(name, found[0].model_fields)}")
    return "\n".join(parts)


def _of_variants(group: str, chosen: dict[str, Schema]) -> str:
    """Returns a group: keys that several variants have in common, then each variant with its own keys."""
    owners = defaultdict[tuple[str, str], list[str]](list)  # (key, rows) -> variants
    for variant, schema in chosen.items():
        for key, field in schema.model_fields.items():
            if key != "name":
                owners[key, "\n".join(_rows(group, key, field))].append(variant)
    tables = defaultdict[tuple[str, ...], list[str]](list)  # variants -> rows
    for (_, rows), variants_ in owners.items():
        tables[tuple(variants_)].append(rows)
    text = f"## {group}\n\n`{group}.name` is one of {_names(chosen)}; default `{next(iter(chosen))}`.\n"
    for variants_, rows in sorted(tables.items(), key=lambda table: -len(table[0])):
        if len(variants_) > 1:
            whose = "Every variant has" if len(variants_) == len(chosen) else f"{_names(variants_)} have"
            text += f"\n{whose} these keys:\n\n" + "\n".join([*TABLE, *rows]) + "\n"
    for name, schema in chosen.items():
        text += f"\n### {group}: {name}\n\n{_about(schema)}\n"
        if own := tables.get((name,)):
            text += "\n" + "\n".join([*TABLE, *own]) + "\n"
    return text


def _names(variants_: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in variants_)


def _table(prefix: str, fields: dict[str, FieldInfo]) -> str:
    rows = [row for name, field in fields.items() for row in _rows(prefix, name, field)]
    return "\n".join([*TABLE, *rows]) + "\n"


def _rows(prefix: str, name: str, field: FieldInfo) -> Iterator[str]:
    """The key's row, and a row for each key below it. Of a section of several forms, each form's come apart."""
    yield _row(prefix, name, field)
    key, found = f"{prefix}.{name}" if prefix else name, sections(field)
    if get_origin(field.annotation) is dict and len(found) == 1:
        yield from (_row(f"{key}.NAME", below, each) for below, each in found[0].model_fields.items())
    is_judge = len(found) > 1 and set(found) <= set(variants(RunConfig, "judge").values())
    if is_judge or get_origin(field.annotation) in (list, dict):  # the judges' keys are written once
        return
    for section in found:
        if len(found) > 1:
            cells = (f"`{variant_name(section)}`", "", _about(section))
            yield _line(f"`{key}.name`", *cells[:2], _meaning(f"{key}.name", cells))
        for below, each in section.model_fields.items():
            if len(found) == 1 or below != "name":
                yield from _rows(key, below, each)


def _row(prefix: str, name: str, field: FieldInfo | None) -> str:
    if field is None:
        return ""
    key = f"{prefix}.{name}" if prefix else name
    default = "the file's name" if key == "name" else _default(field)
    cells = (kind(field.annotation, field.metadata), default, _text(field) or _about_section(field))
    return _line(f"`{key}`", *cells[:2], _meaning(key, cells))


def _meaning(key: str, cells: tuple[str, str, str]) -> str:
    """Returns the text of a key, or where it is if another key of the same name has the same cells."""
    first = FIRST.setdefault((key.rpartition(".")[2], *cells), key)
    return cells[2] if first == key or len(cells[2].split()) < 12 else f"As `{first}`."


def _line(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def kind(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """What values it takes. Example: "whole number, above 0"."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return kind(arguments[0], [*arguments[1:], *metadata])
    if origin is Literal:
        return " or ".join(f"`{value if isinstance(value, str) else json.dumps(value)}`" for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(kind(argument) for argument in arguments))
    if origin is list:
        return f"list of {kind(arguments[0])}"
    if origin is dict:
        return "map of names to " + kind(arguments[1])
    if annotation in PLAIN:
        return ", ".join([PLAIN[annotation], *_bounds(metadata)])
    return "section" if isinstance(annotation, type) else "any value"


def _bounds(metadata: Sequence[Any]) -> Iterator[str]:
    """Yields the bounds in words. Examples: "above 0", "from 0 to 1", "1 or more"."""
    found = dict[str, float]()
    for each in metadata:
        for inner in getattr(each, "metadata", [each]):
            for name in ("gt", "ge", "le", "lt"):
                bound = getattr(inner, name, None)
                if bound is not None and bound != YEAR_S and abs(bound) < MAX_COUNT:
                    found[name] = bound
    if "ge" in found and "le" in found:
        yield f"from {found.pop('ge'):g} to {found.pop('le'):g}"
    for name, words in (("gt", "above {:g}"), ("ge", "{:g} or more"), ("le", "up to {:g}"), ("lt", "below {:g}")):
        if name in found:
            yield words.format(found[name])


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return "as below"
    return f"`{value if isinstance(value, str | Path) else json.dumps(value)}`"


def _text(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())


def _about(schema: Schema) -> str:
    return " ".join((schema.__doc__ or "").split())


def _about_section(field: FieldInfo) -> str:
    found = sections(field)
    return _about(found[0]) if found and found[0].__doc__ else ""


if __name__ == "__main__":
    REFERENCE.write_text(reference())
