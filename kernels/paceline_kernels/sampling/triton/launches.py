"""How sampling's kernels are launched, by architecture.

A prediction for an H200 (132 multiprocessors at about 1.75 GHz, 4.3 TB/s of copy) and 256 rows of 128,256 logits: 131
MB, read once in 31 us.

The survey issues, by its loop-free SASS, 440 to 480 instructions per warp and 512 tokens for a row without top_p, of
which 74 are the 64-bit products of Philox and none a logarithm: 64,512 warps on 528 schedulers are 31 to 34 us of
issuing, in the shadow of the memory if all goes well and beside it at worst. With top_p 160 more, one of them an
exponential per token: 11 us more. Expected: 40 to 50 us, with top_p 45 to 60.

The draw is a chain of steps whose length is latency, not bytes: 1 us to read what the survey found (3 MB), 1 us for
each chunk of 8 segments. Without filters that is two chunks, and greedy one segment: 5 us. top_k = 50 lists about 50
segments and reads them twice, 20 us. top_p reads what comes before the token it draws: a few segments where a model is
sure, everything where logits are flat, which costs a second pass over the memory, 35 to 40 us.

So rows without filters, greedy ones and such with min_p take about 50 us in two launches, top_k and top_p on what
models give about 65, and top_p on noise about 90. A vocabulary that 16 does not divide is read 4 bytes at a time.
"""

from dataclasses import dataclass

from paceline_kernels.gpu.architecture import Architecture


@dataclass(frozen=True, slots=True)
class Launch:
    """Of all kernels, in segments of 128 tokens where nothing else is said."""

    survey_segments: int  # per program: a lane of 4 warps has 16 tokens, 62 registers leave room for 8 programs
    survey_warps: int
    chunk: int  # that a program of a row reads at a time; where it only adds up masses, four times as much
    row_warps: int
    row_registers: int  # at most, of a thread: three rows share a multiprocessor, and nothing is spilled
    capacity: int  # tokens of a row that are searched without reading logits again, at least MAX_LOGPROBS
    rule_block: int  # tokens of a list, or of a row to copy, at a time
    rule_warps: int


# As many best tokens a row can have on a GPU: they are put in order one by one, in about 0.2 us each.
MAX_LOGPROBS = 1024

LAUNCHES = {
    Architecture.SM_80: Launch(16, 4, 8, 4, 160, 1024, 1024, 4),
    Architecture.SM_90: Launch(16, 4, 8, 4, 160, 1024, 1024, 4),
}
