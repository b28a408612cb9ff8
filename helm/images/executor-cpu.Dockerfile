# The executor for CPUs. From the root of the repository:
#   docker build -f helm/images/executor-cpu.Dockerfile -t paceline-executor-cpu:0.1.0 .
ARG PYTHON=3.13
FROM python:${PYTHON}-slim-bookworm AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY protos protos
COPY clients clients
COPY kernels kernels
COPY executor executor
COPY scheduler scheduler
# PyPI's torch brings gigabytes of CUDA libraries; pip prefers the `+cpu` builds of this index.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN python -m venv /opt/paceline \
 && /opt/paceline/bin/pip install --no-cache-dir --extra-index-url "${TORCH_INDEX}" ./protos ./clients '.[executor]'

FROM python:${PYTHON}-slim-bookworm
COPY --from=build /opt/paceline /opt/paceline
# The root file system may be read-only. What is written goes to these two folders, which are volumes then: fetched
# models, kernels as they are compiled for this machine's processor, and what is short-lived.
ENV PATH=/opt/paceline/bin:/usr/local/bin:/usr/bin:/bin \
    PACELINE_CACHE_DIR=/var/cache/paceline \
    HF_HOME=/var/cache/paceline/huggingface \
    NUMBA_CACHE_DIR=/var/cache/paceline/kernels \
    HOME=/tmp
WORKDIR /tmp
USER 10001:10001
EXPOSE 50061 50063 9465
HEALTHCHECK --start-period=900s CMD ["/opt/paceline/bin/python", "-c", "import grpc; from grpc_health.v1 import health_pb2 as m, health_pb2_grpc as g; assert g.HealthStub(grpc.insecure_channel('localhost:50063')).Check(m.HealthCheckRequest(service='paceline.v1.ExecutorService'), timeout=3).status == 1"]
# The program is process 1, and follows SIGTERM itself.
ENTRYPOINT ["/opt/paceline/bin/paceline-executor"]
CMD ["--help"]
