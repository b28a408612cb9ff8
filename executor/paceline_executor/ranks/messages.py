"""What rank 0 tells the others, as bytes: a step's batch, blocks to copy, that steps are to be prepared.

Columns behind a header of their lengths, those of eight bytes first. Whoever reads checks that they fit each other.
Refuses to know how bytes travel.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline_executor.errors import RankError
from paceline_executor.runner.interface import (
    BlockCells,
    Int32Array,
    PromptTargets,
    RowDescriptions,
    SamplingColumns,
    StepBatch,
    TokenLists,
)
from paceline_executor.runner.row_rules import NO_TOKENS, RowRules

_Column = npt.NDArray[Any]
_WORD = 8


class _Kind(enum.IntEnum):
    PREPARE = 1
    STEP = 2
    COPY = 3


@dataclass(frozen=True, slots=True)
class Prepare:
    """Whatever is captured, before the first step."""


@dataclass(frozen=True, slots=True)
class Copy:
    sources: Int32Array
    destinations: Int32Array


Message = Prepare | Copy | StepBatch

# A letter says how many there are: columns of one letter are alike, those of "*" of any length. D are described rows, G
# those with rules, W bad words of several tokens.
_OF_STEP = tuple(
    (name, kind, count)
    for kind, names in (
        ("<i8", "scalars:2 seeds:D"),
        ("<f8", "chance:1 penalties:*"),
        ("<f4", "temperature:D top_p:D min_p:D biases:*"),
        ("<i4", "rows:R num_tokens:R context_lens:R sampled:S num_drafts:* cell_rows:C cell_indices:C block_ids:C"),
        ("<i4", "described:D num_prompt:D num_computed:D max_known:D top_k:D num_logprobs:D end_tokens:*"),
        ("<i4", "known_lens:D known:* target_rows:T target_tokens:T target_tops:T targets:*"),
        ("<i4", "ruled:G min_tokens:G num_words:G allowed_lens:G biased_lens:G forbidden_lens:G end_lens:G"),
        ("<i4", "prompt_lens:G allowed:* biased:* forbidden:* ends:* prompt:*"),
        ("<i4", "before_lens:W last_lens:W before:* last:*"),
    )
    for name, _, count in (each.partition(":") for each in names.split())
)
_OF_COPY = (("sources", "<i4", "B"), ("destinations", "<i4", "B"))
_LISTS = (
    *(("allowed_lens", "allowed"), ("biased_lens", "biased"), ("before_lens", "before")),
    *(("forbidden_lens", "forbidden"), ("end_lens", "ends"), ("prompt_lens", "prompt"), ("last_lens", "last")),
)


def encode(message: Message) -> bytes:
    match message:
        case Prepare():
            return _packed(_Kind.PREPARE, ())
        case Copy(sources, destinations):
            return _packed(_Kind.COPY, (sources.astype("<i4"), destinations.astype("<i4")))
        case StepBatch():
            columns = _columns_of(message)
            return _packed(_Kind.STEP, [np.asarray(columns[name], kind) for name, kind, _ in _OF_STEP])


def decode(data: bytearray) -> Message:
    """Its arrays lie in `data`. Raises RankError for bytes that are no message."""
    try:
        kind = _Kind(int.from_bytes(data[:_WORD], "little"))
        match kind:
            case _Kind.PREPARE:
                return Prepare(**_unpacked(data, ()))
            case _Kind.COPY:
                return Copy(**_unpacked(data, _OF_COPY))
            case _Kind.STEP:
                return _batch_of(_unpacked(data, _OF_STEP))
    except (ValueError, IndexError) as error:
        raise RankError(f"what rank 0 sent is no message: {error}; give all ranks one version") from error


def _packed(kind: _Kind, columns: Sequence[_Column]) -> bytes:
    header = np.array([kind, *(column.size for column in columns)], "<i8")
    return b"".join((header.tobytes(), *(column.tobytes() for column in columns)))


def _unpacked(data: bytearray, expected: Sequence[tuple[str, str, str]]) -> dict[str, _Column]:
    sizes = np.frombuffer(data, "<i8", len(expected), _WORD)
    counts: dict[str, int] = {}
    columns, start = {}, _WORD * (1 + len(expected))
    for (name, kind, count), size in zip(expected, sizes.tolist(), strict=True):
        wanted = int(count) if count.isdecimal() else counts.setdefault(count, size)
        if size < 0 or (count != "*" and size != wanted):
            raise ValueError(f"column {name} has {size} elements, not {wanted}")
        columns[name] = np.frombuffer(data, kind, size, start)
        start += columns[name].nbytes
    if start != len(data):
        raise ValueError(f"{len(data)} bytes came, not {start}")
    return columns


def _columns_of(batch: StepBatch) -> dict[str, Any]:
    described, cells, targets, drafts = batch.described, batch.cells, batch.prompt_targets, batch.num_drafts
    sampling = described.sampling
    is_told = (drafts is not None) | (targets is not None) << 1
    targets = targets or PromptTargets(NO_TOKENS, NO_TOKENS, NO_TOKENS, NO_TOKENS)
    columns = {
        "scalars": (is_told, batch.draft_spare_ns),
        "chance": (batch.min_draft_chance,),
        "rows": batch.rows,
        "num_tokens": batch.num_tokens,
        "context_lens": batch.context_lens,
        "sampled": batch.sampled,
        "num_drafts": NO_TOKENS if drafts is None else drafts,
        "cell_rows": cells.rows,
        "cell_indices": cells.indices,
        "block_ids": cells.block_ids,
        "described": described.rows,
        "num_prompt": described.num_prompt,
        "num_computed": described.num_computed,
        "max_known": described.max_known,
        "seeds": sampling.seeds.view("<i8"),
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "num_logprobs": sampling.num_logprobs,
        "end_tokens": described.end_token_ids.ravel(),
        "known_lens": described.num_known,
        "known": described.known.token_ids,
        "target_rows": targets.rows,
        "target_tokens": targets.num_tokens,
        "target_tops": targets.num_top,
        "targets": targets.token_ids,
    }
    return columns | _columns_of_rules(described.rules)


def _columns_of_rules(rules: Sequence[RowRules | None]) -> dict[str, Any]:
    given = [each for each in rules if each is not None]
    if not given:
        return _NO_RULES
    words = [word for each in given for word in each.bad_words.items()]
    columns: dict[str, Any] = {
        "ruled": [place for place, each in enumerate(rules) if each is not None],
        "penalties": [
            number
            for each in given
            for number in (each.presence_penalty, each.frequency_penalty, each.repetition_penalty)
        ],
        "min_tokens": [each.min_tokens for each in given],
        "num_words": [len(each.bad_words) for each in given],
        "biases": np.concatenate([each.biases for each in given]),
    }
    for lens, values, lists in (
        ("allowed_lens", "allowed", [each.allowed for each in given]),
        ("biased_lens", "biased", [each.biased for each in given]),
        ("forbidden_lens", "forbidden", [each.forbidden for each in given]),
        ("end_lens", "ends", [each.end_token_ids for each in given]),
        ("prompt_lens", "prompt", [each.prompt for each in given]),
        ("before_lens", "before", [np.array(before, "<i4") for before, _ in words]),
        ("last_lens", "last", [last for _, last in words]),
    ):
        columns |= {lens: [one.size for one in lists], values: np.concatenate([NO_TOKENS, *lists])}
    return columns


_NO_RULES = {name: NO_TOKENS for name, _, count in _OF_STEP if count in "GW"} | dict.fromkeys(
    ("penalties", "biases", "allowed", "biased", "forbidden", "ends", "prompt", "before", "last"), NO_TOKENS
)


def _batch_of(columns: dict[str, _Column]) -> StepBatch:
    is_told, draft_spare_ns = columns["scalars"].tolist()
    described, drafts = columns["described"], columns["num_drafts"]
    if drafts.size not in (0, columns["sampled"].size):
        raise ValueError(f"{drafts.size} numbers of drafts are of {columns['sampled'].size} draws")
    targets = PromptTargets(*(columns[name] for name in ("target_rows", "target_tokens", "target_tops", "targets")))
    return StepBatch(
        rows=columns["rows"],
        num_tokens=columns["num_tokens"],
        context_lens=columns["context_lens"],
        sampled=columns["sampled"],
        described=RowDescriptions(
            rows=described,
            num_prompt=columns["num_prompt"],
            num_computed=columns["num_computed"],
            max_known=columns["max_known"],
            end_token_ids=columns["end_tokens"].reshape(described.size, -1 if described.size else 1),
            sampling=SamplingColumns(
                temperature=columns["temperature"],
                top_k=columns["top_k"],
                top_p=columns["top_p"],
                min_p=columns["min_p"],
                seeds=columns["seeds"].view(np.uint64),
                offsets=np.zeros(described.size, np.int32),
                num_logprobs=columns["num_logprobs"],
            ),
            rules=_rules_of(columns, described.size),
            known=_lists(columns, "known_lens", "known"),
        ),
        cells=BlockCells(columns["cell_rows"], columns["cell_indices"], columns["block_ids"]),
        prompt_targets=targets if is_told & 2 else None,
        num_drafts=drafts if is_told & 1 else None,
        min_draft_chance=float(columns["chance"][0]),
        draft_spare_ns=draft_spare_ns,
    )


def _rules_of(columns: dict[str, _Column], num_described: int) -> tuple[RowRules | None, ...]:
    rules: list[RowRules | None] = [None] * num_described
    if columns["biases"].size != columns["biased"].size:
        raise ValueError(f"{columns['biases'].size} biases are of {columns['biased'].size} tokens")
    if columns["ruled"].size:
        lists = {values: _lists(columns, lens, values) for lens, values in _LISTS}
        biases = np.split(columns["biases"], lists["biased"].cu_lens[1:-1])
        penalties = columns["penalties"].reshape(-1, 3).tolist()
        words = iter(range(columns["before_lens"].size))
        for index, place in enumerate(columns["ruled"].tolist()):
            bad_words = {
                tuple(lists["before"].list_of(word).tolist()): lists["last"].list_of(word)
                for word in islice(words, int(columns["num_words"][index]))
            }
            presence, frequency, repetition = penalties[index]
            rules[place] = RowRules(
                allowed=lists["allowed"].list_of(index),
                biased=lists["biased"].list_of(index),
                biases=biases[index],
                presence_penalty=presence,
                frequency_penalty=frequency,
                repetition_penalty=repetition,
                forbidden=lists["forbidden"].list_of(index),
                bad_words=bad_words,
                bad_word_lens=tuple(sorted({*map(len, bad_words)})),
                min_tokens=int(columns["min_tokens"][index]),
                end_token_ids=lists["ends"].list_of(index),
                prompt=lists["prompt"].list_of(index),
            )
    return tuple(rules)


def _lists(columns: dict[str, _Column], lens: str, values: str) -> TokenLists:
    cu_lens = np.zeros(columns[lens].size + 1, np.int32)
    np.cumsum(columns[lens], out=cu_lens[1:])
    if columns[lens].min(initial=0) < 0 or cu_lens[-1] != columns[values].size:
        raise ValueError(f"lists of {values} are longer or shorter than their tokens")
    return TokenLists(cu_lens, columns[values])
