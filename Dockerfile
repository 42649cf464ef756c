# docker build -t cookbook .                 # torch for the CPU
# docker build -t cookbook --target cuda .   # torch with CUDA; the host needs NVIDIA's driver and its container toolkit
# docker run --rm --user "$(id -u):$(id -g)" --volume "$PWD:/work" cookbook train recipe=grpo
ARG PYTHON=python:3.11-slim

FROM ${PYTHON} AS base
# hadolint takes TOKENIZERS_PARALLELISM for a token.
# hadolint ignore=DL3064
ENV PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
COPY . /src
WORKDIR /src

FROM base AS cuda
# Triton compiles its launchers with a C compiler.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN python3 -m pip install --constraint constraints.txt torch \
    && python3 -m pip install --constraint constraints.txt '/src[server,tinker,wandb,tensorboard,lowbit]'
# Runs, caches and the user's files lie in the folder that is mounted here, whoever the user is.
WORKDIR /work
ENV HOME=/work
USER 1000:1000
ENTRYPOINT ["cookbook"]
CMD ["--help"]

FROM base AS cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN python3 -m pip install --constraint constraints.txt --extra-index-url "${TORCH_INDEX}" torch \
    && python3 -m pip install --constraint constraints.txt '/src[server,tinker,wandb,tensorboard]'
WORKDIR /work
ENV HOME=/work
USER 1000:1000
ENTRYPOINT ["cookbook"]
CMD ["--help"]
