"""What is known of a request, in sentences.

Apart, because `paceline explain` and `paceline top` say the same.
"""

import dataclasses

from paceline_client.results import Estimate, Explanation


def explained(explanation: Explanation) -> str:
    lines = [explanation.state.value + (f" on {explanation.executor}" if explanation.executor else "")]
    if explanation.waiting_for:
        lines.append(f"waits for: {explanation.waiting_for} ({explanation.queue_position} ahead of it)")
    if explanation.num_preemptions:
        lines.append(f"preempted {explanation.num_preemptions} times, last: {explanation.preemption_reason}")
    lines.append(f"{explanation.num_computed_tokens} tokens computed, {explanation.num_output_tokens} generated")
    spent = {} if explanation.times is None else dataclasses.asdict(explanation.times)
    if any(spent.values()):
        lines.append(", ".join(f"{phase} {_shown(seconds)}" for phase, seconds in spent.items() if seconds))
    if explanation.num_draft_tokens:
        lines.append(f"{explanation.num_accepted_draft_tokens} of {explanation.num_draft_tokens} drafts became output")
    return "\n".join(lines)


def expectation(expected: Estimate) -> str:
    """It is of a request that would be taken."""
    first, gap = expected.time_to_first_token_seconds or 0.0, expected.inter_token_seconds or 0.0
    prompt = f"{expected.num_prompt_tokens} prompt tokens, {expected.num_cached_tokens} of them cached"
    return f"first token in {_shown(first)}, then one every {_shown(gap)}; {prompt}"


def _shown(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
