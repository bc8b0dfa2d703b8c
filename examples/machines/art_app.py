# modal secret create art-backend ART_API_KEY="$ART_API_KEY"
# modal deploy art_app.py
import subprocess

import modal

COMMAND = [
    "art",
    "backend",
    "--base",
    "Qwen/Qwen3-8B",
    "--host",
    "0.0.0.0",
    "--port",
    "8100",
    "--checkpoints",
    "/checkpoints",
]

app = modal.App("art-backend")


@app.function(
    image=modal.Image.from_dockerfile("Dockerfile").entrypoint([]).env({"HF_HOME": "/checkpoints/huggingface"}),
    gpu="H100",
    volumes={"/checkpoints": modal.Volume.from_name("art-backend", create_if_missing=True)},
    secrets=[modal.Secret.from_name("art-backend", required_keys=["ART_API_KEY"])],
    max_containers=1,  # the adapters in training are in its memory
    scaledown_window=1200,
    startup_timeout=3600,
    timeout=86400,
)
@modal.concurrent(max_inputs=1000)
@modal.web_server(8100, startup_timeout=3600)
def serve():
    subprocess.Popen(COMMAND)
