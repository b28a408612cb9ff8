# The scheduler, and the `paceline` command for whoever calls it. From the root of the repository:
#   docker build -f helm/images/scheduler.Dockerfile -t paceline-scheduler:0.1.0 .
ARG PYTHON=3.13
FROM python:${PYTHON}-slim-bookworm AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY protos protos
COPY clients clients
COPY kernels kernels
COPY executor executor
COPY scheduler scheduler
RUN python -m venv /opt/paceline \
 && /opt/paceline/bin/pip install --no-cache-dir ./protos ./clients '.[cli,scheduler,tracing]'

FROM python:${PYTHON}-slim-bookworm
COPY --from=build /opt/paceline /opt/paceline
# The root file system may be read-only. What is written goes to these two folders, which are volumes then.
ENV PATH=/opt/paceline/bin:/usr/local/bin:/usr/bin:/bin \
    PACELINE_CACHE_DIR=/var/cache/paceline \
    HOME=/tmp
WORKDIR /tmp
USER 10001:10001
EXPOSE 50051 50052 50053 9464
HEALTHCHECK --start-period=60s CMD ["/opt/paceline/bin/python", "-c", "import grpc; from grpc_health.v1 import health_pb2 as m, health_pb2_grpc as g; assert g.HealthStub(grpc.insecure_channel('localhost:50053')).Check(m.HealthCheckRequest(service=''), timeout=3).status == 1"]
# The program is process 1, and follows SIGTERM itself.
ENTRYPOINT ["/opt/paceline/bin/paceline-scheduler"]
CMD ["--help"]
