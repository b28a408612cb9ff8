"""What clients of a real system get with drafts is what they get without, delta by delta."""

import asyncio
from dataclasses import replace

from paceline_cli.chaos.requests import chaos_requests
from paceline_client import AsyncClient, Scheduling, Stopping

NUM_REQUESTS = 24
COUNTING = "one two three four five six seven eight nine ten. " * 6


async def followed(client, request, scheduling):
    """The result, and the text of each completion by how many tokens had come."""
    stream = client.stream(
        request.prompt,
        messages=request.messages,
        sampling=request.sampling,
        stopping=request.stopping,
        output=request.output,
        structured=request.structured,
        scheduling=scheduling,
    )
    texts = {}
    async with stream as deltas:
        async for delta in deltas:
            of_completion = texts.setdefault(delta.index, [(0, "")])
            of_completion.append((delta.offset + len(delta.token_ids), of_completion[-1][1] + delta.text))
        result = deltas.result
    return result, {index: dict(of_completion) for index, of_completion in texts.items()}


def told(result):
    """All of a result but what it cost."""
    completions = [
        (each.token_ids, each.text, each.logprobs, each.finish_reason, each.matched_stop, each.usage.num_output_tokens)
        for each in result.completions
    ]
    return completions, result.prompt_logprobs


async def test_drafts_change_no_delta(running_system):
    requests = [*chaos_requests(NUM_REQUESTS, has_forms=True, has_tools=False)]
    requests.append(replace(requests[0], prompt=COUNTING, messages=None, stopping=Stopping(max_tokens=80)))
    async with AsyncClient(running_system.api) as client:
        plain = [await followed(client, each, Scheduling(max_num_draft_tokens=0)) for each in requests]
        half = len(requests) // 2
        drafted = await asyncio.gather(*(followed(client, each, Scheduling()) for each in requests[:half]))
        drafted += [await followed(client, each, Scheduling()) for each in requests[half:]]
    num_common = 0
    for request, (expected, expected_texts), (result, texts) in zip(requests, plain, drafted, strict=True):
        assert told(result) == told(expected), request.name
        for index, of_completion in texts.items():
            common = of_completion.keys() & expected_texts[index].keys()
            num_common += len(common)
            for offset in common:
                assert of_completion[offset] == expected_texts[index][offset], (request.name, index, offset)
    usages = [completion.usage for result, _ in drafted for completion in result.completions]
    assert num_common > 10 * NUM_REQUESTS
    assert sum(usage.num_accepted_draft_tokens for usage in usages) > 50
    assert not any(completion.usage.num_draft_tokens for result, _ in plain for completion in result.completions)
