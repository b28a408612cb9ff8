"""When the requests of an open loop arrive. Pure: draws from the generator it is given, sleeps nowhere."""

import itertools
import random
from collections.abc import Iterator


def gamma_arrivals(request_rate: float, burstiness: float, draws: random.Random) -> Iterator[float]:
    """Seconds since the start, without end, of arrivals whose gaps are gamma distributed with mean 1 / `request_rate`.

    `burstiness` is the shape of that distribution, as in `vllm bench serve`: 1 is a Poisson process, below 1 arrivals
    come in bursts, above 1 they are more even. Unlike there, the drawn gaps are not stretched to a given total.
    """
    scale = 1.0 / (request_rate * burstiness)
    return itertools.accumulate(draws.gammavariate(burstiness, scale) for _ in itertools.repeat(None))
