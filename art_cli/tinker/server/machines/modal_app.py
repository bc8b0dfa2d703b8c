"""An app for Modal: one container that starts when it is called and ends when nobody calls it for a while."""

from art_cli.tinker.server.machines import LOAD_S, NAME, Server, mount_of

IDLE_S = 1200  # longest time without a request; a connected client sends a heartbeat every ten seconds


def write(server: Server) -> str:
    """Raises UsageError: the checkpoints are not at an absolute path."""
    mount = mount_of(server)
    command = server.command(checkpoints=mount, config="/tmp/art-backend.yaml", keys="/tmp/art-backend-keys")
    words = "\n".join(f"    {_quoted(word)}," for word in command)
    image = (
        'modal.Image.from_dockerfile("Dockerfile")'
        if server.image is None
        else f"modal.Image.from_registry({_quoted(server.image)})"
    )
    steps = ""
    if server.config is not None:
        steps += f'    Path("/tmp/art-backend.yaml").write_text({_quoted(server.config)})\n'
    if server.key_file is not None:
        steps += (
            '    file = os.open("/tmp/art-backend-keys", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)\n'
            '    os.write(file, os.environ.pop("ART_API_KEYS").encode())\n'
            "    os.close(file)\n"
        )
    imports = [*(["import os"] if server.key_file is not None else []), "import subprocess"]
    imports += ["from pathlib import Path"] if server.config is not None else []
    source = 'ART_API_KEYS="$(cat KEY_FILE)"' if server.key_file is not None else 'ART_API_KEY="$ART_API_KEY"'
    gpu = f"{server.gpu.name}:{server.gpu.number}" if server.gpu.number > 1 else server.gpu.name
    lines = "\n".join(imports)
    return f"""# modal secret create {NAME} {source}
# modal deploy THIS_FILE
{lines}

import modal

COMMAND = [
{words}
]

app = modal.App("{NAME}")


@app.function(
    image={image}.entrypoint([]).env({{"HF_HOME": {_quoted(mount + "/huggingface")}}}),
    gpu="{gpu}",
    volumes={{{_quoted(mount)}: modal.Volume.from_name("{NAME}", create_if_missing=True)}},
    secrets=[modal.Secret.from_name("{NAME}", required_keys=["{server.secret}"])],
    max_containers=1,  # the adapters in training are in its memory
    scaledown_window={IDLE_S},
    startup_timeout={LOAD_S},
    timeout=86400,
)
@modal.concurrent(max_inputs=1000)
@modal.web_server({server.port}, startup_timeout={LOAD_S})
def serve():
{steps}    subprocess.Popen(COMMAND)
"""


def _quoted(text: str) -> str:
    """The text as a literal of Python, in double quotes where that takes no escapes."""
    return f'"{text}"' if text.isascii() and text.isprintable() and not set(text) & set('"\\') else repr(text)
