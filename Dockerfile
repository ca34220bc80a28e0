# Two images of Parity: `gpu` (default) on SGLang's own image, `cpu` on plain Python.
#
#   docker build -t parity .
#   docker run --rm --gpus all --ipc=host -v "$PWD/outputs:/app/outputs" parity train <recipe> [key=value ...]
#
#   docker build --target cpu -t parity:cpu .
#   docker run --rm --shm-size=2g -v "$PWD/outputs:/app/outputs" parity:cpu train arithmetic_grpo
#
# NOT YET BUILT: neither image has been built or run, because there was no Docker engine at hand. For the same reason
# both base images are named by tag: pin them by digest (image@sha256:...) when you build, for a tag can move.
# Secrets belong into the environment at run time (`docker run -e WANDB_API_KEY`), never into a layer.

# ---- cpu: the pinned environment of `make demo` ---------------------------------------------------------------------
FROM python:3.11-slim AS cpu

ENV PATH=/app/.venv/bin:$PATH PYTHONUNBUFFERED=1
WORKDIR /app

COPY . .
RUN --mount=type=cache,target=/tmp/uv \
    UV_CACHE_DIR=/tmp/uv UV_LINK_MODE=copy UV_TORCH_BACKEND=cpu requirements/install.sh sglang-cpu \
    && useradd --create-home --uid 10001 parity \
    && install -d -o parity outputs
USER parity
RUN parity --version

ENTRYPOINT ["parity"]
CMD ["--help"]

# ---- gpu: SGLang's image brings Python, CUDA, torch and SGLang ------------------------------------------------------
FROM lmsysorg/sglang:v0.5.23-cu130 AS gpu

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_BREAK_SYSTEM_PACKAGES=1 PYTHONUNBUFFERED=1
WORKDIR /app

# What SGLang's image lacks. Every version that it already holds is a constraint: the build stops rather than
# exchange the torch, CUDA or transformers that SGLang was built with.
COPY requirements/gpu.txt requirements/
RUN python3 -m pip freeze --exclude-editable | grep '==' > /tmp/image.txt \
    && python3 -m pip install --constraint /tmp/image.txt --requirement requirements/gpu.txt \
    && rm /tmp/image.txt

COPY . .
RUN python3 -m pip install --no-deps --no-build-isolation --editable . \
    && useradd --create-home --uid 10001 parity \
    && install -d -o parity outputs
USER parity
RUN python3 -c "import torch, sglang, ray, algorithms, rollout, trainer; assert torch.version.cuda" && parity --version

ENTRYPOINT ["parity"]
CMD ["--help"]
