"""Callbacks that observe a training run and may influence it.

Users add their own with `--callback module:factory`, which may be repeated, or one of `CALLBACKS`
by its name.
"""

from dlio.errors import UsageError
from dlio.train.callbacks.callback_base import Callback, Run
from dlio.train.names import CALLBACKS
from dlio.train.train_options import CallbackOptions

__all__ = ["Callback", "Run", "make_callbacks"]


def make_callbacks(options: CallbackOptions, rank: int) -> list[Callback]:
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

    callbacks: list[Callback] = [SlowRankGuard()]
    if options.check_weights is not None:
        callbacks.append(WeightGuard())
    if options.nan != "off":
        callbacks.append(NanGuard(skip=options.nan == "skip"))
    if options.tensorboard is not None:
        callbacks.append(TensorBoard())
    if options.dump_matrices is not None and rank == 0:
        callbacks.append(MatrixDump())
    if options.early_stopping is not None:
        callbacks.append(EarlyStopping())
    for text in options.callback:
        name, given = split_options("--callback", text)
        factory = load_factory("--callback", CALLBACKS.get(name, name))
        callback = call_with("--callback", name, factory, given, ())
        if not isinstance(callback, Callback):
            raise UsageError(
                f"--callback {name}: gave a {type(callback).__name__}, not a "
                "dlio.train.callbacks.Callback"
            )
        callbacks.append(callback)
    return callbacks
