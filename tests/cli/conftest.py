"""What the tests of several commands share."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from paceline_cli.__main__ import main

MODELS = {"data": [{"id": "small", "max_model_len": 512}, {"id": "large"}]}


class OpenAIServer:
    """An OpenAI-compatible server that answers every completion with the same messages, or with a status."""

    def __init__(
        self, *messages, status=200, models=MODELS, models_status=200, closes=False, content_type="text/event-stream"
    ):
        self.messages = messages
        self.status = status
        self.models = models
        self.models_status = models_status
        self.closes = closes
        self.content_type = content_type
        self.bodies = []
        self.headers = []
        self.connections = set()

    def __enter__(self):
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                """Nobody reads it."""

            def do_GET(self):
                server.headers.append(dict(self.headers))
                self.answer(server.models_status, "application/json", json.dumps(server.models).encode())

            def do_POST(self):
                assert self.path == "/v1/completions"
                server.connections.add(self.client_address)
                server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                if server.status != 200:
                    said = {"error": {"message": "said by the server"}}
                    self.answer(server.status, "application/json", json.dumps(said).encode())
                else:
                    self.stream()

            def answer(self, status, content_type, body):
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def stream(self):
                self.send_response(200)
                self.send_header("Content-Type", server.content_type)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                for message in server.messages:
                    text = message if isinstance(message, str) else f"data: {json.dumps(message)}\n\n"
                    self.wfile.write(f"{len(text.encode()):x}\r\n{text}\r\n".encode())
                if server.closes:
                    self.close_connection = True
                else:
                    self.wfile.write(b"0\r\n\r\n")

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def base_url(self):
        """What a user passes as --base-url."""
        return f"http://127.0.0.1:{self._server.server_port}/v1"


@pytest.fixture
def run_main(monkeypatch):
    """Do what the program does, in this process; returns its exit code."""

    def run_main(*arguments):
        monkeypatch.setenv("GRPC_VERBOSITY", "NONE")  # it would set that for good
        monkeypatch.setattr("sys.argv", ["paceline", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code

    return run_main


@pytest.fixture
def openai_server():
    with contextlib.ExitStack() as servers:
        yield lambda *messages, **options: servers.enter_context(OpenAIServer(*messages, **options))
