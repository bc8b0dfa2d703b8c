"""JSON within bounds: what is counted is what stands outside of strings."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_cli.chat import reading
from art_cli.chat.chat_errors import ChatError

STRING = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|\\?$)', re.DOTALL)


@pytest.mark.slow
@given(st.lists(st.sampled_from([b'"', b"\\", b"a", b"[", b"]", b",", b":"]), max_size=24), st.integers(2, 30))
def test_strings_are_left_out_wherever_the_slices_end(parts: list[bytes], size: int) -> None:
    """Property: for any bytes and any slice, what is outside of strings is what one regular expression leaves."""
    body = b"".join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "_SLICE", size)
        outside = b"".join(body[begin:end] for begin, end in reading._outside_strings(body))
    assert outside == STRING.sub(b"", body)


def test_a_body_of_many_brackets_in_text_is_read_and_one_of_many_objects_is_not() -> None:
    assert reading.decode_object(json.dumps({"a": "[{,:" * 10**6}).encode())["a"].startswith("[{,:")
    with pytest.raises(ChatError, match="more than 50,000 lists, objects and keys"):
        reading.decode_object(json.dumps({"a": [{}] * 50_001}).encode())
