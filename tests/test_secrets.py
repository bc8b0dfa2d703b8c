"""Keys in texts that break their lines: base64(1), MIME, YAML, a JSON text's \\n. Nothing that encodes one is left."""

import base64
import json
import string

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from art_cli.runtime.secrets import Secrets, without_secrets

BREAKS = ("\n", "\r\n", "\n    ", "\r\n\t", " \n", "\\n", "\\r\\n", "\\n  ", "\\\\n", "\\u000a", "%0A")
KEYS = st.text(string.ascii_letters + string.digits + "-_./+", min_size=12, max_size=180).filter(
    lambda key: len(set(key)) > 6
)
TEXTS = st.text(string.ascii_letters + string.digits + "=:, ", max_size=200)


def in_base64(before: bytes, key: bytes, after: bytes) -> tuple[str, int, int]:
    """The text in base64, and the range of its characters that depend on the key: 4 characters are 3 bytes."""
    whole = base64.b64encode(before + key + after).decode()
    return whole, len(before) * 4 // 3, -(-(len(before) + len(key)) * 4 // 3)


def in_url_safe_base64(before: bytes, key: bytes, after: bytes) -> tuple[str, int, int]:
    whole, first, last = in_base64(before, key, after)
    return whole.replace("+", "-").replace("/", "_"), first, last


def in_hexadecimal(before: bytes, key: bytes, after: bytes) -> tuple[str, int, int]:
    return (before + key + after).hex().upper(), 2 * len(before), 2 * (len(before) + len(key))


def percent_encoded(before: bytes, key: bytes, after: bytes) -> tuple[str, int, int]:
    coded = [f"%{byte:02x}" for byte in before + key + after]
    return "".join(coded), 3 * len(before), 3 * (len(before) + len(key))


FORMS = (in_base64, in_url_safe_base64, in_hexadecimal, percent_encoded)


@pytest.mark.slow
@settings(max_examples=200)
@given(KEYS, TEXTS, TEXTS, st.sampled_from(FORMS), st.sampled_from((64, 76)) | st.integers(4, 120), st.data())
@example("sk-proj-" + "aB3dE5gH7jK9" * 10, "K=", "\n", in_base64, 76, None)
def test_no_character_that_depends_on_a_key_is_left_of_a_wrapped_form(key, before, after, form, width, data) -> None:  # type: ignore[no-untyped-def]
    """Every alignment comes up, because `before` has any length; a break may stand at any character of the key."""
    assume((before + key + after).lower().count(key.lower()) == 1)
    line_break = "\n" if data is None else data.draw(st.sampled_from(BREAKS))
    if form is percent_encoded:
        width -= width % 3  # an escape is not broken itself
    whole, first, last = form(before.encode(), key.encode(), after.encode())
    pieces = [whole[place : place + width] for place in range(0, len(whole), width)]
    text = "data:" + line_break + line_break.join(pieces) + line_break + "end."
    masked = Secrets([key]).redact(text)
    left, _, right = masked.partition("***")
    assert text.startswith(left) and text.endswith(right) and "***" not in right
    begin, end = (len("data:") + len(line_break) * (1 + place // width) + place for place in (first, last - 1))
    assert len(left) <= begin and len(right) <= len(text) - end - 1
    # What is masked beyond the key's lines is the rest of these lines, and a character of the next on either side.
    widest = (width + 1 + 2 * len(line_break)) if form in FORMS[:2] else len(line_break)
    assert begin - len(left) <= widest and (len(text) - end - 1) - len(right) <= widest


@given(KEYS, st.text(string.printable, max_size=400))
def test_a_text_without_the_key_stays_as_it_is(key: str, text: str) -> None:
    forms = [form(b"\0" * shift, key.encode(), b"")[0][4:16].lower() for form in FORMS for shift in range(3)]
    squeezed = "".join(text.split()).lower()
    if key.lower() not in squeezed and not any(form in squeezed for form in forms) and "://" not in text:
        assert Secrets([key]).redact(text) == text


def test_lines_beside_a_wrapped_key_stay() -> None:
    key = "sk-proj-" + "aB3dE5gH7jK9" * 4
    word = base64.b64encode(b"K=" + key.encode()).decode()
    listing = "rollout.py\nmodel\nnotes\n"
    text = f"{listing}{word[:40]}\n{word[40:]}\n{listing}"
    assert Secrets([key]).redact(text) == f"{listing}***\n{listing}"


def test_a_password_with_a_backslash_is_masked_where_json_quotes_it() -> None:
    for password in ("pass\\word-1", "two\\nlines-1", "line one\nline two", 'quo"ted-1', "50%25-off"):
        for text in (password, json.dumps({"p": password}), json.dumps(json.dumps([password]))):
            masked = Secrets([password]).redact(f"x {text} y")
            assert "***" in masked and not any(
                part in masked for part in ("word", "lines-1", "line t", "ted-1", "-off")
            )


def test_a_configuration_is_written_without_the_keys_in_its_params() -> None:
    params = {"temperature": 0, "api_key": "sk-1", "extra_headers": {"X-Key": "k"}, "max_tokens": 5, "password": None}
    config = {"judge": {"panel": [{"model": "m", "params": params}], "api_key_env": "KEY"}, "metadata": {"token": "t"}}
    kept = {**params, "api_key": "***", "extra_headers": "***"}
    written = without_secrets(config)
    assert written == {**config, "judge": {"panel": [{"model": "m", "params": kept}], "api_key_env": "KEY"}}
