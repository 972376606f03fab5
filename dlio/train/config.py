"""What a training run is asked to do."""

from dataclasses import dataclass

from dlio.errors import UsageError
from dlio.plan.block_order import window_of
from dlio.plan.epoch import check_mode, check_shares, is_exact
from dlio.util.files import check_writable

MIN_IMAGE_SIZE = 32
_AT_LEAST_ONE = (
    "epochs",
    "batch_size",
    "accumulate",
    "workers",
    "checkpoint_every",
    "keep",
    "early_stopping",
    "summaries",
)
_CHOICES = {
    "optimizer": ("nesterov", "sgd", "adagrad", "rmsprop", "adam", "adamw"),
    "precision": ("fp32", "bf16", "fp16"),
    "nan": ("stop", "skip", "off"),
    "prune": ("off", "apoptosis"),
}
_NEEDS = {
    "checkpoint_every": "checkpoint",
    "resume": "checkpoint",
    "summaries": "tensorboard",
    "early_stopping": "val",
}
"""Options that mean nothing without another."""


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """One training run; the options of `dlio train`."""

    source: str
    val: str | None = None
    epochs: int = 3
    batch_size: int = 32
    """Per rank."""
    accumulate: int = 1
    """Batches whose gradients are added before each step of the optimizer."""
    model: str = "resnet"
    image_size: int = 64
    crop_scale: float = 0.08
    """Least share of an image's area that a crop to train on has."""
    optimizer: str = "nesterov"
    momentum: float = 0.9
    weight_decay: float | None = None
    """By default what is usual with the optimizer."""
    clip: float | None = None
    """Largest norm of a step's gradient."""
    precision: str = "fp32"
    prune: str = "off"
    """`apoptosis`: neurons that the network can do without are cut out while it trains."""
    prune_tolerance: float | None = None
    """Points of held-out accuracy that pruning may cost."""
    exchange: str = "allreduce"
    balance: bool = False
    """Ranks take shares of the global batch by how fast they compute."""
    skip_samples: bool = False
    """Epochs leave out samples whose loss has stayed low."""
    skip_share: float | None = None
    """Of an epoch's samples, easy or not; by default the easy ones, up to 0.6."""
    shuffle: str = "batch"
    source_order: str = "sample"
    pretend_nodes: int | None = None
    tiers: str | None = None
    replica: tuple[str, ...] = ()
    """Other places where the training data lie."""
    seed: int = 0
    lr: float | None = None
    """Peak learning rate; by default the optimizer's usual one, which grows with the root of the
    global batch."""
    workers: int = 2
    """Decode threads of a rank."""
    on_error: str = "stop"
    device: str = "auto"
    report: str | None = None
    trace: str | None = None
    trace_out: str | None = None
    save: str | None = None
    checkpoint: str | None = None
    """A folder of checkpoints."""
    checkpoint_every: int | None = None
    """Steps of the optimizer; by default one checkpoint an epoch."""
    keep: int = 2
    """Checkpoints that are kept."""
    resume: bool = False
    nan: str = "stop"
    early_stopping: int | None = None
    """Epochs without a better held-out accuracy, after which the run ends."""
    tensorboard: str | None = None
    summaries: int | None = None
    """Steps from one summary of gradients and weights to the next."""
    dump_matrices: str | None = None
    callback: tuple[str, ...] = ()
    """`module:factory` of callbacks of the user's."""

    def __post_init__(self) -> None:
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            if value is not None and value < 1:
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
        self._check_skipping()
        if self.image_size < MIN_IMAGE_SIZE:
            raise UsageError(
                f"--image-size {self.image_size}: give at least {MIN_IMAGE_SIZE} pixels, or too "
                "little is left after the model's strides"
            )
        if not 0 < self.crop_scale <= 1:
            raise UsageError(f"--crop-scale {self.crop_scale}: give a share above 0, up to 1")
        if not 0 <= self.seed < 2**64:
            raise UsageError(f"--seed {self.seed}: give a number from 0 to 2^64 - 1")
        for name in ("lr", "clip"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(f"--{name} {value}: give a number above 0")
        self._check_pruning()
        if not 0 <= self.momentum < 1:
            raise UsageError(f"--momentum {self.momentum}: give a number from 0, below 1")
        if self.weight_decay is not None and not self.weight_decay >= 0:
            raise UsageError(f"--weight-decay {self.weight_decay}: give a number from 0")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise UsageError(
                    f"--{name} {getattr(self, name)}: choose one of {', '.join(choices)}"
                )
        for name, other in _NEEDS.items():
            if getattr(self, name) and getattr(self, other) is None:
                raise UsageError(
                    f"--{name.replace('_', '-')} wants --{other.replace('_', '-')}, too"
                )

    def _check_pruning(self) -> None:
        tolerance = self.prune_tolerance
        if tolerance is None:
            return
        if self.prune == "off":
            raise UsageError("--prune-tolerance wants --prune apoptosis, too")
        if not 0 <= tolerance <= 100:
            raise UsageError(f"--prune-tolerance {tolerance}: give points, 0 to 100")

    def _check_skipping(self) -> None:
        from dlio.train.skipping.rule import SHARE

        if self.skip_share is not None and not self.skip_samples:
            raise UsageError("--skip-share wants --skip-samples, too")
        if self.skip_share is not None and not 0 < self.skip_share <= SHARE:
            raise UsageError(f"--skip-share {self.skip_share}: give a share above 0, up to {SHARE}")
        if self.skip_samples and self.epochs < 3:
            raise UsageError(
                f"--skip-samples with --epochs {self.epochs}: the first epoch and the last see all "
                "samples; give 3 or more, and 8 for a gain in time"
            )

    def peak_lr(self, ranks: int) -> float:
        from dlio.train.optimizers import usual_lr  # It loads torch.

        if self.lr is not None:
            return self.lr
        return usual_lr(self.optimizer, self.batch_size * self.accumulate * ranks)

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
