# art with what it needs to train and to serve: with vLLM for an NVIDIA GPU, or without it for a CPU.
#
#   docker build -t art .                             # --build-arg DEVICE=cpu for a machine without a GPU
#   docker run --gpus all -p 8100:8100 -e ART_API_KEY -v art-checkpoints:/checkpoints art \
#       backend --base Qwen/Qwen3-8B --host 0.0.0.0 --checkpoints /checkpoints
FROM python:3.11-slim-bookworm

# Triton, which vLLM and torch compile their kernels with, calls a C compiler when a model is loaded.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home art \
    && install --directory --owner art --group art /checkpoints

WORKDIR /opt/art
COPY pyproject.toml constraints.txt constraints-gpu.txt README.md LICENSE ./
COPY art_cli art_cli
COPY configs configs
COPY docs docs
COPY examples examples
COPY recipes recipes

# vLLM takes older transformers than constraints.txt has, so that a GPU has a file of its own.
ARG DEVICE=gpu
# hadolint ignore=DL3013
RUN case "$DEVICE" in \
        gpu) pip install --no-cache-dir --constraint constraints-gpu.txt \
                 '.[train,vllm,tinker,quantize]' vllm-bnb-plugin ;; \
        cpu) pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
                 --constraint constraints.txt '.[train,tinker]' ;; \
        *) echo "DEVICE=$DEVICE: gpu or cpu" >&2; exit 1 ;; \
    esac

USER 1000
WORKDIR /home/art
ENV HF_HOME=/checkpoints/huggingface PYTHONUNBUFFERED=1 ART_HEALTH=http://127.0.0.1:8100/health
EXPOSE 8100
VOLUME /checkpoints

# A base model may take long to download. For `art serve`, which listens on port 8000, set ART_HEALTH.
HEALTHCHECK --interval=30s --timeout=5s --start-period=1h \
    CMD ["python", "-c", "import os, urllib.request as url; url.urlopen(os.environ['ART_HEALTH'], timeout=4)"]

ENTRYPOINT ["art"]
CMD ["--help"]
