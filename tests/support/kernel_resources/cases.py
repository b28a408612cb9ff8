"""Every way in which kernels are launched: each entry of each launch table, with the types that matter.

Calls are those of the cases that a GPU is timed with (`gpu_kernels`), at other sizes and without numbers; those that
only launch, and that no time is worth, are made here and in `draws_cases`. Compiling takes seconds, so no case repeats
another's code, and of what shares a line of a launch table only that is compiled which needs most.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from gpu_kernels import attention_cases, product_cases, row_cases, sampling_cases
from gpu_kernels.attention_cases import Batch
from gpu_kernels.case import Case as TimedCase
from gpu_kernels.case import Place
from gpu_kernels.product_cases import AWQ, BLOCKS, Q4_K, W4A16, Grouped
from gpu_kernels.sampling_cases import DrawWay
from kernel_resources import draws_cases, experts_cases
from kernel_resources.case import Case, meta, type_name
from paceline_kernels.activation import Gate, gate_and_multiply_rounded, softcap
from paceline_kernels.attention.triton.launches import BULK_SPLITS
from paceline_kernels.gpu.architecture import Architecture, table_of
from paceline_kernels.gpu.splits import Splits
from paceline_kernels.grouped_linear import Codes
from paceline_kernels.grouped_linear.triton.launches import FEW_ROWS, MANY_OUTPUTS
from paceline_kernels.grouped_linear.triton.launches import TILES as GROUP_TILES
from paceline_kernels.grouped_linear.triton.widening import widened
from paceline_kernels.linear import linear
from paceline_kernels.linear.triton.launches import TILES, TilesLaunch
from paceline_kernels.rms_norm import rms_norm_rounded
from paceline_kernels.rms_norm.triton import NUM_WARPS
from paceline_kernels.sampling import PENALTIES, LogitRules, TokenLists, sample
from paceline_kernels.scaled_linear.triton import round_rows

_FIRST_WITH_FP8 = 89
_NARROWEST = _INT8, _FP8 = torch.int8, torch.float8_e4m3fn  # the latter not on all GPUs
_NARROW, _SMALLEST = (Place(torch.device("meta"), dtype) for dtype in (torch.bfloat16, torch.float16))
_ROWS, _VOCAB = 8, 128_256
_INPUTS = 4096
_FEWEST_TOKENS = 16  # of a tile
_TABLE_BLOCKS = 64  # of a row


def cases(capability: int) -> Iterator[Case]:
    """All cases of a GPU, by its compute capability times ten."""
    architecture, has_fp8 = table_of(capability), capability >= _FIRST_WITH_FP8
    yield from _norms(architecture, has_fp8=has_fp8)
    yield from _rope(has_fp8=has_fp8)
    yield from _rows(has_fp8=has_fp8)
    yield from draws_cases.cases()
    yield from _attention(architecture, has_fp8=has_fp8)
    yield from _products(architecture, has_fp8=has_fp8)
    yield from _grouped_products(architecture)
    yield from experts_cases.cases(architecture, has_fp8=has_fp8)
    yield from _sampling()


def _launched(name: str, timed: TimedCase) -> Case:
    return Case(name, lambda: timed.build(0).ours())


def _norms(architecture: Architecture, *, has_fp8: bool) -> Iterator[Case]:
    for width in NUM_WARPS[architecture]:
        place = _SMALLEST if width == min(NUM_WARPS[architecture]) else _NARROW
        name = f"norm {width} {type_name(place.dtype)}"
        yield _launched(name, row_cases.norm_case(place, _ROWS, width, adds=False))
        yield _launched(f"add {name}", row_cases.norm_case(place, _ROWS, width))
        x = meta(_ROWS, width, dtype=place.dtype)
        for rounded_to in _NARROWEST[: 2 if has_fp8 and width == _INPUTS else 1]:
            of_type = partial(rms_norm_rounded, x, x[0], 1e-5, rounded_to, residual=x)
            yield Case(f"add {name} {type_name(rounded_to)}", of_type)
    yield _launched("head norm 128", row_cases.head_norms_case(_NARROW, _ROWS, (32, 8, 128)))


def _rope(*, has_fp8: bool) -> Iterator[Case]:
    rope = partial(row_cases.rope_case, num_tokens=_ROWS, num_slots=16_000, block_size=16)
    for head_dim, place in ((64, _SMALLEST), (128, _NARROW), (256, _NARROW)):
        with_norms = rope(place, heads=(32, 8, head_dim), cache_type=place.dtype, eps=1e-6)
        yield _launched(f"rope {head_dim} norms {type_name(place.dtype)}", with_norms)
    for cache_type in (torch.bfloat16, _INT8, *([_FP8] if has_fp8 else [])):
        yield _launched(f"rope 128 {type_name(cache_type)}", rope(_NARROW, heads=(32, 8, 128), cache_type=cache_type))


def _rows(*, has_fp8: bool) -> Iterator[Case]:
    for gate, place in ((Gate.SILU, _NARROW), (Gate.GELU_TANH, _SMALLEST)):
        name = f"gate {gate.name} {type_name(place.dtype)}"
        yield _launched(name, row_cases.gate_case(place, _ROWS, 14_336, gate))
        gate_up = meta(_ROWS, 2 * 14_336, dtype=place.dtype)
        for rounded_to in _NARROWEST[: 1 + has_fp8]:
            of_type = partial(gate_and_multiply_rounded, gate_up, gate, rounded_to)
            yield Case(f"{name} {type_name(rounded_to)}", of_type)
    yield Case("softcap", partial(softcap, meta(_ROWS, 256_000), 30.0))
    yield _launched("take rows", row_cases.take_rows_case(_NARROW, _ROWS, 4096, _VOCAB))
    yield _launched("block copy", row_cases.block_copy_case(_NARROW, 2, 32, 1000, 8 * 16 * 128))


def _attention(architecture: Architecture, *, has_fp8: bool) -> Iterator[Case]:
    """Both kernels and the fold in each line; blocks copied in bulk, and where all rows are chunks."""
    addressed = 64  # slots of blocks that are not copied in bulk
    if architecture in {place[0] for place in BULK_SPLITS}:
        addressed = 32
        yield from _attention_in_bulk()
    chunk = _batch([64, *[0] * (_ROWS - 1)])
    lines = {64: (_SMALLEST, None), 128: (_NARROW, None), 256: (_NARROW, 4096)}
    verifying = replace(_batch([8] * _ROWS, block_size=addressed), short_tokens=8)
    for head_dim, (place, window) in lines.items():
        for cache_type in (place.dtype, _INT8):
            yield _attends(replace(chunk, window=window), head_dim, place, cache_type)
    if has_fp8:
        for head_dim, (place, window) in lines.items():
            wide = _batch(chunk.computed, block_size=addressed)
            yield _attends(replace(wide, window=window), head_dim, place, _FP8)
    for head_dim, cache_type in ((128, torch.bfloat16), (256, torch.bfloat16), (128, _INT8)):
        yield _attends(verifying, head_dim, _NARROW, cache_type, "drafts 7")
    if has_fp8:
        yield _attends(verifying, 128, _NARROW, _FP8, "drafts 7")
    everything = replace(chunk, window=4096, softcap=50.0, splits=Splits.FIXED, short_tokens=5)
    yield _attends(everything, 128, _NARROW, torch.bfloat16, "softcap fixed")


def _attention_in_bulk() -> Iterator[Case]:
    """Each line for blocks that are copied in bulk, with each type; windows and caps, which take registers."""
    decode = _batch([1] * _ROWS, block_size=64)
    verifying = replace(_batch([8] * _ROWS, block_size=64), short_tokens=8)
    for cache_type in (torch.bfloat16, _FP8, _INT8):
        for head_dim in (64, 128, 256):
            yield _attends(decode, head_dim, _NARROW, cache_type)
            yield _attends(replace(decode, window=4096), head_dim, _NARROW, cache_type)
        yield _attends(replace(decode, softcap=50.0), 128, _NARROW, cache_type, "softcap")
        for head_dim in (64, 128):
            yield _attends(verifying, head_dim, _NARROW, cache_type, "drafts 7")


def _batch(computed: Sequence[int], block_size: int = 16) -> Batch:
    return Batch([_TABLE_BLOCKS * block_size] * len(computed), computed, block_size=block_size)


def _attends(batch: Batch, head_dim: int, place: Place, cache_type: torch.dtype, special: str = "") -> Case:
    """special: what is special about the batch."""
    parts = [f"attention {head_dim} {type_name(cache_type)} blocks of {batch.block_size}"]
    parts += ["float16"] if place is _SMALLEST else []
    parts += ["window"] if batch.window else []
    timed = attention_cases.attention_case("", replace(batch, heads=(32, 8, head_dim)), place, cache_type)
    return _launched(" ".join([*parts, *([special] if special else [])]), timed)


def _products(architecture: Architecture, *, has_fp8: bool) -> Iterator[Case]:
    """Both kernels of each product, and the one that rounds rows of x; the smallest sizes with float16."""
    yield _product(1, 2048, torch.float16, Splits.EVEN, _SMALLEST)
    for num_tokens, num_outputs in ((8, 4096), (16, 6144)):
        yield _product(num_tokens, num_outputs, torch.bfloat16, Splits.EVEN)
    yield _product(8, 2048, _INT8, Splits.EVEN, _SMALLEST)
    for num_tokens, num_outputs in ((8, 4096), (16, 4096), (32, 4096), (32, 16_384)):
        yield _product(num_tokens, num_outputs, _INT8, Splits.EVEN)
    for weight_type in (torch.bfloat16, _INT8):
        for launch in TILES[architecture, weight_type.itemsize].values():
            place = _SMALLEST if launch.tokens == _FEWEST_TOKENS else _NARROW
            own_type = place.dtype if weight_type.itemsize == place.dtype.itemsize else weight_type
            yield _product(_rows_for(launch), 4096, own_type, Splits.FIXED, place)
    yield _product(2048, 4096, _INT8, Splits.EVEN)  # with rows rounded to int8
    for num_tokens in (16, 2048):
        sliced = partial(linear, meta(num_tokens, _INPUTS), meta(4096, _INPUTS), splits=Splits.FIXED, slices=8)
        yield Case(f"linear {num_tokens} by 4096 bfloat16 fixed, 8 slices", sliced)
    if has_fp8:
        yield _product(8, 4096, _FP8, Splits.EVEN, _SMALLEST)
        yield from (_product(num_tokens, 28_672, _FP8, Splits.EVEN) for num_tokens in (16, 32))
        yield _product(2048, 4096, _FP8, Splits.FIXED)
        yield Case("round rows", partial(round_rows, meta(2048, _INPUTS), _FP8))


def _grouped_products(architecture: Architecture) -> Iterator[Case]:
    """Each line of both kernels, with plain weights and with those that take most registers; each kind of codes."""
    int8, table = Grouped(Codes.INT8, 32), Grouped(Codes.TABLE, 64)
    few = {form: FEW_ROWS[architecture, is_plain] for form, is_plain in ((W4A16, True), (Q4_K, False))}
    tiles = {form: GROUP_TILES[architecture, is_plain] for form, is_plain in ((W4A16, True), (Q4_K, False))}
    for form in few:
        for rows, launches in few[form].items():
            yield _grouped(rows, 4096, form, Splits.EVEN)
            if launches[1] is not None:
                yield _grouped(rows, MANY_OUTPUTS, form, Splits.EVEN)
        for rows in tiles[form]:
            yield _grouped(min(rows, 1024), 4096, form, Splits.FIXED)
    for form in (AWQ, BLOCKS, int8, table):
        yield _grouped(8, 4096, form, Splits.EVEN, _SMALLEST)
        yield _grouped(1024, 4096, form, Splits.FIXED)
    for form in (Q4_K, BLOCKS, int8, table):
        yield Case(f"widened {form}", partial(widened, form.weight(_NARROW, 4096, _INPUTS, 0), _NARROW.dtype))


def _grouped(num_tokens: int, num_outputs: int, form: Grouped, splits: Splits, place: Place = _NARROW) -> Case:
    name = f"linear {num_tokens} by {num_outputs} {form} {type_name(place.dtype)} {splits.value}"
    return _launched(name, product_cases.grouped_linear_case(place, num_tokens, num_outputs, _INPUTS, form, splits))


def _rows_for(launch: TilesLaunch) -> int:
    """Up to 64 as many as a tile has; larger tiles are for many more."""
    return launch.tokens if launch.tokens <= 64 else launch.tokens * 8


def _product(
    num_tokens: int, num_outputs: int, weight_type: torch.dtype, splits: Splits, place: Place = _NARROW
) -> Case:
    types = dict.fromkeys(type_name(named) for named in (weight_type, place.dtype))
    name = f"linear {num_tokens} by {num_outputs} {' '.join(types)} {splits.value}"
    sizes = (place, num_tokens, num_outputs, _INPUTS)
    if weight_type == place.dtype:
        return _launched(name, product_cases.linear_case(*sizes, splits, adds=True))
    return _launched(name, product_cases.scaled_linear_case(*sizes, weight_type, splits))


def _sampling() -> Iterator[Case]:
    """The draw alone, and all that may surround it: by the number of segments those kernels differ that have a program
    per row, by the type of logits those that read them, by whether there are rules those that read rules.
    """
    everything = DrawWay("everything", num_logprobs=20, num_seen=131_072)
    for dtype in (torch.float32, torch.bfloat16):
        name = f"sample {_VOCAB}" + (" bfloat16" if dtype == torch.bfloat16 else "")
        for way, special in ((DrawWay("alone"), ""), (everything, " everything")):
            timed = sampling_cases.sample_case(_NARROW, _ROWS, _VOCAB, replace(way, dtype=dtype))
            yield _launched(name + special, timed)
        if dtype == torch.float32:
            yield Case(f"{name} rules as lists", _sample_by_lists)


def _sample_by_lists() -> None:
    lists = TokenLists(meta(_ROWS + 1, dtype=torch.int32), meta(100, dtype=torch.int32))
    floats = meta(_ROWS, dtype=torch.float32)
    rules = LogitRules(
        allowed=lists,
        forbidden=lists,
        biased=lists,
        biases=meta(100, dtype=torch.float32),
        prompt=lists,
        output=lists,
        **dict.fromkeys(PENALTIES, floats),
    )
    parameters = sampling_cases.parameters_of(DrawWay("alone"), _ROWS, 0, _NARROW.device)
    sample(meta(_ROWS, _VOCAB, dtype=torch.float32), parameters, rules, max_logprobs=-1)
