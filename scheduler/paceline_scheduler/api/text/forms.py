"""Forms of outputs, checked in a confined process before a request is queued; `form_worker` knows what one may be.

An answer depends on the form alone, so the last ones are kept.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable

from paceline.forms.errors import Reason
from paceline_scheduler.api.limits import EdgeLimits
from paceline_scheduler.api.text.confined import Confined, ConfinedError, Confinement
from paceline_scheduler.errors import InvalidFormError, QueueFullError

_MODULE = "paceline_scheduler.api.text.form_worker"
_MAX_CPU_S = 0.5
_CONFINEMENT = Confinement(max_work_s=4 * _MAX_CPU_S, max_bytes=256 * 1024 * 1024)
_MAX_KEPT = 4096  # at most 3 MiB of refusals
_RETRY_AFTER_S = 0.5

_Answer = dict[str, str]


class Forms:
    def __init__(self, limits: EdgeLimits, confinement: Confinement = _CONFINEMENT) -> None:
        self.on_checked: Callable[[float], None] = lambda _: None
        """Takes the seconds of a form that was not known."""
        self._max_num_waiting = limits.max_num_waiting_texts
        self._process = Confined(_MODULE, "check forms", {"max_cpu_s": _MAX_CPU_S}, b"", confinement)
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        self._answers: OrderedDict[bytes, _Answer] = OrderedDict()

    async def check(self, structured: bytes) -> None:
        """`structured` is a serialised StructuredOutput. Raises InvalidFormError and QueueFullError."""
        digest = hashlib.blake2b(structured, digest_size=16).digest()
        answer = self._answers.get(digest)
        if answer is None:
            answer = await self._checked(digest, structured)
        self._answers.move_to_end(digest)
        if answer:
            raise InvalidFormError(answer["reason"], answer["field"], answer["sentence"])

    async def close(self) -> None:
        await self._process.close()

    async def _checked(self, digest: bytes, structured: bytes) -> _Answer:
        if self._num_waiting >= self._max_num_waiting:
            sentence = f"{self._num_waiting} forms wait to be checked, which is the limit; try again"
            raise QueueFullError(sentence, _RETRY_AFTER_S)
        self._num_waiting += 1
        try:
            async with self._turn:  # many requests may bring one form at once
                if digest not in self._answers:
                    self._answers[digest] = await self._ask(structured)
                    if len(self._answers) > _MAX_KEPT:
                        self._answers.popitem(last=False)
                return self._answers[digest]
        finally:
            self._num_waiting -= 1

    async def _ask(self, structured: bytes) -> _Answer:
        clock = asyncio.get_running_loop().time
        began_s = clock()
        try:
            answer, _ = await self._process.ask({}, structured)
        except ConfinedError as error:
            return {"reason": Reason.TOO_COMPLEX, "field": "structured", "sentence": f"cannot be checked: {error}"}
        finally:
            self.on_checked(clock() - began_s)
        return answer
