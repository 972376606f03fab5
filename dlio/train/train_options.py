"""The options of a training run that belong to no feature, in records by subject."""

import datetime
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal, Self

from dlio.data.splits import ReaderChoices, SplitChoice
from dlio.errors import UsageError
from dlio.exchange.exchange_spec import COMPRESSORS, ExchangeSpec, parse_exchange
from dlio.train.feature_spec import FeatureSpec, find_features, option_records
from dlio.train.learning_rate import SCHEDULES
from dlio.train.names import DEFAULT_MODEL, TASK_NAMES
from dlio.util.options import RECORDS, CheckedOptions, Option, as_mapping, from_mapping

MIN_IMAGE_SIZE: Final = 32
"""Pixels: of a smaller image too little is left after the strides of the model."""
MODEL_NAMES: Final = (
    *("resnet", "resnet50", "googlenet", "alexnet", "lenet", "vit"),
    *("mlp", "autoencoder", "unet", "convnet"),
)
"""Models of `dlio.train.model` that --model takes, besides `module:factory`."""


@dataclass(frozen=True, slots=True)
class DataOptions(CheckedOptions):
    """The data sets of a run, and the images that are made of them."""

    source: Annotated[
        str,
        Option(
            "Training data: class folders of images, a packed data set, a table, or a folder that "
            "holds train/ and val/.",
            positional=True,
            metavar="SRC",
        ),
    ]
    val: Annotated[
        str | None,
        Option("Held-out data set, evaluated after each epoch.", metavar="PATH"),
    ] = None
    split: SplitChoice = None
    val_split: Annotated[
        str | None,
        Option("Split of the held-out data set; without --val one of SRC.", metavar="NAME"),
    ] = None
    reader_option: ReaderChoices = ()
    replica: Annotated[
        tuple[str, ...],
        Option(
            "Another place that holds SRC; reads go to the fastest. Repeatable.", metavar="PATH"
        ),
    ] = ()
    tiers: Annotated[
        str | None,
        Option(
            "Tiers of each node, fastest first, such as ram:2GiB,/local/scratch:20GiB, or none. "
            "gpu:40GiB:decoded keeps decoded images on each rank's GPU.",
            metavar="TIERS",
            default_text="DLIO_TIERS, or RAM",
        ),
    ] = None
    on_error: Annotated[
        Literal["stop", "skip"],
        Option("Action when a sample cannot be decoded: stop the run, or skip the sample."),
    ] = "stop"
    crop_scale: Annotated[
        float,
        Option(
            "Smallest share of an image's area that a training crop covers; 0.08 is usual for "
            "ImageNet, more for small images.",
            above=0,
            most=1,
        ),
    ] = 0.08
    mixup: Annotated[
        float | None,
        Option(
            "Blend each image and its class with another of the batch, by a share of Beta(A, A).",
            metavar="A",
            above=0,
        ),
    ] = None
    cutmix: Annotated[
        float | None,
        Option(
            "Paste a part of another image into each one, of a share of Beta(A, A); with --mixup, "
            "each image gets one of the two.",
            metavar="A",
            above=0,
        ),
    ] = None
    seed: Annotated[
        int,
        Option("Seed for sample order, crops and initial weights.", least=0, most=2**64 - 1),
    ] = 0


@dataclass(frozen=True, slots=True)
class BatchOptions(CheckedOptions):
    """The batches that a rank's loader makes."""

    batch_size: Annotated[
        int, Option("Samples of each rank in one batch.", unit="samples", least=1)
    ] = 32
    shuffle: Annotated[
        str,
        Option(
            "batch: train each sample on a node that holds it. global: anywhere. local: on the "
            "node that holds it, in all epochs. partial(0.1): as local, with a tenth of the "
            "samples exchanged in each epoch. ring: each rank's samples go to the next rank for "
            "the next epoch.",
            metavar="MODE",
        ),
    ] = "batch"
    source_order: Annotated[
        str,
        Option(
            "How data that no tier holds is read. sample: one sample at a time, in the order of "
            "training. block(16): whole blocks, once in an epoch, shuffled among 16 blocks; for "
            "small samples.",
            metavar="ORDER",
        ),
    ] = "sample"
    workers: Annotated[int, Option("Decode threads of each rank.", unit="threads", least=1)] = 2
    decode: Annotated[
        Literal["cpu", "device"],
        Option("Decode JPEGs by the CPU, or on the device by nvImageCodec (extra gpu)."),
    ] = "cpu"
    trace_out: Annotated[
        str | None,
        Option("Write the loader's trace, for Perfetto, to this file.", metavar="FILE"),
    ] = None


@dataclass(frozen=True, slots=True)
class ModelOptions(CheckedOptions):
    """The task, and the network that is trained for it."""

    task: Annotated[
        str | None,
        Option(
            "Task: classify, regress (predict a number), autoencode (images without labels), "
            "segment (a class for each pixel) or table (predict a column).",
            choices=TASK_NAMES,
            default_text="found by the data",
        ),
    ] = None
    target: Annotated[
        str | None,
        Option(
            "Column of a table to predict.", metavar="COLUMN", default_text="a column named label"
        ),
    ] = None
    category: Annotated[
        tuple[str, ...],
        Option(
            "Column of numbers that are names of categories; texts always are. Repeatable.",
            metavar="COLUMN",
        ),
    ] = ()
    model: Annotated[
        str,
        Option(
            "Model to train: resnet, a small residual network for images of 64 to 224 pixels, "
            "resnet(width=64) for a wider one, resnet50, googlenet, alexnet, lenet, vit; mlp, "
            "autoencoder, unet or convnet for other data and tasks, which choose them by "
            "themselves; or module:factory for your own. A factory is called with those of its "
            "parameters that are named classes, image_size, inputs (for tables), channels and "
            "dimensions (for arrays).",
            metavar="MODEL",
        ),
    ] = DEFAULT_MODEL
    weights: Annotated[
        str | None,
        Option("Begin with the weights in this file that fit by name and shape.", metavar="FILE"),
    ] = None
    image_size: Annotated[
        int, Option("Side of the square crops.", unit="pixels", least=MIN_IMAGE_SIZE)
    ] = 64
    precision: Annotated[
        str,
        Option(
            "Number format of forward and backward passes. bf16 and fp16 are mixed: weights stay "
            "float32.",
            choices=("fp32", "bf16", "fp16"),
        ),
    ] = "fp32"
    device: Annotated[
        str,
        Option("Device to train on: auto, cpu, cuda or cuda:N.", metavar="DEVICE"),
    ] = "auto"


@dataclass(frozen=True, slots=True)
class OptimizerOptions(CheckedOptions):
    """The steps of the optimizer."""

    epochs: Annotated[int, Option("Number of passes over the training data.", least=1)] = 3
    accumulate: Annotated[
        int,
        Option("Batches whose gradients are added up before each step of the optimizer.", least=1),
    ] = 1
    optimizer: Annotated[
        str | None,
        Option(
            "Optimizer.",
            choices=("nesterov", "sgd", "adagrad", "rmsprop", "adam", "adamw"),
            default_text="nesterov; adamw for tables, numbers and autoencoders",
        ),
    ] = None
    momentum: Annotated[
        float, Option("Momentum of nesterov, sgd and rmsprop.", least=0, below=1)
    ] = 0.9
    weight_decay: Annotated[
        float | None,
        Option(
            "Weight decay; biases and normalisation layers are left out.",
            least=0,
            default_text="usual for the optimizer",
        ),
    ] = None
    clip: Annotated[
        float | None,
        Option("Largest L2 norm of a step's gradient; a longer gradient is scaled down.", above=0),
    ] = None
    lr: Annotated[
        float | None,
        Option(
            "Peak learning rate.",
            above=0,
            default_text="usual for the optimizer, proportional to the root of the global batch",
        ),
    ] = None
    lr_schedule: Annotated[
        str,
        Option(
            "Course of the learning rate after its warm-up: half a cosine or linear to 0; step: a "
            "tenth after half of the training, and again after three quarters; constant.",
            choices=SCHEDULES,
        ),
    ] = "cosine"


@dataclass(frozen=True, slots=True)
class ExchangeOptions(CheckedOptions):
    """How the ranks of a run share its work."""

    exchange: Annotated[
        str,
        Option(
            "How ranks keep one model: allreduce, hierarchical, tree, parameter-server, gossip, "
            "noloco(32), asgd, local-sgd(8) or diloco(32). A compressor may follow, as in "
            f"allreduce+int8: {', '.join(f'+{name}' for name in COMPRESSORS)}.",
            metavar="EXCHANGE",
        ),
    ] = "allreduce"
    nodes: Annotated[
        str | None,
        Option(
            "Start ranks on these nodes, by ssh: names with commas between them.",
            metavar="NODES",
            default_text="this machine",
        ),
    ] = None
    pretend_nodes: Annotated[
        int | None,
        Option("Number of nodes to pretend: the ranks are divided into this many groups.", least=1),
    ] = None

    @property
    def spec(self) -> ExchangeSpec:
        """The exchange of --exchange. Raises UsageError for an unknown one."""
        return parse_exchange(self.exchange)

    @property
    def node_names(self) -> tuple[str, ...]:
        """The nodes of --nodes; none for this machine alone."""
        return () if self.nodes is None else tuple(self.nodes.split(","))


@dataclass(frozen=True, slots=True)
class SurvivalOptions(CheckedOptions):
    """Options for ranks that are lost, hang, or leave."""

    fault_tolerance: Annotated[
        str,
        Option(
            "shrink: when ranks are lost, the others go on without them, in the same step; each "
            "sample is still trained on exactly once. With --nodes, whole nodes may be lost, too. "
            "restart: -n starts the ranks again, from the newest checkpoint or a copy in the "
            "nodes' memory; for MPI libraries whose ranks do not survive each other (not in `dlio "
            "run`). off: the run ends.",
            choices=("off", "shrink", "restart"),
        ),
    ] = "off"
    min_ranks: Annotated[
        int, Option("Fewest ranks that go on with --fault-tolerance.", least=1)
    ] = 1
    spares: Annotated[
        int,
        Option(
            "Ranks to start beyond -n, which wait: each takes the place of a lost one with the "
            "state of a peer, or joins by `dlio join`.",
            least=0,
        ),
    ] = 0
    leave_at: Annotated[
        str | None,
        Option(
            "Time of day, such as 23:50, at which all ranks finish their batch, write a checkpoint "
            "if --checkpoint is given, and end.",
            metavar="HH:MM",
            default_text="never",
        ),
    ] = None
    on_loss: Annotated[
        Literal["keep", "shrink"],
        Option(
            "After a loss, keep: the global batch and the learning rate stay, and each rank takes "
            "more. shrink: batches of each rank stay, and the learning rate is that of fewer ranks."
        ),
    ] = "keep"
    hang_after: Annotated[
        float | None,
        Option(
            "Time without progress after which a rank that all others of its node wait for hangs "
            "and is killed, with --fault-tolerance shrink; 0 for never.",
            unit="seconds",
            least=0,
            default_text="the longer of 30 seconds and 20 steps",
        ),
    ] = None
    evict_slow: Annotated[
        bool,
        Option(
            "Go on without a rank that computes at less than a fifth of the others' speed, with "
            "--fault-tolerance shrink."
        ),
    ] = False

    @property
    def is_tolerant(self) -> bool:
        """True if the run goes on, or begins again, when ranks are lost."""
        return self.fault_tolerance != "off"

    def seconds_left(self) -> float | None:
        """Return the time until a clock shows --leave-at next; None without it.

        Raises UsageError for another form than HH:MM.
        """
        if self.leave_at is None:
            return None
        try:
            then = datetime.datetime.strptime(self.leave_at, "%H:%M").time()
        except ValueError:
            raise UsageError(
                f"--leave-at {self.leave_at}: give a time of day, such as 23:50"
            ) from None
        now = datetime.datetime.now()
        moment = datetime.datetime.combine(now.date(), then)
        if moment <= now:
            moment += datetime.timedelta(days=1)
        return (moment - now).total_seconds()


@dataclass(frozen=True, slots=True)
class CheckpointOptions(CheckedOptions):
    """Checkpoints, and the weights at the end."""

    checkpoint: Annotated[
        str | None,
        Option("Write checkpoints to this folder while training goes on.", metavar="FOLDER"),
    ] = None
    checkpoint_every: Annotated[
        int | None,
        Option(
            "Steps of the optimizer between two checkpoints, in addition to the ends of epochs.",
            unit="steps",
            least=1,
            default_text="ends of epochs only",
            needs="checkpoint",
        ),
    ] = None
    checkpoint_minutes: Annotated[
        float | None,
        Option(
            "Time between two checkpoints, in addition to the ends of epochs.",
            unit="minutes",
            above=0,
            default_text="ends of epochs only",
            needs="checkpoint",
        ),
    ] = None
    keep: Annotated[
        int, Option("Number of newest checkpoints to keep.", least=1, needs="checkpoint")
    ] = 2
    resume: Annotated[
        bool,
        Option(
            "Continue from the newest checkpoint in --checkpoint, if there is one.",
            needs="checkpoint",
        ),
    ] = False
    save: Annotated[
        str | None, Option("Write the trained weights to this file.", metavar="FILE")
    ] = None


@dataclass(frozen=True, slots=True)
class ResultOptions(CheckedOptions):
    """Reports of a run, and the trace of its samples."""

    report: Annotated[
        str | None, Option("Write a report of the run as JSON to this file.", metavar="FILE")
    ] = None
    trace: Annotated[
        str | None,
        Option(
            "Write the sample numbers of each step to this file, as JSON lines.", metavar="FILE"
        ),
    ] = None
    replay: Annotated[
        str | None,
        Option(
            "Train on the batches of the run that has written this file by --trace, on as many "
            "ranks and with the same options: ranks leave where that run lost them, and the "
            "weights become the same, bit for bit.",
            metavar="FILE",
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class CallbackOptions(CheckedOptions):
    """Callbacks that watch a run."""

    nan: Annotated[
        str,
        Option(
            "Action when the loss is NaN or infinite: stop the run, skip the step, or continue "
            "(off).",
            choices=("stop", "skip", "off"),
        ),
    ] = "stop"
    check_weights: Annotated[
        int | None,
        Option(
            "Steps of the optimizer between two comparisons of the ranks' weights. A rank that "
            "differs from most gets theirs.",
            unit="steps",
            least=1,
            default_text="never",
        ),
    ] = None
    early_stopping: Annotated[
        int | None,
        Option(
            "Stop after this many epochs without a better held-out accuracy.",
            unit="epochs",
            least=1,
            default_text="never",
        ),
    ] = None
    tensorboard: Annotated[
        str | None, Option("Write curves for TensorBoard to this folder.", metavar="FOLDER")
    ] = None
    summaries: Annotated[
        int | None,
        Option(
            "Steps between two histograms of weights and gradients in TensorBoard.",
            unit="steps",
            least=1,
            default_text="no histograms",
            needs="tensorboard",
        ),
    ] = None
    dump_matrices: Annotated[
        str | None,
        Option(
            "Write weights and gradients to this folder as .npy files, after each epoch.",
            metavar="FOLDER",
        ),
    ] = None
    callback: Annotated[
        tuple[str, ...],
        Option(
            "prometheus(file='m.prom'), wandb(...), mlflow(...), or module:factory. Repeatable.",
            metavar="FACTORY",
        ),
    ] = ()


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """The options of `dlio train`, by subject; `TrainConfig` checks them against each other."""

    data: DataOptions
    batches: BatchOptions
    model: ModelOptions
    optimizer: OptimizerOptions
    ranks: ExchangeOptions
    survival: SurvivalOptions
    checkpoints: CheckpointOptions
    results: ResultOptions
    callbacks: CallbackOptions
    features: tuple[object, ...] = field(metadata={RECORDS: option_records})
    """One record for each feature that is installed."""

    def replaced(self, **options: object) -> Self:
        """Return the same with other values of some options, by the names of their fields."""
        return from_mapping(type(self), {**as_mapping(self), **options})

    def each_feature(self) -> Iterator[tuple[FeatureSpec, object]]:
        """Yield the features that are installed, with their options, in their order."""
        return zip(find_features(), self.features, strict=True)

    def active(self) -> Iterator[tuple[FeatureSpec, object]]:
        """Yield the features that are on, with their options, in their order."""
        for feature, options in self.each_feature():
            if feature.label(options) is not None:
                yield feature, options

    def labels(self) -> Mapping[str, str]:
        """Return the words that turn on each feature that is on, by its name."""
        labels = {each.name: each.label(options) for each, options in self.each_feature()}
        return {name: label for name, label in labels.items() if label is not None}

    def labelled(self, *names: str) -> dict[str, bool]:
        """Return, for `refuse`, the words of those of the named features that are on."""
        labels = self.labels()
        return {labels[name]: True for name in names if name in labels}
