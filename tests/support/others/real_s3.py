"""A real S3 server on this machine (moto), and the client of S3 (s3fs) for processes of this Python.

`make setup-s3` makes .venv-s3: moto with its many packages, and in .venv-s3/sdk the client, whose botocore is another
than this Python's. ART_S3_PYTHON names another such environment's Python. Without either, tests that need it are
skipped.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT

ENVIRONMENT = ROOT / ".venv-s3"
IS_THERE = "ART_S3_PYTHON" in os.environ or (ENVIRONMENT / ".ready").exists()
PYTHON = Path(os.environ.get("ART_S3_PYTHON") or ENVIRONMENT / "bin" / "python").absolute()
SDK = PYTHON.parent.parent / "sdk"
MARKS = [
    pytest.mark.s3,
    pytest.mark.skipif(not IS_THERE, reason="no .venv-s3 and no ART_S3_PYTHON: make test-s3"),
]
SERVER = """
import sys
import boto3
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
port = server.get_host_and_port()[1]
boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", aws_access_key_id="a", aws_secret_access_key="b",
             region_name="us-east-1").create_bucket(Bucket="bucket")
print(port, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """The URL of a server with the bucket `bucket`, which ends with the block."""
    with subprocess.Popen(
        [PYTHON, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.stdin.close()
            process.wait(timeout=30)


def environment(url: str) -> dict[str, str]:
    """What a process needs to speak with the server."""
    return {
        **os.environ, "AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "AKIATEST", "AWS_SECRET_ACCESS_KEY": "secretword",
        "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true", "PYTHONPATH": f"{SDK}:{ROOT}",
    }  # fmt: skip


def answer(url: str, *words: str) -> Any:
    """The JSON that tests.support.others.s3_child prints."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.others.s3_child", *words],
        env=environment(url), capture_output=True, text=True, timeout=120, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
