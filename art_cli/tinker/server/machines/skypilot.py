"""A managed job of SkyPilot: it finds a machine with the GPU, and another one when that is taken away.

Checkpoints are written to a bucket, so that the server on the next machine has them.
"""

import re
import shlex

from art_cli.runtime.errors import UsageError
from art_cli.tinker.server.machines import MOUNT, NAME, Server, dump

BUCKET = re.compile(r"(s3|gs|r2|oci|nebius)://[a-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*/?", re.ASCII)
CONFIG = "~/art-backend.yaml"
KEYS = "~/.art-backend-keys"


def write(server: Server) -> str:
    """Raises UsageError: checkpoints are not in a bucket."""
    if server.checkpoints is None or not BUCKET.fullmatch(server.checkpoints):
        raise UsageError("--checkpoints: a managed job recovers from a bucket: --checkpoints s3://BUCKET/DIRECTORY")
    resources: dict[str, object] = {
        "accelerators": f"{server.gpu.name}:{server.gpu.number}",
        "ports": [server.port],
        "use_spot": True,
        "job_recovery": {"strategy": "EAGER_NEXT_REGION", "max_restarts_on_errors": 3},
    }
    task: dict[str, object] = {"name": NAME, "resources": resources}
    if server.image is not None:
        resources["image_id"] = f"docker:{server.image}"
    else:
        task["workdir"] = "."
        task["setup"] = "python3 -m venv ~/art\n~/art/bin/pip install '.[train,vllm]'\n"
    task["secrets"] = {server.secret: None}
    task["file_mounts"] = {MOUNT: {"source": server.checkpoints, "mode": "MOUNT_CACHED"}}
    task["run"] = _script(server)
    head = (
        f"# sky jobs launch --secret {server.secret} THIS_FILE\n"
        "# MOUNT_CACHED writes to the machine's disk first and to the bucket some seconds later.\n"
    )
    return head + dump(task)


def _script(server: Server) -> str:
    """What runs on the machine, in bash."""
    lines = ["set -euo pipefail"]
    if server.image is None:
        lines.append('export PATH="$HOME/art/bin:$PATH"')
    if server.key_file is not None:
        lines.append(f"(umask 077; printf '%s\\n' \"${server.secret}\" > {KEYS}); unset {server.secret}")
    if server.config is not None:
        lines.append(f"printf '%s' {shlex.quote(server.config)} > {CONFIG}")
    command = server.command(checkpoints=MOUNT, config="CONFIG", keys="KEYS")
    places = {"CONFIG": CONFIG, "KEYS": KEYS}
    quoted = " ".join(places.get(word) or shlex.quote(word) for word in command)
    return "\n".join([*lines, f"exec {quoted}", ""])
