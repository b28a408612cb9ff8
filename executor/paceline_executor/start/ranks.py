"""How rank 0 starts its followers, and makes one runner of all ranks. Refuses to know devices but a CPU."""

from dataclasses import replace

from paceline_executor.config import Config, LoadFormat
from paceline_executor.limits import RowLimits
from paceline_executor.ranks.group import OnLost, RankGroup
from paceline_executor.ranks.guard import DrawGuard
from paceline_executor.ranks.messages import encode
from paceline_executor.ranks.order import Order, identity_of
from paceline_executor.ranks.ranked_runner import RankedRunner
from paceline_executor.ranks.ring import BatchRingWriter
from paceline_executor.runner.device.runner import DeviceRunner
from paceline_executor.start.opening import Opened
from paceline_executor.weights import Checkpoint


def start_followers(
    config: Config, opened: Opened, limits: RowLimits, num_threads: int, on_lost: OnLost
) -> RankGroup | None:
    """None for one rank alone. num_threads: of each."""
    if config.tensor_parallel_size == 1:
        return None
    is_dummy = config.load_format is LoadFormat.DUMMY
    order = Order(str(opened.path), is_dummy, config.tensor_parallel_size, num_threads, limits, config.log_level)
    return RankGroup(order, on_lost)


def ranked_runner(group: RankGroup, own: DeviceRunner, whole: Checkpoint) -> RankedRunner:
    """Once all that is compiled is kept. Raises RankError."""
    group.agree(identity_of(whole))
    group.begin()
    group.until_ready()
    writer, degree = BatchRingWriter(group.memory), group.memory.degree
    bytes_per_block = own.kv_geometry.bytes_per_block * degree
    geometry = replace(own.kv_geometry, num_kv_heads=whole.config.num_kv_heads, bytes_per_block=bytes_per_block)
    return RankedRunner(own, geometry, lambda message: writer.write(encode(message)), DrawGuard(group.memory))
