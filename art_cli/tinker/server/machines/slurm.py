"""A batch script for Slurm. The directory of the checkpoints is one that all nodes see.

Slurm signals the script two minutes before its time is over. The script stops the server and queues itself again.
"""

import shlex

from art_cli.runtime.errors import UsageError
from art_cli.tinker.server.machines import NAME, Server

DIRECTORY = "backend"
NOTICE_S = 120  # time between Slurm's signal and the end of the job


def write(server: Server) -> str:
    """Raises UsageError: an image, checkpoints in a bucket, or a server that needs more time to stop than it gets."""
    if server.image is not None:
        raise UsageError("--image: a Slurm job runs the `art` of the shell that submits it")
    if "://" in (server.checkpoints or ""):
        raise UsageError(f"--checkpoints {server.checkpoints}: a directory that the nodes of the cluster see")
    if server.drain_s > NOTICE_S - 30:
        raise UsageError(
            f"--drain {server.drain_s:g}: Slurm stops the job {NOTICE_S} s after its signal, so at most 90"
        )
    command = shlex.join(server.command(checkpoints=server.checkpoints or DIRECTORY, keys=server.key_file))
    check = "" if server.key_file is not None else f': "${{{server.secret}:?the key that clients send}}"\n'
    return f"""#!/bin/bash
# sbatch THIS_FILE
#SBATCH --job-name={NAME}
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=8
#SBATCH --gpus={server.gpu.name.lower()}:{server.gpu.number}
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@{NOTICE_S}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={NAME}.log
set -uo pipefail
{check}echo "TINKER_BASE_URL=http://$(hostname --fqdn):{server.port}"
is_over=0
trap 'kill -TERM "$(jobs -p)"' TERM INT
trap 'is_over=1; kill -TERM "$(jobs -p)"' USR1
{command} &
server=$!
while kill -0 "$server" 2>/dev/null; do
    wait "$server" || true  # a signal ends this wait and not the server
done
wait "$server" && code=0 || code=$?
if [ "$is_over" = 1 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""
