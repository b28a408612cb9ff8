"""What must hold in every run, whatever goes wrong; the numbers are those of testing.md.

Judges by what came in and went out, with an independent idea of what is right. Refuses to look inside the parts, except
for the tables of a core, which it lets check themselves.
"""

import codecs
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass

from executor_rig.hash_runner import HashRule
from paceline.bytes_tokenizer import END_TOKEN_IDS
from paceline.plan.values import BatchPlan, Claim, RecordId
from paceline_client.errors import PacelineError, RequestTimeoutError, UnavailableError
from paceline_client.results import Completion, Delta, FinishReason, Result
from paceline_scheduler.api.fan_out import completion_seed
from simulation.model import NUM_BYTE_TOKENS
from simulation.scenario import PlannedRequest

_TIMEOUT_CODES = ("DEADLINE_EXCEEDED", "DEADLINE_UNREACHABLE", "TIMEOUT")

_FAILED_ALONE = ("STEP_FAILED", "EXECUTORS_DIED")  # an executor that ends itself has died of what it ran last
_FORMS_FAIL = ("STRUCTURED_FAILED", "NO_TOKEN_LEFT")  # the latter where a form and a bad word leave none
_SURELY_ALIVE_S = 0.8  # well inside the lease


Report = Callable[[str], None]
"""Takes what must not happen and did, in a sentence that begins with the invariant."""


class ClientChecks:
    """The streams of all clients (I3, I4, I6). `rules` returns those of every executor process so far.

    `failing` are the requests with which steps fail: they alone may fail for it.
    `may_many_die`: three executors may die, or be thought dead, while they run one request.
    """

    def __init__(
        self,
        rules: Callable[[], Iterable[HashRule]],
        failing: Set[RecordId],
        report: Report,
        *,
        may_many_die: bool,
    ) -> None:
        self.ends: dict[str, str] = {}  # by request id: in a word
        self._rules = rules
        self._failing = failing
        self._may_many_die = may_many_die
        self._report = report
        self._outputs: dict[tuple[str, int], list[int]] = {}
        self._attempts: dict[tuple[str, int], int] = {}
        self._texts: dict[tuple[str, int], str] = {}

    def received(self, planned: PlannedRequest, delta: Delta) -> None:
        """A delta continues what came before it, with a token that some executor draws there."""
        if planned.request_id in self.ends:
            self._report(f"I6: {planned.request_id} goes on after its end")
        output = self._outputs.setdefault((planned.request_id, delta.index), [])
        if delta.offset != len(output):
            self._report(f"I3: {planned.request_id}: offset {delta.offset} after {len(output)} tokens")
        for token_id in delta.token_ids:
            allowed = self._drawn(planned, delta.index, output)
            if token_id not in allowed:
                where = f"{planned.request_id}, completion {delta.index}, offset {len(output)}"
                self._report(f"I3: {where}: token {token_id} is none of {sorted(allowed)}")
            output.append(token_id)
        if delta.attempt < self._attempts.get((planned.request_id, delta.index), 0):
            self._report(f"attempts: {planned.request_id} fell back to attempt {delta.attempt}")
        self._attempts[planned.request_id, delta.index] = delta.attempt
        if planned.logprobs is not None and len(delta.logprobs) != len(delta.token_ids):
            self._report(f"I3: {planned.request_id}: log-probabilities are missing")
        self._texts[planned.request_id, delta.index] = (
            self._texts.get((planned.request_id, delta.index), "") + delta.text
        )

    def ended(self, planned: PlannedRequest, end: Result | PacelineError | None) -> None:
        """A request ends once: whole, by its timeout, or because its reader left."""
        if planned.request_id in self.ends:
            self._report(f"I6: {planned.request_id} ends twice")
        match end:
            case None:
                self.ends[planned.request_id] = "left"
            case Result():
                self.ends[planned.request_id] = "done"
                self._check_result(planned, end)
            case PacelineError():
                self.ends[planned.request_id] = f"failed: {end.reason}"
                if end.reason == "EXECUTORS_DIED" and self._may_many_die:
                    return  # it must look as if this request were why
                if end.reason in _FAILED_ALONE and planned.request_id in {key.request_id for key in self._failing}:
                    return
                if end.reason in _FORMS_FAIL and self._leaves_nothing(planned, end.reason):
                    return
                is_in_time = isinstance(end, RequestTimeoutError | UnavailableError) or end.reason in _TIMEOUT_CODES
                if planned.timeout_s is None or not is_in_time:
                    sentence = f"I6: {planned.request_id} failed: {type(end).__name__} {end.reason}: {end}"
                    self._report(sentence)

    def _drawn(self, planned: PlannedRequest, index: int, output: Sequence[int]) -> set[int]:
        seed = completion_seed(planned.seed, index)
        drawn = (planned.next_token(rule, seed, output) for rule in dict.fromkeys(self._rules()))
        return {token_id for token_id in drawn if token_id is not None}

    def _leaves_nothing(self, planned: PlannedRequest, reason: str) -> bool:
        if planned.form is None or (reason == "STRUCTURED_FAILED") != planned.form.fails:
            return False
        outputs = (self._outputs.get((planned.request_id, index), []) for index in range(planned.num_completions))
        going = ((index, output) for index, output in enumerate(outputs) if not set(END_TOKEN_IDS) & set(output[-1:]))
        return any(not self._drawn(planned, index, output) for index, output in going)

    def _check_result(self, planned: PlannedRequest, result: Result) -> None:
        if len(result.completions) != planned.num_completions:
            self._report(f"I3: {planned.request_id} has {len(result.completions)} completions")
        if wrong := _wrong_prompt(planned, result):
            self._report(f"I3: {planned.request_id}: {wrong}")
        for completion in result.completions:
            key = (planned.request_id, completion.index)
            output = self._outputs.get(key, [])
            if list(completion.token_ids) != output or completion.text != self._texts.get(key, ""):
                self._report(f"I3: the result of {planned.request_id} is not what was streamed")
            if wrong := _wrong_end(planned, completion):
                self._report(f"I3: {planned.request_id}, completion {completion.index}: {wrong}")


class ExecutorChecks:
    """Who drives executors, and which plans have an effect (I5)."""

    def __init__(self, now_s: Callable[[], float], report: Report) -> None:
        self.violations: list[str] = []  # that a fault may explain
        self._now_s = now_s
        self._report = report
        self._last: dict[tuple[str, int], _Reign] = {}  # by name and incarnation
        self._heard_s: dict[tuple[str, int, Claim], float] = {}  # of open streams, but for hello

    def heard(self, name: str, incarnation: int, claim: Claim) -> None:
        self._heard_s[name, incarnation, claim] = self._now_s()

    def left(self, name: str, incarnation: int, claim: Claim) -> None:
        """A plan stream has ended, and not because the executor accepted another one."""
        self._heard_s.pop((name, incarnation, claim), None)

    def accepted(self, name: str, incarnation: int, claim: Claim, epoch: int, *, is_takeover: bool) -> None:
        """Claims only rise, epochs rise by one, and who drives and is heard of is not displaced."""
        before = self._last.get((name, incarnation))
        if before is not None:
            if claim < before.claim:
                self._report(f"I5: {name} accepted {claim} after {before.claim}")
            if epoch <= before.epoch:
                self._report(f"I5: {name} went from epoch {before.epoch} to {epoch}")
            is_other = claim.scheduler_id != before.claim.scheduler_id
            heard_s = self._heard_s.get((name, incarnation, before.claim), 0.0)
            is_alive = heard_s > 0 and self._now_s() - heard_s < _SURELY_ALIVE_S
            if is_other and is_alive and not is_takeover:
                self._report(f"F7: {name} left {before.claim}, which is alive, for {claim}")
        self._last[name, incarnation] = _Reign(claim, epoch)

    def applied(self, name: str, incarnation: int, plan: BatchPlan, epoch: int, claim: Claim) -> None:
        """A plan has an effect in its own epoch, once and in order, and was sent by who drives."""
        reign = self._last.get((name, incarnation))
        due = None if reign is None else (incarnation, reign.epoch, reign.num_applied + 1)
        if reign is None or (plan.incarnation, plan.epoch, plan.step_id) != due or epoch != plan.epoch:
            found = f"step {plan.step_id} of epoch {plan.epoch}, incarnation {plan.incarnation:x}"
            self._report(f"I5: {name} ran {found} in epoch {epoch}; due was {due}")
            return
        if claim != reign.claim:
            self._report(f"I5: {name} ran a plan of {claim}, and {reign.claim} drives")
        reign.num_applied += 1

    def violated(self, name: str, sentence: str, *, is_excused: bool) -> None:
        """No scheduler breaks a rule of the executors, unless the network changed what it said."""
        if not is_excused:
            self._report(f"a plan for {name} breaks a rule: {sentence}")
        self.violations.append(sentence)


@dataclass(slots=True)
class _Reign:
    claim: Claim
    epoch: int
    num_applied: int = 0


def spelt(output: Sequence[int], stop: str) -> tuple[str, int | None]:
    """Return the text of an output, and after how many tokens the stop text ended it, if it did."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = ""
    for number, token_id in enumerate(output, start=1):
        if token_id < NUM_BYTE_TOKENS:
            text += decoder.decode(bytes([token_id]))
        if stop and stop in text:
            return text[: text.index(stop)], number
    return text + decoder.decode(b"", final=True), None


def _wrong_prompt(planned: PlannedRequest, result: Result) -> str:
    """Say what is wrong with the log-probabilities of a prompt: its tokens from the second on have theirs."""
    due = planned.prompt[1:] if planned.prompt_logprobs is not None else ()
    told = [(each.token_id, each.logprob) for each in result.prompt_logprobs]
    return "" if told == [(token_id, -token_id / 8) for token_id in due] else f"of its prompt it is told {told}"


def _wrong_end(planned: PlannedRequest, completion: Completion) -> str:
    """Say what is wrong with a completion: it is over when its tokens say so, and its text is what they spell."""
    output = completion.token_ids
    text, stopped_after = spelt(output, planned.stop)
    is_stopped = stopped_after == len(output) or (bool(output) and output[-1] in END_TOKEN_IDS)
    due = FinishReason.STOP if is_stopped else FinishReason.LENGTH
    if stopped_after is not None and stopped_after < len(output):
        return f"the stop text came after {stopped_after} of {len(output)} tokens"
    if any(token_id in END_TOKEN_IDS for token_id in output[:-1]):
        return f"it went on after its end: {output}"
    if not is_stopped and len(output) != planned.max_tokens:
        return f"it ended after {len(output)} of {planned.max_tokens} tokens"
    if completion.finish_reason is not due:
        return f"it ended by {completion.finish_reason}, and {due} was due"
    if completion.text != text:
        return f"the text is {completion.text!r}, and {text!r} was due"
    return ""
