"""What an executor says about itself once its model is loaded."""

from collections.abc import Callable
from dataclasses import dataclass

from paceline.forms.library import LIBRARY
from paceline.plan.values import ExecutorLimits, GraphSizes, KvGeometry, Model, StepPoint, Welcome
from paceline_executor.limits import RowLimits
from paceline_executor.link.engine import Engine
from paceline_executor.link.tokenizer import tokenizer_digest
from paceline_executor.rows.forms import FormMasker
from paceline_executor.runner.interface import CacheGeometry
from paceline_executor.weights.tokenizer import TokenizerBundle


@dataclass(frozen=True, slots=True)
class Description:
    model: str
    architecture: str
    num_parameters: int
    quantization: str
    limits: RowLimits
    geometry: CacheGeometry
    kv_dtype: str
    tokenizer: TokenizerBundle
    step_points: tuple[tuple[int, int], ...]  # (num_tokens, duration_ns), measured while warming up
    device: str
    num_threads: int  # 0 for a device that has none
    has_dummy_weights: bool = False  # random numbers, for benchmarks
    graphs: GraphSizes | None = None  # of the steps that are captured
    weight_bytes: int = 0  # in memory
    weights_digest: str = ""  # empty: nobody compares them
    num_ranks: int = 1
    expert_load_ratio: Callable[[], float | None] = lambda: None  # of the last step; None where nobody counts
    forms: FormMasker | None = None  # None: outputs are held to none

    def welcome(self, incarnation: int, tag_key: bytes, max_plans_in_flight: int) -> Welcome:
        """Lacks epoch and protocol."""
        return Welcome(
            incarnation=incarnation,
            epoch=0,
            protocol=0,
            model=self.served_model(),
            geometry=self.kv_geometry(),
            limits=self.plan_limits(max_plans_in_flight),
            tag_key=tag_key,
            tokenizer_digest=tokenizer_digest(self.tokenizer),
            step_points=tuple(StepPoint(num_tokens, duration_ns) for num_tokens, duration_ns in self.step_points),
            graphs=self.graphs,
        )

    def served_model(self) -> Model:
        return Model(
            name=self.model,
            architecture=self.architecture,
            max_model_len=self.limits.max_model_len,
            vocab_size=self.limits.vocab_size,
            num_parameters=self.num_parameters,
            quantization=self.quantization,
            end_token_ids=self.tokenizer.end_token_ids,
            has_chat_template=self.tokenizer.chat_template is not None,
            default_sampling=self.tokenizer.defaults,
            has_dummy_weights=self.has_dummy_weights,
            weight_bytes=self.weight_bytes,
            weights_digest=self.weights_digest,
            num_ranks=self.num_ranks,
            structured_output="" if self.forms is None else LIBRARY,
        )

    def kv_geometry(self) -> KvGeometry:
        geometry = self.geometry
        return KvGeometry(geometry.num_blocks, geometry.block_size, geometry.bytes_per_block, self.kv_dtype)

    def plan_limits(self, max_plans_in_flight: int) -> ExecutorLimits:
        limits = self.limits
        return ExecutorLimits(
            limits.num_rows,
            limits.max_num_batched_tokens,
            limits.max_model_len,
            max_plans_in_flight,
            limits.max_num_draft_tokens,
        )


@dataclass(frozen=True, slots=True)
class Loaded:
    """The engine is for the step thread, the description for everyone."""

    engine: Engine
    description: Description


Load = Callable[[], Loaded]
