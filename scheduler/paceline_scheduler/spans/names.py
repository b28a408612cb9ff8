"""What spans and their attributes are called; OPERATING.md documents them. Values only.

`gen_ai` and `error` are OpenTelemetry's semantic conventions for generative AI, as of 1.41 still in development; what
they have no name for is ours. Texts of clients, stop sequences too, are left out.
"""

# Spans. That of a call is named after its operation and model.
QUEUE = "queue"
PREEMPTED = "preempted"
PREPARE = "prepare"
PREFILL = "prefill"
DECODE = "decode"
DETOKENISE = "detokenise"
STEP = "step"
STEP_PLAN = "plan"
STEP_WAIT = "wait"
STEP_PREPARE = "prepare step"
STEP_FORWARD = "forward"
STEP_SAMPLE = "sample"

# https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
OPERATION = "gen_ai.operation.name"
CHAT, TEXT_COMPLETION = "chat", "text_completion"
PROVIDER = "gen_ai.provider.name"
PACELINE = "paceline"
REQUEST_MODEL = "gen_ai.request.model"
RESPONSE_MODEL = "gen_ai.response.model"
RESPONSE_ID = "gen_ai.response.id"
# Part of a request's message, field there, attribute.
SETTINGS = (
    ("stopping", "max_tokens", "gen_ai.request.max_tokens"),
    ("sampling", "temperature", "gen_ai.request.temperature"),
    ("sampling", "top_p", "gen_ai.request.top_p"),
    ("sampling", "top_k", "gen_ai.request.top_k"),
    ("sampling", "presence_penalty", "gen_ai.request.presence_penalty"),
    ("sampling", "frequency_penalty", "gen_ai.request.frequency_penalty"),
    ("sampling", "n", "gen_ai.request.choice.count"),
)
SEED = "gen_ai.request.seed"
FINISH_REASONS = "gen_ai.response.finish_reasons"
TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
ERROR_TYPE = "error.type"

# https://opentelemetry.io/docs/specs/semconv/rpc/grpc/
RPC_SYSTEM = "rpc.system.name"
RPC_METHOD = "rpc.method"

# Ours. Of a call:
TENANT = "paceline.tenant"
ATTACHMENT = "paceline.attachment"
LEFT = "paceline.left"
RESUMED_FROM = "paceline.resume_from"
NUM_PREEMPTIONS = "paceline.num_preemptions"
# Of one of its completions:
COMPLETION = "paceline.completion"
EXECUTOR = "paceline.executor"
ROW = "paceline.row"
NUM_TOKENS = "paceline.num_tokens"
TOKENS_END = "paceline.tokens_end"
BUSY_S = "paceline.busy_seconds"
# Of a step:
STEP_ID = "paceline.step_id"
EPOCH = "paceline.epoch"
NUM_ROWS = "paceline.num_rows"
NUM_DRAFT_TOKENS = "paceline.num_draft_tokens"
PREDICTED_S = "paceline.predicted_seconds"
IDLE_S = "paceline.idle_seconds"
STEP_PHASES_S = {
    STEP_PLAN: "paceline.plan_seconds",
    STEP_WAIT: "paceline.wait_seconds",
    STEP_PREPARE: "paceline.prepare_seconds",
    STEP_FORWARD: "paceline.forward_seconds",
    STEP_SAMPLE: "paceline.sample_seconds",
}
