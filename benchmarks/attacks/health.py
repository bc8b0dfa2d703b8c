"""Asks /health of servers on this machine until standard input closes; prints the seconds of each answer, by port.

    python -m benchmarks.attacks.health 8000 8001      # {"8000": [0.0011, ...], "8001": [...]}

A process of its own and no library, so that neither the attacker's work nor its interpreter is measured. Its first line
says that it has had an answer from each.
"""

import asyncio
import json
import sys
import time

EVERY_S = 0.02
QUESTION = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def ask(port: int, took_s: list[float]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while True:
        begin = time.perf_counter()
        writer.write(QUESTION)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        await reader.readexactly(length)
        took_s.append(time.perf_counter() - begin)
        await asyncio.sleep(EVERY_S)


async def main(ports: list[int]) -> None:
    took_s: dict[int, list[float]] = {port: [] for port in ports}
    tasks = [asyncio.create_task(ask(port, took)) for port, took in took_s.items()]
    while not all(took_s.values()):
        for task in tasks:
            if task.done():
                task.result()  # raises what ended it
        await asyncio.sleep(EVERY_S)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for task in tasks:
        task.cancel()
    print(json.dumps(took_s), flush=True)


if __name__ == "__main__":
    asyncio.run(main([int(port) for port in sys.argv[1:]]))
