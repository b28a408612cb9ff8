"""The metrics of a scheduler by name, as OPERATING.md documents them. Values only.

Names and buckets are vLLM's where the meaning is the same; between tokens there are more of them below 10 ms.
"""

from paceline.process.metrics import Definition, Kind

_MODEL = ("model_name",)
_EXECUTOR = ("executor",)
FIRST_TOKEN_BOUNDS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1),
    *(0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
BETWEEN_TOKENS_BOUNDS_S = (
    *(0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.025, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BOUNDS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_BOUNDS_S = (0.0001, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5)
PLANNING_BOUNDS_S = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05)
_TOKEN_BOUNDS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_STEP_TOKEN_BOUNDS = (1.0, *(float(1 << power) for power in range(3, 15)))
_PAUSE_BOUNDS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


def _gauge(name: str, meaning: str, *labels: str) -> Definition:
    return Definition(name, Kind.GAUGE, meaning, labels)


def _counter(name: str, meaning: str, *labels: str) -> Definition:
    return Definition(name, Kind.COUNTER, meaning, labels)


def _histogram(name: str, meaning: str, labels: tuple[str, ...], bounds: tuple[float, ...]) -> Definition:
    return Definition(name, Kind.HISTOGRAM, meaning, labels, bounds)


COUNTED = (
    _counter("prompt_tokens_total", "Prompt tokens of placed requests.", *_MODEL),
    _counter("prompt_tokens_cached_total", "Prompt tokens that the prefix cache gave at the first placement.", *_MODEL),
    _counter("generation_tokens_total", "Generated tokens.", *_MODEL),
    _counter("prefix_cache_queries_total", "Tokens looked up in the prefix cache.", *_MODEL),
    _counter("prefix_cache_hits_total", "Tokens found in the prefix cache.", *_MODEL),
    _counter("num_preemptions_total", "Requests taken off their row for want of blocks.", *_MODEL),
    _counter("request_success_total", "Ended requests by how they ended.", *_MODEL, "finished_reason"),
    _counter("admission_rejections_total", "Refused requests by reason.", "reason"),
    _histogram("form_check_seconds", "Time that checking a new form of an output took.", (), STEP_BOUNDS_S),
    _counter("recoveries_total", "Losses that requests survived.", "kind"),
    _counter("tenant_requests_total", "Ended requests by tenant.", "tenant"),
    _counter("tenant_prompt_tokens_total", "Prompt tokens of ended requests by tenant.", "tenant"),
    _counter("tenant_generation_tokens_total", "Generated tokens of ended requests by tenant.", "tenant"),
    _histogram("time_to_first_token_seconds", "Submission to first token.", _MODEL, FIRST_TOKEN_BOUNDS_S),
    _histogram("inter_token_latency_seconds", "Time between tokens.", _MODEL, BETWEEN_TOKENS_BOUNDS_S),
    _histogram("request_time_per_output_token_seconds", "Its mean by request.", _MODEL, BETWEEN_TOKENS_BOUNDS_S),
    _histogram("e2e_request_latency_seconds", "Submission to end.", _MODEL, REQUEST_BOUNDS_S),
    _histogram("request_queue_time_seconds", "Time until the first placement.", _MODEL, REQUEST_BOUNDS_S),
    _histogram("request_prefill_time_seconds", "Time on a row before a token.", _MODEL, REQUEST_BOUNDS_S),
    _histogram("request_decode_time_seconds", "Time on a row from the first token on.", _MODEL, REQUEST_BOUNDS_S),
    _histogram("request_prompt_tokens", "Prompt length.", _MODEL, _TOKEN_BOUNDS),
    _histogram("request_generation_tokens", "Output length.", _MODEL, _TOKEN_BOUNDS),
    _histogram("step_seconds", "Device time of steps by phase.", (*_EXECUTOR, "phase"), STEP_BOUNDS_S),
    _histogram("step_tokens", "Tokens of a step.", _EXECUTOR, _STEP_TOKEN_BOUNDS),
    _histogram("planning_seconds", "Time that planning a step took.", _EXECUTOR, PLANNING_BOUNDS_S),
    _histogram(
        "recovery_pause_seconds", "From a lost stream until its requests get a plan.", ("kind",), _PAUSE_BOUNDS_S
    ),
)

NUM_RUNNING = _gauge("num_requests_running", "Requests on rows.", *_MODEL)
NUM_WAITING = _gauge("num_requests_waiting", "Requests in the queue.", *_MODEL)
KV_USAGE = _gauge("kv_cache_usage_perc", "Blocks that requests own, 0 to 1.", *_MODEL)
CACHE_INFO = _gauge("cache_config_info", "Always 1.", *_MODEL, *_EXECUTOR, "block_size", "num_gpu_blocks")
EXECUTORS = _gauge("executors", "Executors by state.", "state")
LOST_FOR = _gauge("executor_lost_seconds", "How long it has been lost; else 0.", *_EXECUTOR, *_MODEL)
KV_BLOCKS = _gauge("kv_blocks", "KV blocks by state.", *_EXECUTOR, "state")
KV_SLOTS_FILLED = _gauge("kv_slots_filled_ratio", "Filled by owned KV slots, 0 to 1.", *_EXECUTOR)
PLANS_IN_FLIGHT = _gauge("plans_in_flight", "Plans without a result.", *_EXECUTOR)
IDLE = _counter("step_idle_seconds_total", "Time without a step.", *_EXECUTOR)
STARVED = _counter("step_starved_seconds_total", "The part of it that waited for a late plan.", *_EXECUTOR)
DRAFTED = _counter("spec_decode_num_draft_tokens_total", "Verified drafts.", *_EXECUTOR)
ACCEPTED = _counter("spec_decode_num_accepted_tokens_total", "The part of them that became output.", *_EXECUTOR)
DRAFTED_AT = _counter("spec_decode_num_draft_tokens_per_pos_total", "Drafts by place.", *_EXECUTOR, "position")
ACCEPTED_AT = _counter("spec_decode_num_accepted_tokens_per_pos_total", "Those by place.", *_EXECUTOR, "position")
SAVED = _gauge("spec_decode_saved_seconds", "Time that drafts saved, as estimated.", *_EXECUTOR)
DRAFTING = _counter("step_draft_seconds_total", "Time that drafting took.", *_EXECUTOR)
LOG_LINES_LOST = _counter("log_lines_lost_total", "Log lines that found no room.")
SPANS = _counter("trace_spans_total", "Spans by what became of them.", "state")
READ = (
    *(NUM_RUNNING, NUM_WAITING, KV_USAGE, CACHE_INFO, EXECUTORS, LOST_FOR, KV_BLOCKS, KV_SLOTS_FILLED, PLANS_IN_FLIGHT),
    *(IDLE, STARVED, DRAFTED, ACCEPTED, DRAFTED_AT, ACCEPTED_AT, SAVED, DRAFTING, LOG_LINES_LOST, SPANS),
)
