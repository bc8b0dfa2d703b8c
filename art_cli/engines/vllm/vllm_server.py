"""A vLLM server: OwnServer starts a server and watches it, RunningServer connects to one at an address.

start()     returns when the server answers
control     control calls; a new object after every start
base_name   the served name of the base model
verbatim    preserves the arguments of earlier calls in requests
ended()     returns why the server has become unusable, as soon as this happens
stop()      stops an own server; leaves a running server unchanged

vLLM parses the arguments of earlier tool calls, and most chat templates reserialize them (`arguments | tojson`) with
Python's spacing. If the model wrote `{"a":2}`, the next turn's prompt would no longer continue the sampled tokens.
`Verbatim` gives the server a modified template: arguments that are an object with a random key are replaced by the text
under this key, and only `put_into` writes the key. `restore_arguments` corrects replies: vLLM's parsers reserialize
call arguments, but the sampled tokens contain the model's spelling.
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
from art_cli.models.run_memory import BESIDE_SHARE, LEAST_SHARE, MAX_SHARE
from art_cli.runs.durable import write_file
from art_cli.runtime import threads
from art_cli.runtime.errors import EngineError, UsageError
from art_cli.runtime.processes.child import ChildProcess, child_environment, describe_end, last_lines
from art_cli.runtime.scratch import Scratch, make_directory, owner_only

log = logging.getLogger(__name__)

_WRITTEN = re.compile(r"(?<![\w.\]])((?:\w+(?:\.|\[['\"]))*arguments(?:['\"]\])?)\s*\|\s*tojson(?:\([^()]*\))?")
_TAKEN_APART = re.compile(r"arguments(?:['\"]\])?\s*(?:\|\s*(?:items|dictsort)|\.items)")

MAX_PORTS = 3  # ports tried when other processes take them in the meantime
POLL_S = 0.25  # time between health checks during startup
HEALTH_EVERY_S = 1.0
HEALTH_TIMEOUT_S = 10.0
HANG_S = 120.0  # a server silent for this long is considered hung; long prefills on a CPU take seconds
PROMPT = [1, 2, 3, 4]  # arbitrary tokens
SAME = 1e-6  # nats; a smaller logprob difference counts as equal
TERM_GRACE_S = 10.0  # time for vLLM to free a GPU, which takes a few seconds
TAIL_LINES = 15
MAX_LOG_BYTES = 2**20  # the end of the log that is searched for an error
# With any of these in engine.env, the server has a separate model cache.
HUB_VARIABLES = frozenset({"HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"})


class Verbatim:
    """Example: for "{{ call.arguments | tojson }}" the server gets
    "{{ (call.arguments['1f3c'] if '1f3c' in call.arguments else call.arguments | tojson) }}"."""

    def __init__(self, template: str | None) -> None:
        """`template` is the model's chat template. Without it, requests are left unchanged."""
        self._key = secrets.token_hex(12)
        choice = rf"(\1['{self._key}'] if '{self._key}' in \1 else \g<0>)"
        self.template = None if template is None else _WRITTEN.sub(choice, template)
        self._is_changed = self.template != template
        self._takes_apart = template is not None and _TAKEN_APART.search(template) is not None

    def put_into(self, request: Request) -> Request:
        """Returns the request with the arguments of earlier calls under the key.

        Some templates also take arguments apart, as Llama 3.1's does for built-in tools, but only when a client sets
        template variables. Such requests are left unchanged.
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
    """Replaces call arguments by the equivalent sampled text."""
    calls = (choice.message or {}).get("tool_calls") or []
    text, offset = "".join(choice.tokens) if calls else "", 0
    for call in calls:
        function = call.get("function") or {}
        written, offset = _find_object(text, offset, function.get("arguments") or "")
        if written is not None:
            function["arguments"] = written


def _find_object(text: str, offset: int, arguments: str) -> tuple[str | None, int]:
    """Returns the earliest JSON object after `offset` equal to `arguments`, and where the search continues."""
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


class OwnServer:
    """A vLLM server in a child process. Every start uses a new port and key."""

    def __init__(self, config: VllmEngineConfig, model: PolicySpec, *, name: str, log: Path) -> None:
        """Raises EngineError if the Python is missing or this machine does not support a setting."""
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
        self._sockets: Scratch | None = None  # for sockets between the server's processes
        self._is_up = False
        self._share = MAX_SHARE  # GPU memory share
        self._log_start = 0  # offset of the current server's output in the log
        self.pid = 0  # process id of the server itself; 0 before start

    async def start(self) -> None:
        """Returns when the server answers. Raises EngineError with the end of the log if it died or stayed silent."""
        if not HUB_VARIABLES & self._config.env.keys():
            with contextlib.suppress(UsageError):  # the server reports its own error
                await threads.call_in_thread(find_files, self._model.base)  # engine.start_timeout_s excludes downloads
        if self.has_gpu and arguments.own_share(self._config) is None:
            self._share = await asyncio.to_thread(self._free_share)
        log.info("vllm: starting %s for %s; its log: %s", self._python, self._model.base, self.log)
        for _ in range(MAX_PORTS):
            if await self._start_at(free_port()):
                return
        raise EngineError(f"vllm: {MAX_PORTS} ports in a row were taken by others while it started; see {self.log}")

    def _free_share(self) -> float:
        """Returns vLLM's GPU memory share: all that the learner and other programs leave free. Raises EngineError."""
        config, model = self._config, self._model
        found = arguments.free_share(self._python, arguments.num_gpus(config), {**child_environment(), **config.env})
        if found is None:
            log.warning("vllm: the torch of %s does not report the memory of a GPU", self._python)
            return MAX_SHARE
        if not arguments.shares_gpu(config, model.learner_device, model.learner_gpus, os.environ):
            found = max(found, LEAST_SHARE)
        elif not self.sleep_level:
            found = min(found, BESIDE_SHARE)
        if not found:  # vLLM's own error is about the number 0
            raise EngineError("vllm: the learner and other processes fill the GPU's memory; nvidia-smi lists them")
        log.info("vllm: gpu-memory-utilization %.3f, of what is free on the GPU", found)
        return found

    async def _start_at(self, port: int) -> bool:
        """Returns False if another process has taken the port."""
        self._is_up = False
        self.key = secrets.token_urlsafe(32)
        self.control = Control(f"http://127.0.0.1:{port}", self.key)
        try:
            self._child = await self._start_child(port)
            self.pid = await self._child.program_pid()
            if await self._until_healthy():
                with contextlib.suppress(Refused):  # another process's server does not know our key
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
        """Returns True when a server answers; False if ours died because another process took the port."""
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
        """Returns the log's cause, or else its last lines. In a server that is up, requests' errors do not count."""
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
        if self._sockets is not None:  # a killed server leaves its sockets behind
            self._sockets.close()


class RunningServer:
    """A server that the user runs at `engine.base_url`, on a machine with the run's files under the same paths."""

    pid = 0
    sleep_level = 0

    def __init__(self, config: VllmEngineConfig, url: str) -> None:
        self._key_variable = config.api_key_env
        self.key = os.environ.get(config.api_key_env, "")
        self.control = Control(url.rstrip("/").removesuffix("/v1"), self.key)
        self.verbatim = Verbatim(None)  # the template belongs to the user
        self.base_name = ""

    async def start(self) -> None:
        """Raises EngineError if the server is silent, rejects the key or reports raw logprobs."""
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
        """Raises EngineError if logprobs do not change with temperature, because raw logprobs are reported.

        Only tokens listed in both replies are compared, because each reply also lists its randomly sampled token.
        """
        warm, hot = [
            await self.control.score(self.base_name, PROMPT, is_cached=True, temperature=temperature, timeout_s=60.0)
            for temperature in (1.0, 2.0)  # vLLM takes no more than 2
        ]
        if all(abs(warm.next[token] - hot.next[token]) < SAME for token in warm.next.keys() & hot.next.keys()):
            raise EngineError(
                f"engine.base_url: {self.control.root} reports logprobs of another distribution than it samples from; "
                "start it with --logprobs-mode processed_logprobs"
            )

    async def ended(self) -> str:
        """Never returns, because the user watches the server. Requests fail during an outage."""
        await asyncio.Event().wait()
        raise AssertionError("the event was set")

    def last_lines(self) -> str:
        return f"see the log of {self.control.root}"

    async def stop(self) -> None:
        await self.control.close()


async def _unhealthy(control: Control) -> str:
    """Returns why a server is unusable, once it reports so or has been silent for HANG_S."""
    loop = asyncio.get_running_loop()
    answered = loop.time()
    while loop.time() - answered < HANG_S:
        try:
            if not await control.is_healthy(timeout_s=HEALTH_TIMEOUT_S):
                return "its engine core died"
            answered = loop.time()
        except Unreachable:
            pass  # it may answer again within HANG_S
        except Refused as refusal:
            return f"its health check failed: {refusal}"
        await asyncio.sleep(HEALTH_EVERY_S)
    return f"no answer for {HANG_S:.0f} s"


def free_port() -> int:
    """Returns a free loopback port. Another process may take it in the meantime."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
