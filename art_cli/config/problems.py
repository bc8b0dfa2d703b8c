"""Turns pydantic's errors into Problems with file, line and the nearest valid key or value."""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from art_cli.config.key_locations import Places
from art_cli.config.overrides import Schema, all_keys, section_at, variant_name, variant_names, variants
from art_cli.config.packaged import packaged_groups, packaged_options
from art_cli.config.sections.base_config import OLD_NAMES
from art_cli.runtime.errors import Problem, first_sentence, no_such_option

EXPECTED = {  # prefix of pydantic's error type -> expected value
    "int_": "a whole number",
    "float_": "a number",
    "bool_": "true or false",
    "string_type": "text",
    "path_type": "a path",
    "list_type": "a list",
    "dict_type": "a map of names, {NAME: ...}",
    "model_": "a section of 'key: value' lines",
}
CLOSE = 0.6  # difflib's default cutoff for a close match
USUAL = {"lr": "learning_rate", "bs": "batch_size", "wd": "weight_decay", "temp": "temperature"}
ABBREVIATED = 0.75  # likeness of an abbreviation, below the likeness of a one-letter typo
MAX_NAME = 100  # longer names are not compared with keys, because that takes seconds
MAX_PROBLEMS = 50  # further problems are only counted, because suggesting names takes 20 ms each
SAME_SECTION, BELOW = 0.15, 0.05  # bonus for a nearby key; an exact match elsewhere still wins


def explain(error: ValidationError, data: dict[str, Any], schema: Schema, places: Places) -> list[Problem]:
    """Returns one Problem per invalid key, and after MAX_PROBLEMS keys one Problem with the number of the others."""
    by_key: dict[str, list[ErrorDetails]] = defaultdict(list)
    for detail in error.errors(include_url=False):
        by_key[_dotted(detail, data)].append(detail)
    above = {key[:end] for key in by_key for end, letter in enumerate(key) if letter == "."}
    exact = [key for key in by_key if key not in above]  # errors at nested keys are more exact
    problems = [Problem(key, places.of(key), _message(key, by_key[key], data, schema)) for key in exact[:MAX_PROBLEMS]]
    if others := exact[MAX_PROBLEMS:]:
        problems.append(Problem("", places.of(others[0]), f"{len(others)} other invalid keys from here on"))
    return problems


def no_such_key(key: str, data: dict[str, Any], schema: Schema) -> str:
    """Returns the message for an unknown key, with a variant that has the key or with similar names."""
    if key in all_keys(schema):
        return _of_another_variant(key, data, schema) or f"a key with dots is not read; nest it: {_nested(key)}"
    within, _, name = key.rpartition(".")
    if not within and (options := packaged_options(key)):
        return f"an option is chosen in `defaults: [{{{key}: {options[0]}}}, _self_]`; there are: {', '.join(options)}"
    siblings = (section_at(schema, within, data) or schema).model_fields
    old = OLD_NAMES if "base_url" in siblings else {}
    known = [*siblings, *old, *(packaged_groups() if not within else [])]
    near = list(dict.fromkeys(old.get(each, each) for each in _nearest(name, within, known, schema)))
    if near:
        return f"no such key; did you mean {' or '.join(map(repr, near))}?"
    return f"no such key; there are: {', '.join(siblings)}"


def _of_another_variant(key: str, data: dict[str, Any], schema: Schema) -> str | None:
    """Example: "loss 'gspo' does not use 'overlong'; 'dapo' does". Returns None if no variant has the key.

    Example for a nested section: "loss.off_policy 'icepop' does not use 'cap', but low, high; 'truncate' does".
    """
    parts, within = key.split("."), schema
    for depth, name in enumerate(parts[1:], 1):
        section = ".".join(parts[:depth])
        chosen = section_at(schema, section, data)
        if chosen is None:
            return None
        options = variants(within, parts[depth - 1])
        having = [variant for variant, other in options.items() if name in other.model_fields]
        if having and name not in chosen.model_fields:
            return _not_used(name, section, chosen, having)
        within = chosen
    return None


def _not_used(name: str, section: str, chosen: Schema, having: Sequence[str]) -> str:
    """Returns the message for a key that only other variants have."""
    if variant_name(chosen) == "auto":
        written = " or ".join(f"`name: {variant}`" for variant in having)
        needs = f"{name!r} needs {written} beside it ({section}={having[0]})"
        return f"{section} 'auto' has no knobs of one {section}; {needs}"
    does = "does" if len(having) == 1 else "do"
    own = [field for field in chosen.model_fields if field != "name"]
    has = f", but {', '.join(own)}" if "." in section and own else ""
    return f"{section} {variant_name(chosen)!r} does not use {name!r}{has}; {' and '.join(map(repr, having))} {does}"


def _nested(key: str) -> str:
    section, _, name = key.rpartition(".")
    return section.replace(".", ": {") + f": {{{name}: ...}}" + "}" * section.count(".")


def _nearest(name: str, section: str, siblings: Iterable[str], schema: Schema) -> list[str]:
    """Returns up to three similar names: plain names in the same section, dotted keys in other sections."""
    if len(name) > MAX_NAME:
        return []
    rated = [(_likeness(name, other) + SAME_SECTION, other) for other in siblings]
    for key in all_keys(schema):
        within, _, other = key.rpartition(".")
        if within != section:
            rated.append((_likeness(name, other) + (BELOW if section and key.startswith(f"{section}.") else 0), key))
    best = max(rate for rate, _ in rated)
    return [other for rate, other in rated if best >= CLOSE and rate > best - 1e-9][:3]


def _likeness(name: str, other: str) -> float:
    """Returns a similarity up to 1 for close matches and abbreviations; -1 for other names."""
    name, other = name.lower(), other.lower()
    ratio = SequenceMatcher(None, name, other).ratio()
    if USUAL.get(name) == other:
        return 1.0
    if name and _abbreviates(name, other):
        return max(ratio, ABBREVIATED)
    return ratio if ratio >= CLOSE else -1


def _abbreviates(name: str, other: str) -> bool:
    """Examples: bs, temp, timeout; grad_norm for max_grad_norm; max_steps for steps."""
    short, long = name.split("_"), other.split("_")
    initials = "".join(part[:1] for part in long)
    if len(name) > 1 and len(long) > 1 and name == initials:
        return True
    if len(name) == 1:
        return len(long) == 1 and other.startswith(name)
    rest = iter(long)
    if all(any(part.startswith(each) for part in rest) for each in short if each):
        return len(short[0]) > 1
    return len(long) < len(short) and all(part in short for part in long)


def _dotted(detail: ErrorDetails, data: Any) -> str:
    """Returns the key as the user wrote it, without the variant names in pydantic's `loc`."""
    parts: list[str] = []
    for part in detail["loc"]:
        if isinstance(data, dict) and part not in data:  # the user may have written an old name
            part = next((old for old, new in OLD_NAMES.items() if new == part and old in data), part)
        is_variant = bool(parts) and isinstance(data, dict) and part == data.get("name") and part != parts[-1]
        is_there = (isinstance(data, dict) and part in data) or (isinstance(data, list) and isinstance(part, int))
        if is_there and not is_variant:
            data = data[part]
            parts.append(str(part))
    if detail["type"] == "missing":
        parts.append(str(detail["loc"][-1]))
    if detail["type"].startswith("union_tag"):
        parts.append("name")
    return ".".join(parts)


def _message(key: str, details: Sequence[ErrorDetails], data: dict[str, Any], schema: Schema) -> str:
    first = details[0]
    given = _shown(first["input"])
    section, _, name = key.rpartition(".")
    match first["type"]:
        case "missing":
            field = (section_at(schema, section, data) or schema).model_fields[name]
            about = first_sentence(field.description or "")
            return f"missing: {about.rstrip('.')}" if about else "missing"
        case "extra_forbidden":
            return no_such_key(key, data, schema)
        case "union_tag_invalid":
            there_are = variant_names(schema, section) or re.findall(r"'(\w+)'", first["ctx"]["expected_tags"])
            return no_such_option(_noun(section, schema), first["ctx"]["tag"], there_are)
        case "union_tag_not_found":
            return f"missing: which {_noun(section, schema)} it is"
        case "literal_error" if name == "name" and section in schema.model_fields:
            return no_such_option(section, first["input"], variant_names(schema, section))
        case "value_error":
            return str(first["ctx"]["error"])
        case "string_too_long":
            return f"{len(str(first['input']))} characters; at most {first['ctx']['max_length']}"
        case "too_short":
            return "an empty list; it needs at least one item"
        case "string_pattern_mismatch":
            return f"{given}: only letters, digits, '.', '_' and '-', and a letter or digit first"
    if first["type"].startswith("model_") and first["input"] in packaged_options(key):
        return f"{given} is chosen in `defaults: [{{{key}: {first['input']}}}, _self_]`, or on the command line"
    wanted = list(dict.fromkeys(_expected(detail) for detail in details))
    hint = f"; write model: {{base: {given}}}" if key == "model" else _yaml_hint(first)
    return f"expected {' or '.join(wanted)}, not {given}{hint}"


def _noun(section: str, schema: Schema) -> str:
    """Example: "tracker" for "trackers.0", "off_policy" for "loss.off_policy"."""
    last = section.split(".")[-1]
    if last in schema.model_fields or section in all_keys(schema):
        return last
    return section.split(".")[-2].removesuffix("s")  # a list or map item


def _expected(detail: ErrorDetails) -> str:
    """Example: "a whole number" for int_parsing, "a number greater than 0" for greater_than."""
    for beginning, wanted in EXPECTED.items():
        if detail["type"].startswith(beginning):
            return wanted
    bound = detail["msg"].removeprefix("Input should be ").removeprefix("a valid ")
    return f"a number {bound}" if detail["type"].startswith(("greater_", "less_")) else bound


def _yaml_hint(detail: ErrorDetails) -> str:
    is_text = detail["type"] in ("string_type", "literal_error")
    is_bare_word = is_text and isinstance(detail["input"], bool)
    return "; YAML takes a bare on, off, yes or no for true or false: quote it" if is_bare_word else ""


def _shown(value: object) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
