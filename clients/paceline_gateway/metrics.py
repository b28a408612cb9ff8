"""What the gateway counts."""

from paceline.process.metrics import Definition, Kind

_LATENCIES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

ANSWERS = Definition(
    "gateway_answers_total", Kind.COUNTER, "answers by status; 499: the client was gone first", ("endpoint", "status")
)
SECONDS = Definition(
    "gateway_request_seconds",
    Kind.HISTOGRAM,
    "from a request's header to the end of its answer",
    ("endpoint",),
    _LATENCIES,
)
CONNECTIONS = Definition("gateway_connections", Kind.GAUGE, "open connections")
REQUESTS = Definition("gateway_requests_running", Kind.GAUGE, "requests that have no whole answer yet")
CLIENTS = Definition("gateway_clients", Kind.GAUGE, "keys that have a connection to the scheduler")

COUNTED = (ANSWERS, SECONDS)
READ = (CONNECTIONS, REQUESTS, CLIENTS)
