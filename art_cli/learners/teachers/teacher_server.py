"""ServerTeacher: a teacher behind a vLLM server, asked over HTTP for prompt logprobs. Also compares vocabularies.

    POST BASE_URL/completions   {"prompt": [ids], "prompt_logprobs": 0}    one request per sequence, some concurrent
    POST ROOT/tokenize          {"prompt": text}                           once, to compare the vocabularies

A server returns logprobs under softmax(logits), so tokens sampled at temperatures other than 1 cannot be taught. Keys
are sent but never shown.

Teachers whose vocabulary differs from the policy's are refused, here and in local_teacher.py, because equal ids must
mean equal texts.
"""

import asyncio
import logging
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec
import numpy as np

from art_cli.chat.client import MAX_ERROR, AnswerTooLarge, open_session, read_answer, read_error
from art_cli.config.sections.loss_config import TeacherConfig
from art_cli.learners.packs.logprob_reader import divided
from art_cli.learners.packs.ranks import Ranks
from art_cli.learners.samples import Floats, Sample
from art_cli.runtime import threads
from art_cli.runtime.errors import LearnerError, UsageError, first_of_group, printable
from art_cli.runtime.secrets import find_secrets, load_environment

log = logging.getLogger(__name__)

CURE = "a teacher must have the policy's tokenizer"
# A text that different models' tokenizers cut differently: words, numbers, code, spaces, other scripts.
PROBE = "The unbelievable 1234567 def f(x):\n\treturn   x**2  # naïve Straße 你好 мир 🙂 https://a.b/c?d=e\r\n\n\n"
Answer = TypeVar("Answer")
FIRST_DELAY_S, MAX_DELAY_S = 0.5, 30.0  # wait before a retry; it doubles each time
PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504})  # HTTP statuses worth a retry


def check_vocabulary(teacher: Any, own: Any, name: str) -> None:
    """Raises UsageError if the vocabularies differ in any token or id."""
    theirs, ours = teacher.get_vocab(), own.get_vocab()
    if theirs == ours:
        return
    token_id = min(id for _, id in ours.items() - theirs.items() or theirs.items() - ours.items())
    names = {id: each for each, id in theirs.items()}, {id: each for each, id in ours.items()}
    shown = " and ".join(_show(each.get(token_id)) for each in names)
    raise UsageError(
        f"{name}: its vocabulary is not the policy's ({len(theirs):,} and {len(ours):,} tokens; token {token_id} is "
        f"{shown}); {CURE}"
    )


def probe_text(own: Any) -> str:
    """Returns a text, including special tokens, that shows whether a server uses the same tokenizer."""
    return PROBE + "".join(map(str, own.all_special_tokens))


def check_probe(token_ids: list[int], own: Any, name: str) -> None:
    """Raises UsageError if the server's token ids for `probe_text` differ from the policy tokenizer's."""
    ours = own.encode(probe_text(own), add_special_tokens=False)
    if token_ids == ours:
        return
    place = next((i for i, pair in enumerate(zip(token_ids, ours, strict=False)) if pair[0] != pair[1]), None)
    where = "" if place is None else f"; token {place} of a probe text is {token_ids[place]} and {ours[place]}"
    raise UsageError(
        f"{name}: its tokenizer is not the policy's ({len(token_ids)} and {len(ours)} tokens of a probe text{where}); "
        f"{CURE}"
    )


def _show(token: str | None) -> str:
    return "none" if token is None else repr(printable(token, limit=40))


class _Logprob(msgspec.Struct):
    logprob: float


class _Choice(msgspec.Struct):
    prompt_logprobs: list[dict[str, _Logprob] | None] | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Failed(Exception):
    """A failed request. `status` is None if no answer came."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.may_pass = status is None or status in PASSING
        self.status = status


class ServerTeacher:
    def __init__(self, config: TeacherConfig, tokenizer: Any, directory: Path, *, ranks: Ranks) -> None:
        """`tokenizer` is the policy's; `directory` may contain a .env file.

        Raises UsageError if the key's variable is not set or the server's tokenizer differs; LearnerError if the server
        does not answer.
        """
        assert config.base_url is not None, "without a base_url the teacher is in this process"
        load_environment(directory)
        key = os.environ.get(config.api_key_env, "") if config.api_key_env is not None else ""
        if config.api_key_env is not None and not key:
            raise UsageError(f"loss.teacher.api_key_env: the environment variable {config.api_key_env} is not set")
        self._config, self._ranks, self._headers = config, ranks, {"Authorization": f"Bearer {key}"} if key else {}
        self._secrets = find_secrets(os.environ, names=[config.api_key_env or ""], urls=[config.base_url])
        self._url = config.base_url.rstrip("/")
        self.name = self._secrets.redact(f"loss.teacher {config.model!r} at {self._url}")
        threads.run(self._check_vocabulary(tokenizer))

    def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        check_temperatures(samples, self.name)
        return divided(samples, self._ranks, lambda mine: threads.run(self._read(mine)))

    async def _read(self, samples: Sequence[Sample]) -> list[Floats]:
        """Returns [N] per sample. A sequence shared by several samples is requested once."""
        sequences = {sample.token_ids.tobytes(): sample.token_ids.tolist() for sample in samples}
        slots = asyncio.Semaphore(self._config.concurrency)
        async with open_session(self._url, self._headers) as session:

            async def ask(token_ids: list[int]) -> Floats:
                async with slots:
                    return await self._score(session, token_ids)

            with first_of_group():
                async with asyncio.TaskGroup() as group:
                    tasks = {key: group.create_task(ask(ids)) for key, ids in sequences.items()}
        found = {key: task.result() for key, task in tasks.items()}
        return [found[sample.token_ids.tobytes()][sample.targets] for sample in samples]

    async def _score(self, session: aiohttp.ClientSession, token_ids: list[int]) -> Floats:
        """Returns [L] every token's logprob given the tokens before it; NaN at index 0."""
        body = {"model": self._config.model, "prompt": token_ids, "max_tokens": 1, "prompt_logprobs": 0}
        answer = await self._ask(session, f"{self._url}/completions", body, _Completion)
        given = answer.choices[0].prompt_logprobs if answer.choices else None
        if given is None:
            raise LearnerError(f"{self.name}: no prompt_logprobs in its answer; it must be a vLLM server")
        logprobs = np.full(len(token_ids), np.nan)
        for place, (token_id, found) in enumerate(zip(token_ids, given, strict=False)):
            if found and (entry := found.get(str(token_id))) is not None and entry.logprob <= 0:
                logprobs[place] = entry.logprob
        if len(given) != len(token_ids) or np.isnan(logprobs[1:]).any():
            raise LearnerError(f"{self.name}: its answer has no logprob for some of {len(token_ids)} tokens")
        return logprobs

    async def _check_vocabulary(self, tokenizer: Any) -> None:
        """Raises UsageError if the server tokenizes a text differently. A server without /tokenize is trusted."""
        root = self._url.removesuffix("/v1")
        body = {"model": self._config.model, "prompt": probe_text(tokenizer), "add_special_tokens": False}
        async with open_session(self._url, self._headers) as session:
            try:
                answer = await self._ask(session, f"{root}/tokenize", body, _Tokens, is_needed=False)
            except _Failed:
                log.warning("%s: no /tokenize, so the vocabulary could not be compared with the policy's", self.name)
                return
        check_probe(answer.tokens, tokenizer, self.name)

    async def _ask(
        self, session: aiohttp.ClientSession, url: str, body: Any, kind: type[Answer], *, is_needed: bool = True
    ) -> Answer:
        """Returns the answer, retrying while the failure may be temporary.

        Raises LearnerError when retries are exhausted; _Failed if the URL is unknown and the answer is not `is_needed`.
        """
        for tries in range(self._config.retries + 1):
            try:
                return msgspec.json.decode(await self._post(session, url, body), type=kind)
            except (msgspec.DecodeError, RecursionError) as error:
                raise LearnerError(f"{self.name}: not an answer from vLLM: {self._shown(error)}") from error
            except _Failed as failure:
                if not is_needed and failure.status in (404, 405, 501):
                    raise
                if not failure.may_pass or tries == self._config.retries:
                    raise LearnerError(f"{self.name}: {failure} ({tries + 1} tries)") from failure
                delay = random.uniform(0.5, 1.0) * min(MAX_DELAY_S, FIRST_DELAY_S * 2**tries)
                log.info("%s: %s; trying again in %.1f s", self.name, failure, delay)
                await asyncio.sleep(delay)
        raise AssertionError("unreachable: the last try returns or raises")

    async def _post(self, session: aiohttp.ClientSession, url: str, body: Any) -> bytes:
        try:
            async with (
                asyncio.timeout(self._config.timeout_s),
                session.post(url, json=body, allow_redirects=False) as response,
            ):
                answer = await read_answer(response)
        except TimeoutError as error:
            raise _Failed(f"no answer within {self._config.timeout_s:g} s") from error
        except AnswerTooLarge as error:
            raise LearnerError(f"{self.name}: {error}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _Failed(f"cannot be reached: {self._shown(error)}") from error
        if response.status != 200:
            text = read_error(answer).message or answer[:MAX_ERROR].decode(errors="replace")
            raise _Failed(f"answered {response.status}: {self._shown(text)}", response.status)
        return answer

    def _shown(self, what: object) -> str:
        return printable(self._secrets.redact(" ".join(str(what)[:2000].split())), limit=300)


def check_temperatures(samples: Sequence[Sample], name: str) -> None:
    """Raises LearnerError, with the teacher's `name`, for a token sampled at a temperature other than 1."""
    for sample in samples:
        if (sample.temperatures != 1).any():
            raise LearnerError(
                f"{name}: trajectory {sample.trajectory_id}, turn {sample.turn}: sampled at another temperature than "
                "1, which a server cannot score; set rollout.sampling.temperature=1 and force=true, or name the "
                "teacher's directory"
            )
