# OpenAI's HTTP API, as a client of a scheduler. From the root of the repository:
#   docker build -f helm/images/gateway.Dockerfile -t paceline-gateway:0.1.0 .
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
 && /opt/paceline/bin/pip install --no-cache-dir ./protos ./clients '.[gateway]'

FROM python:${PYTHON}-slim-bookworm
COPY --from=build /opt/paceline /opt/paceline
ENV PATH=/opt/paceline/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/tmp
WORKDIR /tmp
USER 10001:10001
EXPOSE 8000 9466
# Of a port, since HTTPS is by whatever name its certificate has.
HEALTHCHECK --start-period=60s CMD ["/opt/paceline/bin/python", "-c", "import socket; socket.create_connection(('localhost', 8000), timeout=3).close()"]
# The program is process 1, and follows SIGTERM itself.
ENTRYPOINT ["/opt/paceline/bin/paceline-gateway"]
CMD ["--help"]
