"""What a training run is asked to do."""

from dataclasses import dataclass

from dlio.blockorder import window_of
from dlio.errors import UsageError
from dlio.files import check_writable
from dlio.plans import check_mode, check_shares, is_exact

MIN_IMAGE_SIZE = 32


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """One training run; the options of `dlio train`."""

    source: str
    val: str | None = None
    epochs: int = 3
    batch_size: int = 32
    """Per rank."""
    model: str = "resnet"
    image_size: int = 64
    exchange: str = "allreduce"
    balance: bool = False
    """Ranks take shares of the global batch by how fast they compute."""
    shuffle: str = "batch"
    source_order: str = "sample"
    pretend_nodes: int | None = None
    tiers: str | None = None
    replica: tuple[str, ...] = ()
    """Other places where the training data lie."""
    seed: int = 0
    lr: float | None = None
    """Peak learning rate; by default it grows with the root of the global batch."""
    workers: int = 2
    """Decode threads of a rank."""
    on_error: str = "stop"
    device: str = "auto"
    report: str | None = None
    trace: str | None = None
    trace_out: str | None = None
    save: str | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "workers"):
            if getattr(self, name) < 1:
                option = name.replace("_", "-")
                raise UsageError(f"--{option} {getattr(self, name)}: give at least 1")
        check_mode(self.shuffle)
        check_shares(self.shuffle, self.balance)
        from dlio.train.exchange.spec import parse_exchange  # It loads torch.

        parse_exchange(self.exchange)
        if window_of(self.source_order) is not None and not is_exact(self.shuffle):
            raise UsageError(
                f"--source-order {self.source_order} goes with --shuffle batch or global"
            )
        if self.image_size < MIN_IMAGE_SIZE:
            raise UsageError(
                f"--image-size {self.image_size}: give at least {MIN_IMAGE_SIZE} pixels, or too "
                "little is left after the model's strides"
            )
        if not 0 <= self.seed < 2**64:
            raise UsageError(f"--seed {self.seed}: give a number from 0 to 2^64 - 1")
        if self.lr is not None and not self.lr > 0:
            raise UsageError(f"--lr {self.lr}: give a number above 0")

    def peak_lr(self, ranks: int) -> float:
        if self.lr is not None:
            return self.lr
        return float(0.1 * (self.batch_size * ranks / 64) ** 0.5)

    def check_outputs(self) -> None:
        """Find out before the run that its results can be written. Raises UsageError."""
        outputs = {
            "--report": self.report,
            "--trace": self.trace,
            "--trace-out": self.trace_out,
            "--save": self.save,
        }
        for option, path in outputs.items():
            if path is not None:
                check_writable(option, path)
