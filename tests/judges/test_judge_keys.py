"""How a judge's key is found and sent: .env files taken literally, passwords in addresses, keys no header can hold."""

import asyncio
import base64
import os
from pathlib import Path

import pytest

from art_cli.config.schema import JudgeModelConfig
from art_cli.judges.providers import CallFailed
from art_cli.judges.providers.http import HttpProvider
from art_cli.runtime.errors import UsageError
from art_cli.runtime.secrets import Secrets, load_environment
from tests.support.judges.judge_server import JudgeServer

NAMES = ("ART_A", "ART_B", "ART_C", "ART_D", "ART_E", "ART_F")


@pytest.fixture(autouse=True)
def own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of these tests are unset before and after, and the working directory is empty."""
    monkeypatch.chdir(tmp_path)
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_values_of_a_dotenv_file_are_taken_as_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in them is expanded or run, and a variable of the environment wins."""
    monkeypatch.setenv("ART_B", "from the environment")
    (tmp_path / ".env").write_text(
        "\ufeffART_A=sk-${HOME}-$(touch ran)  # the key\nexport ART_B='from the file'\n# ART_C=no\nART_C\n"
        "ART_D='single ${ART_B}'\nART_E = \"double # kept\"\nART_F=\n"
    )
    load_environment(tmp_path)
    assert {name: os.environ.get(name) for name in NAMES} == {
        "ART_A": "sk-${HOME}-$(touch ran)",
        "ART_B": "from the environment",
        "ART_C": None,
        "ART_D": "single ${ART_B}",
        "ART_E": "double # kept",
        "ART_F": "",
    }
    assert not (tmp_path / "ran").exists()


def test_the_working_directorys_file_wins_over_the_configurations(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / ".env").write_text("ART_A=here\n")
    (tmp_path / "configs/.env").write_text("ART_A=there\nART_B=there\n")
    load_environment(tmp_path / "configs")
    assert (os.environ["ART_A"], os.environ["ART_B"]) == ("here", "there")


@pytest.mark.parametrize("content", [b"ART_A=\xff\xfe\n", b"ART_A=a\0b\n"])
def test_a_dotenv_file_that_cannot_be_used_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".env").write_bytes(content)
    with pytest.raises(UsageError, match=r"\.env: ") as refused:
        load_environment(tmp_path)
    assert "\n" not in str(refused.value)


async def asked(credentials: str) -> str:
    """The head of the request that a provider sends to an address with these credentials."""
    heads: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append((await reader.readuntil(b"\r\n\r\n")).decode().lower())
        writer.write(b"HTTP/1.1 400 X\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        address = f"http://{credentials}127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        provider = HttpProvider(JudgeModelConfig(model="m", api_base=address, api_key_env="ART_A"), Secrets([]))
        with pytest.raises(CallFailed, match="answered 400"):
            await provider.ask([], None, timeout_s=5)
        await provider.close()
    return heads[0]


@pytest.mark.parametrize("status", ["200 OK", "502 Bad Gateway"])
async def test_a_page_in_place_of_an_answer_names_the_key_of_the_address(status: str) -> None:
    """As a proxy answers that asks for a login."""
    page = b"<html><title>Please log in</title></html>"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(page)}\r\nConnection: close\r\n\r\n".encode() + page)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        provider = HttpProvider(JudgeModelConfig(model="m", api_base=address), Secrets([]))
        with pytest.raises(CallFailed, match=f"m at {address} answered {status[:3]}.*Please log in.*judge.base_url"):
            await provider.ask([], None, timeout_s=5)
        await provider.close()


async def test_a_judge_that_redirects_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither with the key nor without it: the other address may be one that only this machine reaches."""
    monkeypatch.setenv("ART_A", "sk-1")
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        there = f"http://127.0.0.1:{target.sockets[0].getsockname()[1]}/latest/meta-data"
        writer.write(f"HTTP/1.1 307 X\r\nLocation: {there}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
        writer.close()

    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(b"followed")
        writer.close()

    async with (
        await asyncio.start_server(never, "127.0.0.1", 0) as target,
        await asyncio.start_server(serve, "127.0.0.1", 0) as server,
    ):
        address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        provider = HttpProvider(JudgeModelConfig(model="m", api_base=address, api_key_env="ART_A"), Secrets([]))
        with pytest.raises(CallFailed, match="307"):
            await provider.ask([], None, timeout_s=5)
        await provider.close()
    assert len(asked) == 1 and b"followed" not in asked


async def test_a_password_in_the_address_takes_the_place_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ART_A", "sk-1")
    assert "\r\nauthorization: bearer sk-1\r\n" in await asked("")
    word = base64.b64encode(b"me:secret").decode().lower()
    assert f"\r\nauthorization: basic {word}\r\n" in await asked("me:secret@")


async def test_a_key_that_no_header_can_hold_stops_the_judge_and_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    key = "sk-canary-0011\nX-Other: 1"
    monkeypatch.setenv("ART_A", key)
    async with JudgeServer() as server:
        member = JudgeModelConfig(model="m", api_base=server.api_base, api_key_env="ART_A")
        provider = HttpProvider(member, Secrets([key]))
        with pytest.raises(CallFailed) as failed:
            await provider.ask([], None, timeout_s=5)
        await provider.close()
    assert failed.value.kind == "stopped" and "canary" not in str(failed.value)
