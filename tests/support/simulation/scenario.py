"""What a seed stands for: how large the system is, what its clients ask, and what goes wrong when.

Knows chance and bounds. Refuses to know how any of it is done.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from random import Random

from executor_rig.hash_runner import HashRule
from paceline.bytes_tokenizer import END_TOKEN_IDS, VOCAB_SIZE
from paceline.plan.versions import ProtocolRange
from paceline_executor.limits import RowLimits
from paceline_executor.runner.simulated import NOTHING_LEFT, nearest_left
from paceline_scheduler.link.leadership import ServingStatus
from simulation.device import StepFailure
from simulation.forms import PlannedForm, draw_form
from simulation.model import NUM_BYTE_TOKENS, ModelConfig, make_rule

ROGUE = "rogue"
"""The node whose messages need not be of the protocol."""
FAULTS_END_S = 6.0  # what still is wrong then is put right
_TENANTS = ("red", "blue")
_ARE_AHEAD = 1 / 2  # so many devices have several steps in flight
_LOSE_STEPS, _FAIL_LATE = 1 / 12, 1 / 6
_NUM_DRAFTS = (0, 1, 3, 7)
_HAVE_RULES = 0.25
_HAVE_PROMPT_LOGPROBS = 0.1
_HAVE_FORMS, _HAVE_FORMS_AND_BAD_WORDS = 0.25, 0.2
_HAVE_STANDBY = 1 / 3  # at least two schedulers, and ready is whoever is queued
_HAVE_SHARES = 0.4
FEWEST_BLOCKS = 14  # of an executor: what the longest request needs
_NUM_ASCII = 128
_LETTERS = range(ord("!"), _NUM_ASCII - 1)


class Reproducibility(Enum):
    """Whether another process draws the same tokens."""

    SAME_TOKENS = "the same tokens everywhere"
    OTHER_TOKENS = "other tokens in every process"


class FaultKind(Enum):
    """What goes wrong, and how often among all that does; the letters are those of testing.md."""

    KILL_SCHEDULER = "F1 kill scheduler", 5
    FREEZE_SCHEDULER = "F2 freeze scheduler", 3
    KILL_EXECUTOR = "F3 kill executor", 4
    FREEZE_EXECUTOR = "F4 freeze executor", 3
    STALL = "F4 a step takes seconds longer than it should", 3
    ZOMBIE = "F4 an executor is cut off, and back when its requests run elsewhere", 5
    SLOW_PATH = "F5 slow path, then reset", 3
    MANGLE = "F5 messages lost, doubled, reordered", 3
    REPLAY = "F5 a plan of an earlier stream comes in place of the one that is due", 2
    CHANGE_GRANT = "F5 another block than the one granted", 3
    SPOIL = "F5 a plan changed so that no executor may take it", 3
    HALF_OPEN = "F6 half-open", 4
    HOLD = "F6 nothing gets through for a while", 2
    TAKE_OVER = "F7 takeover", 2
    FAIL_STEPS = "F10 steps with a certain request fail", 5
    JUMP_CLOCK = "F13 clock jumps", 1
    DRAIN_SCHEDULER = "F15 scheduler drains, and its next version starts", 2
    DRAIN_EXECUTOR = "F15 executor drains, and its next version starts", 2
    CRASH_LOOP = "F16 scheduler crashes while it recovers", 2
    LATE_REQUEST = "F5 a request arrives when its client has come back already", 3
    BAD_RESUME = "F17 bad resume", 3
    RETURN = "F1 a client comes back to a successor without its tokens", 2
    BREAK_PATH = "F18 reset", 4
    KILL_CLIENT = "client dies", 1

    @property
    def weight(self) -> int:
        return self.value[1]


FORGETS_NOTHING = frozenset(
    {
        FaultKind.KILL_SCHEDULER,
        FaultKind.LATE_REQUEST,
        FaultKind.TAKE_OVER,
        FaultKind.CRASH_LOOP,
        FaultKind.BAD_RESUME,
        FaultKind.RETURN,
        FaultKind.KILL_CLIENT,
    }
)
"""After these executors still have what they had, are reached in time, and no scheduler drives in its dreams only."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong. `seed` is for what is drawn when it happens, which depends on how things stand."""

    at_s: float
    kind: FaultKind
    lasts_s: float
    seed: int


@dataclass(frozen=True, slots=True)
class PlannedRules:
    """What a request asks of each token: masks, which change what is drawn, and weights, which change no hash."""

    allowed: frozenset[int] = frozenset()  # empty: all
    bad_word: str = ""
    min_tokens: int = 0
    penalty: float = 0.0
    bias: tuple[int, float] | None = None

    def forbidden_after(self, output: Sequence[int]) -> set[int]:
        word = self.bad_word.encode()
        forbidden = set(END_TOKEN_IDS) if len(output) < self.min_tokens else set()
        if word and list(word[:-1]) == list(output[len(output) - len(word) + 1 :]):
            forbidden.add(word[-1])
        return forbidden


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """What a client asks for, and when it gives up: after so many deltas, if at all."""

    at_s: float
    client: int
    tenant: str
    request_id: str
    prompt: tuple[int, ...]
    seed: int
    max_tokens: int
    num_completions: int
    timeout_s: float | None
    leaves_after: int | None
    logprobs: int | None
    stop: str
    prompt_logprobs: int | None = None
    rules: PlannedRules = PlannedRules()
    form: PlannedForm | None = None

    def next_token(self, rule: HashRule, seed: int, output: Sequence[int]) -> int | None:
        """Return what a completion with this seed goes on with after an output, by prompt, seed and offset alone."""
        token_id = rule.next_token((*self.prompt, *output), seed, len(output))
        allowed, forbidden = self.rules.allowed, self.rules.forbidden_after(output)
        if self.form is not None:
            allowed = self.form.left_after(output, self.rules.min_tokens)
            forbidden = forbidden.difference(END_TOKEN_IDS)
            if allowed <= forbidden:
                return None
        token_id = nearest_left(token_id, allowed, forbidden, VOCAB_SIZE)
        return None if token_id == NOTHING_LEFT else token_id


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run, before it is run."""

    seed: int
    num_clients: int
    scheduler_protocols: tuple[ProtocolRange, ...]
    executor_protocols: tuple[ProtocolRange, ...]
    config: ModelConfig
    reproducibility: Reproducibility
    requests: tuple[PlannedRequest, ...]
    faults: tuple[Fault, ...]
    ready_when: frozenset[ServingStatus]  # what health says SERVING to: with --standby to waiting in the queue as well
    max_kv_share: float | None = None  # of every tenant: what its longest request needs


def draw_scenario(seed: int) -> Scenario:
    random = Random(f"scenario {seed}")  # noqa: S311 - nothing secret
    num_clients = random.randint(1, 2)
    is_same = random.random() < 0.7
    ahead = Random(f"ahead {seed}").random()  # noqa: S311 - nothing secret
    late = StepFailure.STEP if ahead < _LOSE_STEPS else StepFailure.DEVICE
    failure = late if ahead < _FAIL_LATE else StepFailure.AT_LAUNCH
    config = replace(_draw_config(random), is_ahead=ahead < _ARE_AHEAD, failure=failure)
    config = replace(config, limits=_with_drafts(config, Random(f"drafts {seed}")))  # noqa: S311 - nothing secret
    requests = _draw_requests(random, num_clients, config.rule)
    requests = _with_rules(requests, Random(f"rules {seed}"), config.rule)  # noqa: S311 - nothing secret
    requests = _with_forms(requests, Random(f"forms {seed}"))  # noqa: S311 - nothing secret
    has_shares = Random(f"shares {seed}").random() < _HAVE_SHARES  # noqa: S311 - nothing secret
    has_standby = Random(f"standby {seed}").random() < _HAVE_STANDBY  # noqa: S311 - nothing secret
    num_schedulers = max(random.choice((1, 1, 2, 2, 3)), 2 if has_standby else 1)
    return Scenario(
        seed=seed,
        num_clients=num_clients,
        scheduler_protocols=tuple(_draw_protocols(random) for _ in range(num_schedulers)),
        executor_protocols=tuple(_draw_protocols(random) for _ in range(random.choice((1, 2, 2, 3)))),
        config=config,
        reproducibility=Reproducibility.SAME_TOKENS if is_same else Reproducibility.OTHER_TOKENS,
        requests=requests,
        faults=_draw_faults(random),
        ready_when=frozenset(
            {ServingStatus.SERVING, ServingStatus.STANDBY} if has_standby else {ServingStatus.SERVING}
        ),
        max_kv_share=(FEWEST_BLOCKS + 0.5) / (config.limits.num_blocks + 1) if has_shares else None,
    )


def on_twins(scenario: Scenario) -> Scenario:
    """Return the same run with executors that have the GPU's runner on its twin, which finds drafts itself. It has
    logits, which penalties change: nobody asks for one.
    """
    random = Random(f"twin {scenario.seed}")  # noqa: S311 - nothing secret
    limits = replace(scenario.config.limits, max_num_draft_tokens=random.choice(_NUM_DRAFTS))
    requests = tuple(replace(one, rules=replace(one.rules, penalty=0.0)) for one in scenario.requests)
    config = replace(scenario.config, is_ahead=True, is_twin=True, limits=limits)
    return replace(scenario, config=config, requests=requests)


def _draw_protocols(random: Random) -> ProtocolRange:
    return ProtocolRange(1, random.choice((1, 1, 1, 2, 3)))


def _draw_config(random: Random) -> ModelConfig:
    base_step_ns = random.choice((15, 40, 80)) * 1_000_000
    return ModelConfig(
        limits=RowLimits(
            num_blocks=random.choice((FEWEST_BLOCKS, 16, 20, 64)),
            block_size=4,
            num_rows=random.choice((2, 3, 8)),
            max_num_batched_tokens=random.choice((16, 64)),
            max_model_len=56,
            vocab_size=VOCAB_SIZE,
        ),
        rule=make_rule(random.choice((0.0, 0.05))),
        base_step_ns=base_step_ns,
    )


def _with_drafts(config: ModelConfig, random: Random) -> RowLimits:
    """Let most executors verify drafts, but for those with several steps in flight: `on_twins` has these."""
    return replace(config.limits, max_num_draft_tokens=0 if config.is_ahead else random.choice(_NUM_DRAFTS))


def _draw_requests(random: Random, num_clients: int, rule: HashRule) -> tuple[PlannedRequest, ...]:
    beginnings = [_draw_tokens(random, random.randint(4, 24)) for _ in range(2)]
    requests = [_draw_request(random, number, num_clients, beginnings) for number in range(random.randint(2, 6))]
    return tuple(_draw_stop(random, request, rule) for request in requests)


def _draw_stop(random: Random, request: PlannedRequest, rule: HashRule) -> PlannedRequest:
    """Give some requests a stop text, one that they meet."""
    if random.random() < 0.7:
        return request
    output = rule.output(request.prompt, request.max_tokens, request.seed)
    letters = [chr(token_id) for token_id in output if token_id < _NUM_ASCII]
    return replace(request, stop=random.choice(letters)) if letters else request


def _with_rules(requests: tuple[PlannedRequest, ...], random: Random, rule: HashRule) -> tuple[PlannedRequest, ...]:
    """Let some requests ask for more than tokens."""
    return tuple(
        replace(
            request,
            prompt_logprobs=2 if random.random() < _HAVE_PROMPT_LOGPROBS else None,
            rules=_draw_rules(random, request, rule) if random.random() < _HAVE_RULES else request.rules,
        )
        for request in requests
    )


def _draw_rules(random: Random, request: PlannedRequest, rule: HashRule) -> PlannedRules:
    """Draw one rule, or a few; a bad word is one that would have come."""
    output = rule.output(request.prompt, request.max_tokens, request.seed)
    letters = bytes(token for token in output[:-1] if token in _LETTERS)
    may_wait = not request.stop and random.random() < 0.4  # a stop text in the first tokens is text like any other
    return PlannedRules(
        allowed=frozenset(random.sample(range(NUM_BYTE_TOKENS), 40)) if random.random() < 0.3 else frozenset(),
        bad_word=letters[-random.randint(1, 2) :].decode() if random.random() < 0.4 else "",
        min_tokens=random.randint(1, request.max_tokens) if may_wait else 0,
        penalty=random.choice((0.0, 0.5)),
        bias=(random.randrange(NUM_BYTE_TOKENS), 2.5) if random.random() < 0.3 else None,
    )


def _with_forms(requests: tuple[PlannedRequest, ...], random: Random) -> tuple[PlannedRequest, ...]:
    """Let some outputs keep to a form; where a word is bad, too, nothing may be left to draw."""
    return tuple(_with_form(one, random) if random.random() < _HAVE_FORMS else one for one in requests)


def _with_form(request: PlannedRequest, random: Random) -> PlannedRequest:
    has_bad_word, form = random.random() < _HAVE_FORMS_AND_BAD_WORDS, draw_form(random)
    letters = sorted(set("".join(map(bytes.decode, form.outputs)))) if has_bad_word and not form.fails else []
    bad_word = random.choice(letters) if letters else ""
    return replace(request, form=form, rules=replace(request.rules, allowed=frozenset(), bad_word=bad_word))


def _draw_request(random: Random, number: int, num_clients: int, beginnings: list[tuple[int, ...]]) -> PlannedRequest:
    beginning = random.choice(beginnings) if random.random() < 0.7 else ()
    end = () if beginning and random.random() < 0.3 else _draw_tokens(random, random.randint(3, 30 - len(beginning)))
    return PlannedRequest(
        at_s=random.uniform(0.1, 3.0),
        client=random.randrange(num_clients),
        tenant=random.choice(_TENANTS),
        request_id=f"request-{number}",
        prompt=beginning + end,
        seed=random.getrandbits(40),
        max_tokens=random.randint(3, 18),
        num_completions=2 if random.random() < 0.2 else 1,
        timeout_s=random.uniform(2.0, 10.0) if random.random() < 0.12 else None,
        leaves_after=random.randint(0, 4) if random.random() < 0.12 else None,
        logprobs=1 if random.random() < 0.15 else None,
        stop="",
    )


def _draw_tokens(random: Random, count: int) -> tuple[int, ...]:
    return tuple(random.randrange(NUM_BYTE_TOKENS) for _ in range(count))


def _draw_faults(random: Random) -> tuple[Fault, ...]:
    kinds = list(FaultKind)
    if random.random() < 0.1:
        kinds = [kind for kind in kinds if kind in FORGETS_NOTHING]
    weights = [kind.weight for kind in kinds]
    faults = [
        Fault(
            at_s=random.uniform(0.0, FAULTS_END_S - 1.5),
            kind=kind,
            lasts_s=random.choice((0.05, 0.3, 1.0, 2.0, 3.5)) * random.uniform(0.5, 1.5),
            seed=random.getrandbits(32),
        )
        for kind in random.choices(kinds, weights, k=random.choice((0, 1, 2, 2, 3, 3, 4, 5)))
    ]
    return tuple(sorted(faults, key=lambda fault: fault.at_s))
