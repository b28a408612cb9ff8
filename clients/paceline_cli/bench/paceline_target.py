"""This project's own scheduler over gRPC: prompts are token ids, all requests share one session."""

from collections.abc import Callable
from pathlib import Path
from typing import Self

from paceline_cli.bench.errors import NoOutputError
from paceline_cli.bench.records import Counted
from paceline_cli.bench.targets import Outgoing, Served
from paceline_client.async_client import AsyncClient
from paceline_client.config import Limits, Retry, Timeout, Tls
from paceline_client.requests import Sampling, Scheduling, Stopping
from paceline_client.results import Model

_CONNECT_SECONDS = 2.0
# An open loop sends whatever the server has left unanswered.
_MAX_CONCURRENT_REQUESTS = 1_000_000
# Special tokens stand at the start or the end of vocabularies: prompts keep clear of an eighth at each.
_MARGIN = 8


class PacelineTarget:
    """Sends over a client of its own. Make it with `connect`."""

    def __init__(
        self, client: AsyncClient, model: Model, sampling: Sampling, *, ignore_eos: bool, now: Callable[[], float]
    ) -> None:
        self._client = client
        self._model = model
        self._sampling = sampling
        self._ignore_eos = ignore_eos
        self._now = now
        self._token_ids = prompt_token_ids(model)

    @classmethod
    async def connect(
        cls,
        address: str,
        model: str | None,
        sampling: Sampling,
        *,
        ignore_eos: bool,
        now: Callable[[], float],
        tls: Tls | None = None,
        token: str | Path | None = None,
    ) -> Self:
        """Connect and ask for the model. `ConnectFailedError`, or `NotFoundError` where it is not served."""
        client = AsyncClient(
            address,
            tls=tls,
            token=token,
            timeout=Timeout(connect_seconds=_CONNECT_SECONDS),
            # A refusal is a result, not something to try again.
            retry=Retry(max_attempts=1),
            limits=Limits(max_concurrent_requests=_MAX_CONCURRENT_REQUESTS),
        )
        try:
            return cls(client, await client.get_model(model), sampling, ignore_eos=ignore_eos, now=now)
        except BaseException:
            await client.close()
            raise

    @property
    def served(self) -> Served:
        return Served(self._model.name, self._model.max_model_len)

    @property
    def num_symbols(self) -> int:
        """Token ids that prompts are made of."""
        return len(self._token_ids)

    async def send(self, request: Outgoing, times: list[float]) -> Counted:
        now = self._now
        stream = self._client.stream(
            token_ids=[self._token_ids[symbol] for symbol in request.symbols],
            sampling=self._sampling,
            stopping=Stopping(max_tokens=request.num_output_tokens, ignore_eos=self._ignore_eos),
            scheduling=Scheduling(cache_salt=request.cache_group),
            model=self._model.name,
        )
        async with stream:
            async for delta in stream:
                if delta.token_ids:
                    times.append(now())  # noqa: PERF401  the list is shared with whoever watches
        if not times:
            raise NoOutputError(f"the answer ended without a token ({stream.result.finish_reason})")
        usage = stream.result.usage
        return Counted(
            usage.num_prompt_tokens,
            usage.num_output_tokens,
            usage.num_cached_tokens,
            usage.num_draft_tokens,
            usage.num_accepted_draft_tokens,
        )

    async def close(self) -> None:
        await self._client.close()


def prompt_token_ids(model: Model) -> list[int]:
    """The ids that prompts are made of: from the middle of the vocabulary, without those that end an output."""
    margin = model.vocab_size // _MARGIN
    ends = frozenset(model.end_token_ids)
    return [token_id for token_id in range(margin, model.vocab_size - margin) if token_id not in ends]
