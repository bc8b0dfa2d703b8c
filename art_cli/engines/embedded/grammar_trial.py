"""Compiles one grammar in a killable child process, because some small schemas take minutes or gigabytes.

It runs as a script and is never imported. It reads JSON from standard input: {"grammar": Lark, "seconds": CPU time
limit, "bytes": memory limit, "limits": llguidance's own}. It writes the reason why the grammar is unusable, or nothing.
"""

import json
import sys
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

if sys.platform != "win32":
    import resource


class Bytes:
    """A tokenizer with one token per byte, because the cost of a grammar hardly depends on the vocabulary."""

    is_tokenizer_wrapper = True
    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)
    tokens = (*(bytes([value]) for value in range(256)), b"<eos>")

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def main() -> None:
    task: dict[str, Any] = json.load(sys.stdin)
    if sys.platform != "win32":
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (task["seconds"], task["seconds"]))
        resource.setrlimit(resource.RLIMIT_AS, (task["bytes"], task["bytes"]))
    # Bytes has all the attributes that LLTokenizer reads.
    tokenizer: Any = LLTokenizer(Bytes())  # type: ignore[arg-type]
    matcher = LLMatcher(tokenizer, task["grammar"], limits=LLParserLimits(**task["limits"]), log_level=0)
    for _ in range(2):  # two tokens: for an object, the brace and its successor
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            break
        allowed = [id for id in range(256) if mask[id // 8] >> (id % 8) & 1]
        if not allowed or not matcher.consume_token(allowed[0]):
            break
    sys.stdout.write(matcher.get_error())


if __name__ == "__main__":
    main()
