"""Callbacks that observe a training run and may influence it.

Users add their own with `--callback module:factory`, which may be repeated, or one of `CALLBACKS`
by its name.
"""

from dlio.errors import UsageError
from dlio.train.callbacks.callback_base import Callback, Run
from dlio.train.config import TrainConfig
from dlio.train.names import CALLBACKS

__all__ = ["Callback", "Run", "make_callbacks"]


def make_callbacks(config: TrainConfig, rank: int) -> list[Callback]:
    """Make the callbacks that a run's options ask for.

    Raises UsageError for a factory that cannot be called or gives another type.
    """
    from dlio.train.callbacks.early_stopping import EarlyStopping
    from dlio.train.callbacks.matrices import MatrixDump
    from dlio.train.callbacks.nan_guard import NanGuard
    from dlio.train.callbacks.slow_rank_guard import SlowRankGuard
    from dlio.train.callbacks.tensorboard import TensorBoard
    from dlio.train.callbacks.weight_guard import WeightGuard
    from dlio.train.factory import call_with, load_factory, split_options

    callbacks: list[Callback] = [SlowRankGuard(config.evict_slow)]
    if config.check_weights is not None:
        callbacks.append(WeightGuard(config.check_weights))
    if config.nan != "off":
        callbacks.append(NanGuard(skip=config.nan == "skip"))
    survives = config.fault_tolerance != "off"
    if config.tensorboard is not None and (rank == 0 or survives):
        callbacks.append(TensorBoard(config.tensorboard, config.summaries, rank))
    if config.dump_matrices is not None and rank == 0:
        callbacks.append(MatrixDump(config.dump_matrices))
    if config.early_stopping is not None:
        callbacks.append(EarlyStopping(config.early_stopping))
    for text in config.callback:
        name, options = split_options("--callback", text)
        factory = load_factory("--callback", CALLBACKS.get(name, name))
        callback = call_with("--callback", name, factory, options, ())
        if not isinstance(callback, Callback):
            raise UsageError(
                f"--callback {name}: gave a {type(callback).__name__}, not a "
                "dlio.train.callbacks.Callback"
            )
        callbacks.append(callback)
    return callbacks
