"""One of the two models of a validation, loaded: the base's predictions kept, the candidate's compared with them.

Knows the files that hold predictions. Refuses to know what must agree before models are compared.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from paceline_executor.errors import NotComparableError
from paceline_executor.link.description import Loaded
from paceline_executor.runner.device.runner import DeviceRunner
from paceline_executor.start.opening import ProgressLog
from paceline_executor.validation.scores import (
    Float32Array,
    Predictions,
    answers,
    compare,
    figures,
    first_difference,
    predict,
)
from paceline_executor.validation.texts import MAX_ANSWERS, NUM_GIVEN, Window


@dataclass(frozen=True, slots=True)
class Side:
    """Its predictions and answers; whatever it raises says why it cannot be compared."""

    loaded: Loaded
    size: int
    folder: Path
    progress: ProgressLog

    def predict(self, name: str, cut: Sequence[Window]) -> list[Window]:
        """Keeps its predictions; returns its answers."""
        predictions = predict(self._runner, cut, partial(self.progress.log, "validate", name))
        _check_finite(predictions.target)
        np.savez(self._file(name), **asdict(predictions))
        return self._answers(cut)

    def compare(self, name: str, cut: Sequence[Window], answered: Sequence[Sequence[int]]) -> dict[str, object]:
        with np.load(self._file(name), allow_pickle=False) as columns:
            base = Predictions(**columns)
        if base.top_ids.max() >= self.loaded.description.limits.vocab_size:
            raise NotComparableError("the base has tokens that this model lacks")
        comparison = compare(self._runner, cut, base, partial(self.progress.log, "validate", name))
        _check_finite(comparison.target)
        pairs = zip(answered, self._answers(cut), strict=True)
        differences = [first_difference(tuple(one), other) for one, other in pairs]
        return {
            **asdict(figures(base.target, comparison, [len(window) - NUM_GIVEN for window in cut])),
            "num_answers": len(differences),
            "num_same_answers": differences.count(None),
            "first_difference": min((each for each in differences if each is not None), default=None),
        }

    def _answers(self, cut: Sequence[Window]) -> list[Window]:
        """To what stands at the beginning of windows from all over the text."""
        limits = self.loaded.description.limits
        num_rows = min(MAX_ANSWERS, len(cut), limits.num_blocks // -(-self.size // limits.block_size))
        prompts = [cut[index * len(cut) // num_rows][: self.size // 2] for index in range(num_rows)]
        return answers(self._runner, prompts, self.size, self.loaded.description.tokenizer.end_token_ids)

    @property
    def _runner(self) -> DeviceRunner:
        runner = self.loaded.engine.runner
        assert isinstance(runner, DeviceRunner)
        return runner

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.npz"


def _check_finite(logprobs: Float32Array) -> None:
    if not np.isfinite(logprobs).all():
        raise NotComparableError("the model's logits are no numbers: its weights are damaged, or too large for 16 bits")
