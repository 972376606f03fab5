# dlio in a container, from a checkout:
#
#   docker build -t dlio .
#   docker run --rm --shm-size=16g --user "$(id -u)" -v /data:/data:ro dlio ls /data/train
#
# torch is the build for CPUs. For a CUDA build give the index of its version, for example
# --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130
ARG BASE=docker.io/library/debian:bookworm-slim

FROM ${BASE} AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates gcc libc6-dev python3-venv \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY constraints.txt ./
RUN python3 -m venv /opt/dlio \
 && /opt/dlio/bin/pip install --no-cache-dir --no-deps --index-url "${TORCH_INDEX}" torch -c constraints.txt
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY dlio dlio
COPY readers readers
COPY staging staging
COPY bench bench
RUN DLIO_BUILD_NATIVE=1 /opt/dlio/bin/pip install --no-cache-dir '.[mpi,s3,search]' -c constraints.txt

FROM ${BASE}
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates openssh-client python3 \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home dlio
COPY --from=build /opt/dlio /opt/dlio
ENV PATH=/opt/dlio/bin:/usr/local/bin:/usr/bin:/bin
USER dlio
WORKDIR /home/dlio
ENTRYPOINT ["dlio"]
CMD ["--help"]
