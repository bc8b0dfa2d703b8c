"""A vLLM server that answers: OwnServer starts one and sees it die, RunningServer finds one at an address.

start()     returns when the server answers
control     steers it; a new object after every start
base_name   the base model's name there
verbatim    how requests keep the arguments of earlier calls as they were written
ended()     returns why the server can no longer be used, as soon as it cannot
stop()      ends an own server; a running one is left as it is

vLLM parses the arguments of earlier tool calls, and most chat templates write them again (`arguments | tojson`), with
Python's spaces. Where the model wrote `{"a":2}`, the prompt of the next turn would not continue the sampled tokens.
`Verbatim` gives the server the template with one change: arguments that are an object with a certain key are written
as the text under that key. The key is random, and only `put_into` writes it. `restore_arguments` mends replies:
vLLM's parsers give the arguments of a call in their own spelling, and the sampled tokens have the model's.
"""

import asyncio
import contextlib
import errno
import json
import logging
import os
import re
import secrets
import socket
import sys
from pathlib import Path

import msgspec

from art_cli.chat.replies import Choice, are_same
from art_cli.chat.requests import Json, Request
from art_cli.config.sections.engine_config import VllmEngineConfig
from art_cli.engines.vllm import arguments
from art_cli.engines.vllm.control import Control, Refused, Unreachable
from art_cli.engines.vllm.log_cause import find_cause
from art_cli.models.base_files import find_files
from art_cli.models.policy_spec import PolicySpec
from art_cli.models.run_memory import BESIDE_SHARE, MAX_SHARE
from art_cli.runs.durable import write_file
from art_cli.runtime import threads
from art_cli.runtime.errors import EngineError, UsageError
from art_cli.runtime.processes.child import ChildProcess, child_environment, describe_end, last_lines
from art_cli.runtime.scratch import Scratch, make_directory, owner_only

log = logging.getLogger(__name__)

_WRITTEN = re.compile(r"(?<![\w.\]])((?:\w+(?:\.|\[['\"]))*arguments(?:['\"]\])?)\s*\|\s*tojson(?:\([^()]*\))?")
_TAKEN_APART = re.compile(r"arguments(?:['\"]\])?\s*(?:\|\s*(?:items|dictsort)|\.items)")


class Verbatim:
    """Example: of "{{ call.arguments | tojson }}" the server's template is
    "{{ (call.arguments['1f3c'] if '1f3c' in call.arguments else call.arguments | tojson) }}"."""

    def __init__(self, template: str | None) -> None:
        """`template` is the model's, or None if it is unknown, and requests stay as they are."""
        self._key = secrets.token_hex(12)
        choice = rf"(\1['{self._key}'] if '{self._key}' in \1 else \g<0>)"
        self.template = None if template is None else _WRITTEN.sub(choice, template)
        self._is_changed = self.template != template
        self._takes_apart = template is not None and _TAKEN_APART.search(template) is not None

    def put_into(self, request: Request) -> Request:
        """Returns the request with the arguments of earlier calls under the key.

        A template that in some case takes arguments apart, as Llama 3.1's does for built-in tools, does so only where
        a client sets its variables; such a request stays as it is.
        """
        if not self._is_changed or not request.messages or (self._takes_apart and request.template_kwargs):
            return request
        return msgspec.structs.replace(request, messages=[self._marked(message) for message in request.messages])

    def _marked(self, message: Json) -> Json:
        if message.get("role") != "assistant" or not message.get("tool_calls"):
            return message
        return {**message, "tool_calls": [self._marked_call(call) for call in message["tool_calls"]]}

    def _marked_call(self, call: Json) -> Json:
        arguments = call["function"].get("arguments")
        if not isinstance(arguments, str) or not _is_object(arguments):
            return call
        return {**call, "function": {**call["function"], "arguments": json.dumps({self._key: arguments})}}


def _is_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (ValueError, RecursionError):
        return False


def restore_arguments(choice: Choice) -> None:
    """Writes the arguments of the choice's calls as they stand in its tokens, where the same values stand there."""
    calls = (choice.message or {}).get("tool_calls") or []
    text, offset = "".join(choice.tokens) if calls else "", 0
    for call in calls:
        function = call.get("function") or {}
        written, offset = _find_object(text, offset, function.get("arguments") or "")
        if written is not None:
            function["arguments"] = written


def _find_object(text: str, offset: int, arguments: str) -> tuple[str | None, int]:
    """Returns the first JSON object from `offset` on that has the same value as `arguments`, and where it ends."""
    decoder = json.JSONDecoder()
    start = text.find("{", offset)
    while start >= 0:
        try:
            _, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            end = start
        if end > start and are_same(text[start:end], arguments):
            return text[start:end], end
        start = text.find("{", start + 1)
    return None, offset


MAX_PORTS = 3  # ports tried when other processes are quicker to take them
POLL_S = 0.25  # time between health checks while it starts
HEALTH_EVERY_S = 1.0
HEALTH_TIMEOUT_S = 10.0
HANG_S = 120.0  # a server without an answer for this long hangs; long prefills on a CPU take seconds
PROMPT = [1, 2, 3, 4]  # any tokens do
SAME = 1e-6  # nats; logprobs that differ by less are the same
TERM_GRACE_S = 10.0  # time that vLLM has to free a GPU, which takes a few seconds
TAIL_LINES = 15
MAX_LOG_BYTES = 2**20  # largest part of the log, its end, in which the cause of a failure is looked for
# With one of these in engine.env the server has a cache of its own.
HUB_VARIABLES = frozenset({"HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"})


class OwnServer:
    """A child process of this one. Its port and key are new at every start."""

    def __init__(self, config: VllmEngineConfig, model: PolicySpec, *, name: str, log: Path) -> None:
        """Raises EngineError for no such Python, or a setting that this machine cannot have."""
        self.base_name = f"{name}@base"
        self.log = log
        self.has_gpu = arguments.has_gpu({**child_environment(), **config.env})
        if self.has_gpu:
            arguments.check_gpus(config)
        self.sleep_level = arguments.sleep_level(config, model, inherited=os.environ, has_gpu=self.has_gpu)
        self._python = config.python or Path(sys.executable)
        if not self._python.is_file():
            raise EngineError(f"engine.python: no such file: {self._python}")
        self._config, self._model = config, model
        self.verbatim = Verbatim(model.chat_template)
        self._child: ChildProcess | None = None
        self._sockets: Scratch | None = None  # where the server's own processes talk to each other
        self._is_up = False  # True once it has answered
        self._share = MAX_SHARE  # of a GPU
        self._log_start = 0  # where this server's part of the log begins
        self.pid = 0  # process id of the server itself; 0: not started

    async def start(self) -> None:
        """Returns when it answers. Raises EngineError with the log's last lines: it ended, or was silent too long."""
        if not HUB_VARIABLES & self._config.env.keys():
            await threads.call_in_thread(_fetch, self._model.base)  # engine.start_timeout_s includes no download
        if self.has_gpu and arguments.own_share(self._config) is None:
            self._share = await asyncio.to_thread(self._free_share)
        log.info("vllm: starting %s for %s; its log: %s", self._python, self._model.base, self.log)
        for _ in range(MAX_PORTS):
            if await self._start_at(free_port()):
                return
        raise EngineError(f"vllm: {MAX_PORTS} ports in a row were taken by others while it started; see {self.log}")

    def _free_share(self) -> float:
        """Returns the share of a GPU that vLLM may take: what the learner leaves, where both use it."""
        config, model = self._config, self._model
        if not arguments.shares_gpu(config, model.learner_device, model.learner_gpus, os.environ):
            return MAX_SHARE
        found = arguments.free_share(self._python, arguments.num_gpus(config), {**child_environment(), **config.env})
        if found is None:
            log.warning("vllm: the torch of %s does not report the memory of a GPU", self._python)
            return MAX_SHARE
        found = min(found, MAX_SHARE if self.sleep_level else BESIDE_SHARE)
        log.info("vllm: gpu-memory-utilization %.3f, of what the learner leaves free", found)
        return found

    async def _start_at(self, port: int) -> bool:
        """Returns whether the server answers; False where another process has that port."""
        self._is_up = False
        self.key = secrets.token_urlsafe(32)
        self.control = Control(f"http://127.0.0.1:{port}", self.key)
        try:
            self._child = await self._start_child(port)
            self.pid = await self._child.program_pid()
            if await self._until_healthy():
                with contextlib.suppress(Refused):  # another process's server, which does not know our key
                    if self.base_name in await self.control.models():
                        self._is_up = True
                        return True
        except BaseException:
            await self.stop()
            raise
        await self.stop()
        return False

    async def _start_child(self, port: int) -> ChildProcess:
        make_directory(self.log.parent)
        self._sockets = Scratch("vllm")
        environment = arguments.environment(
            self._config,
            self._model,
            inherited=child_environment(),
            key=self.key,
            sockets=self._sockets.path,
            sleep=self.sleep_level,
            has_gpu=self.has_gpu,
        )
        with open(self.log, "ab", opener=owner_only) as log:
            self._log_start = log.tell()
            return await ChildProcess.start(
                self._command(port), environment=environment, stdout=log, stderr=log, grace_s=TERM_GRACE_S
            )

    def _command(self, port: int) -> list[str]:
        template = None
        if self.verbatim.template is not None:
            template = self.log.with_name(f"{self.log.stem}_chat_template.jinja").resolve()
            write_file(template, self.verbatim.template.encode())
        return arguments.command(
            self._config,
            self._model,
            python=self._python,
            port=port,
            name=self.base_name,
            template=template,
            sleep=self.sleep_level,
            has_gpu=self.has_gpu,
            memory_share=self._share,
        )

    async def _until_healthy(self) -> bool:
        """Returns whether a server answers; False if ours ended because another process took the port."""
        assert self._child is not None
        ended = asyncio.ensure_future(self._child.wait())
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                while not ended.done():
                    with contextlib.suppress(Unreachable):
                        if await self.control.is_healthy(timeout_s=HEALTH_TIMEOUT_S):
                            return True
                    await asyncio.wait({ended}, timeout=POLL_S)
        except TimeoutError as error:
            limit = f"{self._config.start_timeout_s:g} s (engine.start_timeout_s)"
            raise EngineError(f"vllm: no answer within {limit}; {self.last_lines()}") from error
        finally:
            ended.cancel()
        lines = self._tail()
        if os.strerror(errno.EADDRINUSE).lower() in lines.lower():
            return False
        if "No module named 'vllm'" in lines or "No module named vllm" in lines:
            raise EngineError(f"engine.python: {self._python} has no vLLM; `pip install vllm` there, or name another")
        reason, cause = describe_end(ended.result()), self.last_lines()
        if f"Unknown quantization method: {arguments.QUANTIZATION}" in cause:
            cure = f"{self._python} -m pip install vllm-bnb-plugin"
            raise EngineError(f"model.quantize: this vLLM has no {arguments.QUANTIZATION}: {cure}")
        raise EngineError(f"vllm: the server ended while it started ({reason}); {cause}")

    async def ended(self) -> str:
        assert self._child is not None, "not started"
        died = asyncio.ensure_future(self._child.wait())
        hung = asyncio.ensure_future(_unhealthy(self.control))
        try:
            done, _ = await asyncio.wait({died, hung}, return_when=asyncio.FIRST_COMPLETED)
            return describe_end(died.result()) if died in done else hung.result()
        finally:
            died.cancel()
            hung.cancel()

    def last_lines(self) -> str:
        """Returns the cause that the log names, or the log's last lines if it names none.

        Once the server is up, its API server's errors may be those of requests.
        """
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            file.seek(max(self._log_start, file.seek(0, os.SEEK_END) - MAX_LOG_BYTES))
            text = file.read(MAX_LOG_BYTES).decode(errors="replace").replace(self.key, "***")
            if cause := find_cause(text, has_server=not self._is_up):
                return f"{cause} (its log: {self.log})"
        return f"the last lines of {self.log}:\n{self._tail()}"

    def _tail(self) -> str:
        return last_lines(self.log, count=TAIL_LINES, start=self._log_start, secrets=[self.key])

    async def stop(self) -> None:
        if self._child is not None:
            await self.control.close()
            await self._child.stop()
        if self._sockets is not None:  # a server that is killed leaves its sockets behind
            self._sockets.close()


class RunningServer:
    """A server that the user runs at `engine.base_url`, on a machine that sees the run's files under the same paths."""

    pid = 0
    sleep_level = 0

    def __init__(self, config: VllmEngineConfig, url: str) -> None:
        self._key_variable = config.api_key_env
        self.key = os.environ.get(config.api_key_env, "")
        self.control = Control(url.rstrip("/").removesuffix("/v1"), self.key)
        self.verbatim = Verbatim(None)  # its template is the user's
        self.base_name = ""

    async def start(self) -> None:
        """Raises EngineError if it does not answer, refuses the key, or reports logprobs of another distribution."""
        try:
            self.base_name = (await self.control.models())[0]
            await self._check_logprobs()
        except Unreachable as error:
            raise EngineError(f"engine.base_url: {error}; start the server first") from error
        except Refused as error:
            if error.status in (401, 403):
                raise EngineError(f"engine.api_key_env: {error} (the key is read from {self._key_variable})") from error
            raise

    async def _check_logprobs(self) -> None:
        """Raises EngineError if the server reports raw logprobs, which do not change with the temperature.

        Those of the distribution sampled from do. Only tokens that both replies list are compared, because each also
        lists the token that it happened to sample.
        """
        warm, hot = [
            await self.control.score(self.base_name, PROMPT, is_cached=True, temperature=temperature, timeout_s=60.0)
            for temperature in (1.0, 4.0)
        ]
        if all(abs(warm.next[token] - hot.next[token]) < SAME for token in warm.next.keys() & hot.next.keys()):
            raise EngineError(
                f"engine.base_url: {self.control.root} reports logprobs of another distribution than it samples from; "
                "start it with --logprobs-mode processed_logprobs"
            )

    async def ended(self) -> str:
        """Never returns, because the user watches the server. Requests fail while it is away."""
        await asyncio.Event().wait()
        raise AssertionError("the event was set")

    def last_lines(self) -> str:
        return f"see the log of {self.control.root}"

    async def stop(self) -> None:
        await self.control.close()


def _fetch(base: str) -> None:
    """Fetches a hub's model where it is not there yet. A failure is left to the server, which reports its own."""
    try:
        find_files(base)
    except UsageError as error:
        log.debug("vllm: %s", error)


async def _unhealthy(control: Control) -> str:
    """Returns why a server can no longer be used, as soon as it reports that or gives no answer for HANG_S."""
    loop = asyncio.get_running_loop()
    answered = loop.time()
    while loop.time() - answered < HANG_S:
        try:
            if not await control.is_healthy(timeout_s=HEALTH_TIMEOUT_S):
                return "its engine core died"
            answered = loop.time()
        except Unreachable:
            pass  # it may answer again before HANG_S have passed
        except Refused as refusal:
            return f"its health check failed: {refusal}"
        await asyncio.sleep(HEALTH_EVERY_S)
    return f"no answer for {HANG_S:.0f} s"


def free_port() -> int:
    """Returns a free port of the loopback interface, which another process may be quicker to take."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
