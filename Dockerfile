# Two images of Parity: `gpu` (default) on SGLang's own image, or on vLLM's, and `cpu` on plain Python.
#
#   docker build -t parity .                                   # --build-arg ENGINE=vllm for rollout=vllm
#   mkdir -p outputs cache
#   docker run --rm --gpus all --ipc=host --user "$(id -u):$(id -g)" \
#     -v "$PWD/outputs:/app/outputs" -v "$PWD/cache:/cache" parity train <recipe> [key=value ...]
#
#   docker build --target cpu -t parity:cpu .
#   docker run --rm --shm-size=2g --user "$(id -u):$(id -g)" \
#     -v "$PWD/outputs:/app/outputs" -v "$PWD/cache:/cache" parity:cpu train arithmetic_grpo
#
# The two directories must be there before: Docker would make them for root. A run writes as the user that is named, to
# outputs; models and compiled kernels stay in cache, or the first start of SGLang takes minutes every time.
# The GPU image has CUDA 13, which needs NVIDIA's driver 580 or later.
#
# NOT YET BUILT: no image has been built or run, because there was no Docker engine at hand. For the same reason the
# base images are named by tag: pin them by digest (image@sha256:...) when you build, for a tag can move.
# Secrets belong into the environment at run time (`docker run -e WANDB_API_KEY`), never into a layer.

ARG ENGINE=sglang

# ---- cpu: the pinned environment of `make demo` ---------------------------------------------------------------------
FROM python:3.11-slim AS cpu

ENV PATH=/app/.venv/bin:$PATH PYTHONUNBUFFERED=1 HOME=/app/home USER=parity \
    PARITY_CACHE=/cache HF_HOME=/cache/huggingface
WORKDIR /app

COPY . .
RUN --mount=type=cache,target=/tmp/uv \
    UV_CACHE_DIR=/tmp/uv UV_LINK_MODE=copy UV_TORCH_BACKEND=cpu requirements/install.sh sglang-cpu \
    && install -d -m 1777 outputs home /cache
USER 10001
RUN parity --version

ENTRYPOINT ["parity"]
CMD ["--help"]

# ---- gpu: the image of the engine brings Python, CUDA, torch and the engine -----------------------------------------
FROM lmsysorg/sglang:v0.5.23-cu130 AS on-sglang
FROM vllm/vllm-openai:v0.33.0 AS on-vllm

FROM on-${ENGINE} AS gpu
ARG ENGINE

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_BREAK_SYSTEM_PACKAGES=1 PYTHONUNBUFFERED=1 \
    HOME=/app/home USER=parity PARITY_CACHE=/cache HF_HOME=/cache/huggingface SGLANG_CACHE_DIR=/cache/sglang \
    VLLM_CACHE_ROOT=/cache/vllm \
    TRITON_CACHE_DIR=/cache/triton FLASHINFER_WORKSPACE_BASE=/cache TORCHINDUCTOR_CACHE_DIR=/cache/inductor
WORKDIR /app

# What the engine's image lacks. Every version that it already holds is a constraint: the build stops rather than
# exchange the torch, CUDA or transformers that the engine was built with.
COPY requirements/image.txt requirements/
# `pip list` and not `pip freeze`: that writes packages of the image's own build as files, which bind nothing.
RUN python3 -m pip list --format=freeze --exclude-editable > /tmp/image.txt \
    && python3 -m pip install --constraint /tmp/image.txt --requirement requirements/image.txt \
    && rm /tmp/image.txt

COPY . .
RUN python3 -m pip install --no-deps --editable . \
    && install -d -m 1777 outputs home /cache
USER 10001
RUN python3 -c "import torch, ${ENGINE}, ray, algorithms, rollout, trainer; assert torch.version.cuda" && parity --version

ENTRYPOINT ["parity"]
CMD ["--help"]
