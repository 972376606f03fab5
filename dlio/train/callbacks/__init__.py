"""What looks on while a run trains, and may have a word in it.

A callback of a user's own is named by `--callback module:factory`, as many as wanted.
"""

from dlio.errors import UsageError
from dlio.train.callbacks.base import Callback, Run
from dlio.train.config import TrainConfig

__all__ = ["Callback", "Run", "make_callbacks"]


def make_callbacks(config: TrainConfig, rank: int) -> list[Callback]:
    """Those that a run asks for. Raises UsageError for one that cannot be."""
    from dlio.train.callbacks.early import EarlyStopping
    from dlio.train.callbacks.matrices import MatrixDump
    from dlio.train.callbacks.nan import NanGuard
    from dlio.train.callbacks.tensorboard import TensorBoard
    from dlio.train.factory import call_with, load_factory, split_options

    found: list[Callback] = []
    if config.nan != "off":
        found.append(NanGuard(skip=config.nan == "skip"))
    if config.tensorboard is not None and rank == 0:
        found.append(TensorBoard(config.tensorboard, config.summaries))
    if config.dump_matrices is not None and rank == 0:
        found.append(MatrixDump(config.dump_matrices))
    if config.early_stopping is not None:
        found.append(EarlyStopping(config.early_stopping))
    for text in config.callback:
        name, options = split_options("--callback", text)
        factory = load_factory("--callback", name)
        made = call_with("--callback", name, factory, options, ())
        if not isinstance(made, Callback):
            raise UsageError(
                f"--callback {name}: gave a {type(made).__name__}, not a "
                "dlio.train.callbacks.Callback"
            )
        found.append(made)
    return found
