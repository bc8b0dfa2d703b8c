"""The tree of keys that a schema allows: its sections, the variants of each, and their keys."""

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from art_cli.config.key_locations import join
from art_cli.config.sections.base_config import ImportedVariants

Schema = type[BaseModel]


def sections(field: FieldInfo) -> list[Schema]:
    """Returns the section classes that a field may hold: none for a plain value, several if `name` chooses one."""
    imported = [mark.section_of(name) for mark in _imported(field) for name in mark.names]
    return [*_schemas(field.annotation), *imported]


def _imported(field: FieldInfo) -> list[ImportedVariants]:
    return [mark for mark in field.metadata if isinstance(mark, ImportedVariants)]


def _schemas(annotation: Any) -> Iterator[Schema]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _schemas(argument)


def variants(schema: Schema, section: str) -> dict[str, Schema]:
    """Returns the variants of a root section by their `name`, the default first; or {} for a section with one form."""
    field = schema.model_fields.get(section)
    if field is None or get_origin(field.annotation) is list:
        return {}
    by_name = {name: variant for variant in sections(field) if (name := variant_name(variant))}
    default = getattr(field.default, "name", None) if by_name else None
    return dict(sorted(by_name.items(), key=lambda item: item[0] != default))


def variant_names(schema: Schema, section: str) -> list[str]:
    """Returns the names of `variants`, sorted, and imports none of them."""
    field = schema.model_fields.get(section)
    if field is None or get_origin(field.annotation) is list:
        return []
    known = [name for variant in _schemas(field.annotation) if (name := variant_name(variant))]
    return sorted(known + [name for mark in _imported(field) for name in mark.names])


def variant_name(schema: Schema) -> str | None:
    """Returns the `name` of this variant ("grpo" for GrpoConfig), or None if the section has only one form."""
    field = schema.model_fields.get("name")
    return get_args(field.annotation)[0] if field and get_origin(field.annotation) is Literal else None


def groups(schema: Schema) -> list[str]:
    """Returns the sections that are chosen by name: engine, judge, loss, learner, tracker."""
    return [section for section in schema.model_fields if variant_names(schema, section)]


def section_at(schema: Schema, key: str, data: Any) -> Schema | None:
    """Returns the section class at a dotted key, in the variant that `data` names, or None if there is none."""
    parts = iter(key.split(".") if key else [])
    for part in parts:
        field = schema.model_fields.get(part)
        options = list(_schemas(field.annotation)) if field else []
        if field is None or not options:
            return None
        data = _item(data, part)
        if get_origin(field.annotation) in (
            list,
            dict,
        ):  # a list or dict of sections: the next part is an index or a name in it
            data = _item(data, next(parts, ""))
        name = _item(data, "name")
        options += [mark.section_of(name) for mark in _imported(field) if name in mark.names]
        schema = next((each for each in options if variant_name(each) == name), options[0])
    return schema


def _item(data: Any, part: str) -> Any:
    if isinstance(data, list):
        return data[int(part)] if part.isdigit() and int(part) < len(data) else None
    return data.get(part) if isinstance(data, dict) else None


def all_keys(schema: Schema, prefix: str = "") -> list[str]:
    """Returns every dotted key of every variant, once each, in the order of the schema."""
    keys: dict[str, None] = {}
    for name, field in schema.model_fields.items():
        keys[join(prefix, name)] = None
        for section in sections(field):
            keys.update(dict.fromkeys(all_keys(section, join(prefix, name))))
    return list(keys)
