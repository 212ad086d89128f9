# CPU image: `make docker`, then `docker run --rm -p 8000:8000 fermion:cpu`.
# Both stages use the same base, so the environment made in the first works in the second. x86-64 with SSSE3 or later.
FROM debian:12-slim AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN /source/docker/cpu-install.sh /opt/fermion

FROM debian:12-slim
# libgomp and the like are not needed: the kernels bring their own threads.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 990 --create-home --home-dir /var/lib/fermion fermion
COPY --from=build /opt/fermion /opt/fermion
USER 990
ENV PATH=/opt/fermion/bin:$PATH \
    FERMION_HOST=0.0.0.0 \
    PYTHONUNBUFFERED=1
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s CMD ["python3", "-c", \
    "import os, urllib.request as r; r.urlopen(f\"http://127.0.0.1:{os.environ.get('FERMION_PORT') or 8000}/health\")"]
ENTRYPOINT ["fermion"]
CMD ["serve"]
