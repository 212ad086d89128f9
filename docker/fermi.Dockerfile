# Image for a machine with a card: `make docker-fermi`, then `docker/fermi-run.sh [MODEL DIRECTORY]`.
# The same as the CPU image: the kernels are text that the driver compiles, and the driver's libraries must be those of
# the host's kernel module, so docker/fermi-run.sh binds them. Nothing of CUDA is in the image, nor a container runtime
# of NVIDIA's needed (theirs asks for cards newer than Fermi).
FROM debian:12-slim AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN /source/docker/cpu-install.sh /opt/fermion

FROM debian:12-slim
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 990 --create-home --home-dir /var/lib/fermion fermion
COPY --from=build /opt/fermion /opt/fermion
USER 990
# The driver keeps compiled kernels in the home directory: a volume there saves a minute at each start.
VOLUME /var/lib/fermion
ENV PATH=/opt/fermion/bin:$PATH \
    LD_LIBRARY_PATH=/driver \
    FERMION_HOST=0.0.0.0 \
    FERMION_DEVICE=gpu \
    PYTHONUNBUFFERED=1
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=300s CMD ["python3", "-c", \
    "import os, urllib.request as r; r.urlopen(f\"http://127.0.0.1:{os.environ.get('FERMION_PORT') or 8000}/health\")"]
ENTRYPOINT ["fermion"]
CMD ["serve"]
