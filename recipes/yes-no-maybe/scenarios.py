"""The prompts: a request for one of two or three words, in every order, with and without quotes."""

from collections.abc import Iterator
from itertools import permutations


def make() -> Iterator[dict[str, str]]:
    for verb in ("Answer", "Just answer"):
        for count in (2, 3):
            for words in permutations(("yes", "no", "maybe"), count):
                for quote in ("", "'"):
                    listed = [f"{quote}{word}{quote}" for word in words]
                    prompt = f"{verb} with {', '.join(listed[:-1])} or {listed[-1]}."
                    yield {"id": prompt, "prompt": prompt}
