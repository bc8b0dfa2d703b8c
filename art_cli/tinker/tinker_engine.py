"""TinkerEngine: samples from a policy on a Tinker server. Token ids are sent and token ids come back.

    Request -> our own chat template -> tokens -> the server samples -> tokens, logprobs -> our own parser -> Reply

All engines therefore send identical prompts, and training uses exactly the sampled tokens. The server reports the
policy's own logprobs at temperature 1 without top_p or top_k, regardless of the sampling settings.
"""

import asyncio
import contextlib
import math
import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any, NoReturn, Self

import msgspec

from art_cli.chat import Backend
from art_cli.chat.chat_errors import ChatError, invalid
from art_cli.chat.reading import RequestReader
from art_cli.chat.replies import Choice, Chunk, Reply
from art_cli.chat.requests import Request, Sampling, demands_format, needs_echo
from art_cli.config.schema import TinkerEngineConfig
from art_cli.engines import Endpoint, EngineSetup
from art_cli.engines.embedded import chat_prompts
from art_cli.engines.embedded.chat_prompts import Prompt
from art_cli.engines.embedded.choices import ChoiceWriter, Piece, reply_limit
from art_cli.engines.embedded.reply_text import Vocabulary
from art_cli.models.policy_spec import PolicySpec, tokenizer_of
from art_cli.models.tokenizer import configs_of, stop_ids
from art_cli.runtime.errors import EngineError, RemoteError
from art_cli.runtime.threads import call_in_thread
from art_cli.tinker.client.remote_checkpoint import read_remote
from art_cli.tinker.client.remote_server import RemoteSession, find_server


class TinkerEngine:
    """Engine and Backend. Samples from the base model until `load` is called."""

    def __init__(self, config: TinkerEngineConfig, policy: PolicySpec, *, name: str, step: int = 0) -> None:
        """Raises RemoteError if the key of the server is missing."""
        self.endpoint = Endpoint(base_url=None, api_key="", model=name, step=step)
        self._config, self._policy = config, policy
        self._server = find_server(config)
        self._connection: RemoteSession | None = None
        self._vocabulary: Vocabulary | None = None
        self._stop_ids: list[int] = []
        self._sampler: Any = None  # the SDK's sampling client, created on demand
        self._making = asyncio.Lock()
        self._reader = RequestReader()
        self._is_lost, self._loss = asyncio.Event(), ""

    @classmethod
    def of(cls, config: TinkerEngineConfig, setup: EngineSetup) -> Self:
        assert setup.policy is not None, "the prompts are rendered by the policy's own template"
        return cls(config, setup.policy, name=setup.name, step=setup.step)

    @property
    def backend(self) -> Backend:
        return self

    # --- Engine -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Raises EngineError if the server is unreachable or lacks the base model."""
        assert self._connection is None, "started twice"
        with _as_engine_error():
            self._connection = await call_in_thread(self._open)

    def _open(self) -> RemoteSession:
        self._vocabulary = Vocabulary(tokenizer_of(self._policy))
        self._stop_ids = stop_ids(self._vocabulary.tokenizer, *configs_of(self._policy.base))
        self._server.find_model(self._base)
        return RemoteSession(self._server, timeout_s=self._config.timeout_s)

    async def load(self, checkpoint: Path, step: int) -> None:
        """Raises CheckpointError if the weights are not on a server, and EngineError if the server lost them."""
        remote, connection = await call_in_thread(read_remote, checkpoint), self._opened()
        with _as_engine_error():
            sampler = await call_in_thread(lambda: connection.sampler(path=remote.sampler))
        self._sampler = sampler
        self.endpoint = msgspec.structs.replace(self.endpoint, step=step)

    async def score(self, token_ids: list[int]) -> list[float]:
        connection = self._opened()
        with _as_engine_error():
            prompt = connection.types.ModelInput.from_ints(token_ids)
            sampler = await self._present_sampler()
            found = await connection.wait_async(sampler.compute_logprobs(prompt), "the probe's logprobs")
        values = list(found or ())[1 - len(token_ids) :]  # the initial token has no logprob; SkyRL omits it
        if len(values) != len(token_ids) - 1 or not all(isinstance(each, float) for each in values):
            raise EngineError(f"{self._server.url}: it gave no logprob for each token of the probe")
        return values

    def longest_prompt(self) -> int:
        assert self._vocabulary is not None
        return self._policy.max_length * self._vocabulary.longest

    async def sleep(self) -> None:
        """Does nothing, because the server owns the memory."""

    async def wake(self) -> None:
        """Does nothing, because the engine never sleeps."""

    async def watch(self) -> NoReturn:
        await self._is_lost.wait()
        raise EngineError(self._loss)

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await call_in_thread(connection.close)

    @property
    def _base(self) -> str:
        return self._config.base_model or self._policy.base

    def _opened(self) -> RemoteSession:
        if self._connection is None:
            raise EngineError("the tinker engine was not started")
        return self._connection

    async def _present_sampler(self) -> Any:
        async with self._making:
            if self._sampler is None:
                connection = self._opened()
                self._sampler = await call_in_thread(lambda: connection.sampler(base=self._base))
        return self._sampler

    # --- Backend ------------------------------------------------------------------------------------------------------

    def models(self) -> list[str]:
        return [self.endpoint.model]

    async def reply(self, request: Request) -> Reply:
        if request.model != self.endpoint.model:
            raise ChatError(404, f"the model {request.model!r} does not exist", param="model", code="model_not_found")
        _refuse(request)
        vocabulary, most = self._vocabulary, self._policy.max_length
        assert vocabulary is not None, "not started"
        prompt = await self._reader.read(chat_prompts.render, vocabulary, request, most)
        limit = reply_limit(request, prompt, most, self._policy.vocabulary)
        sampling = msgspec.structs.replace(request.sampling, max_tokens=limit - len(prompt.ids))
        step, sequences = await self._sample(prompt, sampling)
        return Reply(
            id=f"{'chatcmpl' if request.messages is not None else 'cmpl'}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=request.model,
            choices=[
                _choice(vocabulary, request, prompt, index, self._piece(sequence, sampling, step))
                for index, sequence in enumerate(sequences)
            ],
            prompt_ids=prompt.ids,
            step=step,
            sampling=sampling,
        )

    async def stream(self, request: Request) -> AsyncGenerator[Chunk]:
        """Yields the whole reply, one chunk per choice, because the protocol does not stream."""
        reply = await self.reply(request)
        for choice in reply.choices:
            yield Chunk(
                id=reply.id,
                created=reply.created,
                model=reply.model,
                choice=choice,
                is_last=True,
                prompt_ids=reply.prompt_ids if choice is reply.choices[0] else None,
                step=reply.step,
                sampling=reply.sampling,
            )

    async def _sample(self, prompt: Prompt, sampling: Sampling) -> tuple[int, list[Any]]:
        """Returns the policy step and the SDK's samples. Raises ChatError if the server is lost or refuses."""
        try:
            connection, sampler, step = self._opened(), await self._present_sampler(), self.endpoint.step
            types = connection.types
            wanted = types.SamplingParams(
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k or -1,
                seed=None if sampling.seed is None else sampling.seed % 2**63,
                stop=self._stops(sampling),
            )
            ids = types.ModelInput.from_ints(prompt.ids)
            future = sampler.sample(prompt=ids, num_samples=sampling.n, sampling_params=wanted)
            answer = await connection.wait_async(future, "a sample")
        except EngineError as error:
            raise ChatError(500, str(error)) from error
        except RemoteError as error:
            if error.is_final:
                self._loss = self._loss or str(error)
                self._is_lost.set()
            raise ChatError(502 if error.is_final else 400, str(error)) from error
        if len(answer.sequences) != sampling.n:
            raise self._broken(f"{len(answer.sequences)} samples instead of {sampling.n}")
        return step, list(answer.sequences)

    def _stops(self, sampling: Sampling) -> list[int] | list[str]:
        """Returns stop token ids. If there are stop strings, returns text, because a request accepts only one kind."""
        ids = [*self._stop_ids, *(id for id in sampling.stop_ids if id not in self._stop_ids)]
        if not sampling.stop:
            return ids
        assert self._vocabulary is not None
        return [*sampling.stop, *self._vocabulary.tokenizer.convert_ids_to_tokens(ids)]

    def _piece(self, sequence: Any, sampling: Sampling, step: int) -> Piece:
        """Validates a sequence from the server."""
        ids, raw = [int(id) for id in sequence.tokens], sequence.logprobs
        if raw is None or len(raw) != len(ids) or not all(math.isfinite(value) for value in raw):
            raise self._broken("no finite logprob for each sampled token")
        if not all(0 <= id < self._policy.vocabulary for id in ids) or len(ids) > (sampling.max_tokens or 0):
            raise self._broken("tokens that the model does not have, or too many")
        raw = [float(value) for value in raw]
        certain = [0.0] * len(raw) if sampling.temperature == 0 else raw
        return Piece(ids, certain, raw, None, step, "length" if sequence.stop_reason == "length" else "stop")

    def _broken(self, what: str) -> ChatError:
        return ChatError(502, f"{self._server.url}: it gave {what}")


@contextlib.contextmanager
def _as_engine_error() -> Iterator[None]:
    """Turns a RemoteError inside the block into an EngineError."""
    try:
        yield
    except RemoteError as error:
        raise EngineError(str(error)) from error


def _refuse(request: Request) -> None:
    """Raises ChatError 400 for unsupported request options."""
    if demands_format(request):
        raise invalid(
            "response_format, tool_choice: engine 'tinker' cannot enforce a format; the protocol has no grammars"
        )
    given = [*request.sampling.reshaping, *(["ignore_eos"] if request.sampling.ignore_eos else [])]
    if given:
        raise invalid(f"{', '.join(given)}: engine 'tinker' cannot do it; the protocol has no such thing", given[0])
    if needs_echo(request) or request.sampling.max_tokens == 0:
        raise invalid("echo, max_tokens: engine 'tinker' only samples; the protocol repeats no prompt", "echo")
    if request.wants_logprobs and request.top_logprobs:
        raise invalid("top_logprobs: engine 'tinker' reports the sampled tokens' own only", "top_logprobs")


def _choice(vocabulary: Vocabulary, request: Request, prompt: Prompt, index: int, piece: Piece) -> Choice:
    choice = ChoiceWriter(vocabulary, request, prompt, index).whole(piece)
    # The server reports logprobs at temperature 1, so at other temperatures the sampling distribution is unknown.
    choice.is_masked = request.sampling.temperature not in (0.0, 1.0)
    return choice
