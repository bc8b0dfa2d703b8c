"""The chat next to a trajectory: relays a conversation to an OpenAI-compatible endpoint."""

import asyncio
import os

import aiohttp
import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from art_cli.chat.chat_errors import ChatError
from art_cli.chat.client import HttpBackend, open_session, read_answer
from art_cli.chat.reading import BodyLimit, read_body
from art_cli.chat.requests import Sampling
from art_cli.chat.wires.openai_chat import OpenAIChat
from art_cli.runtime.errors import UsageError, describe
from art_cli.runtime.secrets import find_secrets

MAX_BODY = 4 * 2**20  # bytes of a conversation
BODY_S, ANSWER_S = 30.0, 120.0  # longest waits for the page's question and the endpoint's answer
MODELS_S = 10.0  # longest wait for the list of models
KEYS = ("ART_API_KEY", "OPENAI_API_KEY")  # variables with the endpoint's key


def find_key() -> str:
    """Returns the endpoint's key, or "none", because local servers may need no key."""
    return next((os.environ[name] for name in KEYS if os.environ.get(name)), "none")


async def find_model(url: str, key: str) -> str:
    """Returns the endpoint's initial model. Raises UsageError if the models cannot be listed or are missing."""
    address = f"{url.rstrip('/')}/models"
    try:
        async with open_session(url, {"Authorization": f"Bearer {key}"}) as session:
            timeout = aiohttp.ClientTimeout(total=MODELS_S)
            async with session.get(address, timeout=timeout, allow_redirects=False) as response:
                listed = msgspec.json.decode(await read_answer(response, MAX_BODY), type=_Models)
    except (aiohttp.ClientError, TimeoutError, ValueError, RecursionError) as error:
        shown = find_secrets({}, values=[key], urls=[url]).redact(describe(error))
        raise UsageError(f"--endpoint {url}: cannot list its models ({shown}); give --model") from None
    if not listed.data:
        raise UsageError(f"--endpoint {url}: it lists no model; give --model")
    return listed.data[0].id


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model] = []


class ChatRelay:
    """Relays conversations to the endpoint; the page sends the whole conversation each time."""

    def __init__(self, url: str, model: str, key: str) -> None:
        self._backend = HttpBackend(url, key, model, timeout_s=ANSWER_S)
        self._wire = OpenAIChat()

    async def answer(self, http: HttpRequest) -> Response:
        """Returns {"message": {...}, "finish_reason": "stop"}. Raises HTTPException with a sentence."""
        try:
            fields = msgspec.json.decode(await read_body(http, BodyLimit(MAX_BODY), BODY_S))
            asked = {
                name: fields[name] for name in ("messages", "tools", "temperature") if fields.get(name) is not None
            }
            request = self._wire.parse(msgspec.json.encode({**asked, "model": self._backend.model}), Sampling())
            async with asyncio.timeout(ANSWER_S):
                reply = await self._backend.reply(request)
        except ChatError as error:
            raise HTTPException(error.status if error.status >= 400 else 502, str(error)) from error
        except TimeoutError:
            raise HTTPException(504, f"the endpoint did not answer within {ANSWER_S:.0f} s") from None
        except (ValueError, AttributeError, TypeError, KeyError, RecursionError):
            raise HTTPException(400, 'expected {"messages": [...]}') from None
        choice = reply.choices[0]
        answer = {"message": choice.message, "finish_reason": choice.finish_reason}
        return Response(msgspec.json.encode(answer), media_type="application/json")

    async def close(self) -> None:
        await self._backend.close()
