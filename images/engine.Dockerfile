# An engine: vLLM for a device, and the connector on top.
#   docker build -f images/engine.Dockerfile --build-arg BASE=vllm/vllm-openai:v0.32.0 \
#     --build-arg TRANSFER=mooncake-transfer-engine-cuda13==0.3.14 -t localhost/pdcluster/engine-cuda:0.1.0 .
# BASE has no default: it goes with the device, and only you know which. PYTHON: where the wheel is made.
ARG PYTHON=python:3.12-slim
ARG BASE

FROM ${PYTHON} AS build
COPY . /src
RUN /src/images/wheel.sh

FROM ${BASE}
ARG TRANSFER=""
COPY --from=build /wheels /wheels
COPY images/engine.sh images/engine_checks.py /wheels/
# Images of vLLM run as root, or as somebody who may not install.
USER 0:0
RUN /wheels/engine.sh
# The operator runs engines as this user in any case, with a folder of its own for what they write.
USER 10001:10001
WORKDIR /tmp
