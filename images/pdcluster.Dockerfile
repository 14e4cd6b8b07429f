# Router and operator: docker build -f images/pdcluster.Dockerfile -t localhost/pdcluster/pdcluster:0.1.0 .
# BASE: any image with Python 3.11 or later and its venv module; pin it by digest for a release.
ARG BASE=python:3.12-slim

FROM ${BASE} AS build
COPY . /src
RUN /src/images/wheel.sh && /src/images/pdcluster.sh

FROM ${BASE}
# Hard-coded in scripts of the environment, so it is the same folder in both stages.
COPY --from=build /opt/pdcluster /opt/pdcluster
ENV PATH=/opt/pdcluster/bin:${PATH} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# A number, so that Kubernetes can see that it is not root.
USER 10001:10001
WORKDIR /tmp
ENTRYPOINT ["pdcluster"]
