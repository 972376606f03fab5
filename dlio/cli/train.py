"""`dlio train`: train on this machine's ranks, or as a rank that mpirun started."""

import os
from dataclasses import fields
from typing import Annotated, Literal

import typer

from dlio.cli.ranks import started
from dlio.errors import UsageError
from dlio.train.config import TrainConfig

_TRAIN_FOLDERS = ("train", "training")
_VAL_FOLDERS = ("val", "validation", "valid", "test")


def command(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="Class folders of images, or a packed data set.")
    ],
    ranks: Annotated[
        int | None,
        typer.Option("-n", "--ranks", help="Start this many ranks on this machine.", min=1),
    ] = None,
    val: Annotated[str | None, typer.Option(help="Held-out data set.")] = None,
    epochs: Annotated[int, typer.Option(help="Passes over the data.")] = 3,
    batch_size: Annotated[int, typer.Option(help="Samples of a step, per rank.")] = 32,
    accumulate: Annotated[
        int, typer.Option(help="Batches whose gradients are added before each step.", min=1)
    ] = 1,
    model: Annotated[
        str,
        typer.Option(
            help="resnet, a small one for 64 to 224 pixels, resnet(width=64); or yours: "
            "module:factory, called with those of classes and image_size that it takes."
        ),
    ] = "resnet",
    image_size: Annotated[int, typer.Option(help="Side of the crops, in pixels.")] = 64,
    crop_scale: Annotated[
        float,
        typer.Option(
            help="Least share of an image's area that a crop has: 0.08 is usual for ImageNet, more "
            "for small images."
        ),
    ] = 0.08,
    optimizer: Annotated[
        str, typer.Option(help="nesterov, sgd, adagrad, rmsprop, adam or adamw.")
    ] = "nesterov",
    momentum: Annotated[float, typer.Option(help="Of nesterov, sgd and rmsprop.")] = 0.9,
    weight_decay: Annotated[
        float | None, typer.Option(help="Of weights; biases and norms have none.")
    ] = None,
    clip: Annotated[float | None, typer.Option(help="Largest norm of a step's gradient.")] = None,
    precision: Annotated[
        str, typer.Option(help="fp32; bf16 or fp16: mixed, weights stay float32.")
    ] = "fp32",
    prune: Annotated[
        str, typer.Option(help="apoptosis: cut neurons out that the network can do without; off.")
    ] = "off",
    prune_tolerance: Annotated[
        float | None,
        typer.Option(help="Points of held-out accuracy that pruning may cost; by default 0.5."),
    ] = None,
    exchange: Annotated[
        str,
        typer.Option(
            help="How ranks keep one model: allreduce, hierarchical, tree, parameter-server, "
            "gossip, asgd, local-sgd(8), diloco(32); +bf16, +fp16, +int8, +onebit, +threshold or "
            "+adaptive compresses what is sent."
        ),
    ] = "allreduce",
    balance: Annotated[
        bool,
        typer.Option(
            "--balance",
            help="Ranks that compute faster take more of each global batch; with --shuffle batch "
            "or global.",
        ),
    ] = False,
    skip_samples: Annotated[
        bool,
        typer.Option("--skip-samples", help="Skip samples whose loss has stayed low, unbiased."),
    ] = False,
    skip_share: Annotated[
        float | None,
        typer.Option(help="Skip this share, easy or not; by default what is easy, up to 0.6."),
    ] = None,
    shuffle: Annotated[
        str,
        typer.Option(
            help="batch: samples are trained where they live; global: anywhere; local: on the node "
            "that holds them, all epoch; partial(0.1): a tenth of them elsewhere; ring: what a "
            "rank had goes to its neighbour for the next epoch."
        ),
    ] = "batch",
    source_order: Annotated[
        str,
        typer.Option(
            help="Of what no tier holds. sample: as the order comes to it; block(16): whole blocks "
            "once an epoch, shuffled among 16 at a time, for small samples."
        ),
    ] = "sample",
    pretend_nodes: Annotated[
        int | None, typer.Option(help="Behave as if the ranks were on that many nodes.")
    ] = None,
    tiers: Annotated[
        str | None,
        typer.Option(help="ram:2GiB,/local/scratch:20GiB per node, or none. Or DLIO_TIERS."),
    ] = None,
    replica: Annotated[
        list[str] | None,
        typer.Option(help="Another place where SRC lies; repeatable. Reads go to the fastest."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of order, crops and initial weights.", min=0)] = 0,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    workers: Annotated[int, typer.Option(help="Decode threads of a rank.", min=1)] = 2,
    on_error: Annotated[
        Literal["stop", "skip"], typer.Option(help="At a sample that cannot be decoded.")
    ] = "stop",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    report: Annotated[str | None, typer.Option(help="Write a JSON report to this file.")] = None,
    trace_out: Annotated[
        str | None,
        typer.Option(help="Write what the loader's threads did, for Perfetto, to this file."),
    ] = None,
    trace: Annotated[
        str | None, typer.Option(help="Write every step's samples to this file.")
    ] = None,
    save: Annotated[str | None, typer.Option(help="Write the weights to this file.")] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="Write checkpoints to this folder, while training goes on.")
    ] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(help="Steps between two; the ends of epochs besides.", min=1)
    ] = None,
    keep: Annotated[int, typer.Option(help="Checkpoints that are kept.", min=1)] = 2,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on from the newest checkpoint of --checkpoint, if it holds one."
        ),
    ] = False,
    nan: Annotated[
        str, typer.Option(help="At a loss that is no number: stop; skip the step; off, go on.")
    ] = "stop",
    early_stopping: Annotated[
        int | None,
        typer.Option(help="Stop after so many epochs without a better held-out accuracy.", min=1),
    ] = None,
    tensorboard: Annotated[
        str | None, typer.Option(help="Write curves for TensorBoard to this folder.")
    ] = None,
    summaries: Annotated[
        int | None,
        typer.Option(help="Steps between histograms of weights and gradients there.", min=1),
    ] = None,
    dump_matrices: Annotated[
        str | None,
        typer.Option(help="Write weights and gradients to this folder, each epoch, as .npy."),
    ] = None,
    callback: Annotated[
        list[str] | None,
        typer.Option(help="module:factory of a dlio.train.callbacks.Callback; repeatable."),
    ] = None,
) -> None:
    """Train a small network on a data set, fed from a hierarchy of tiers."""
    given = dict(locals())
    given["source"], given["val"] = find_parts(source, val)
    for name in ("replica", "callback"):
        given[name] = tuple(given[name] or ())
    config = TrainConfig(**{field.name: given[field.name] for field in fields(TrainConfig)})
    run(config, ranks)


def run(config: TrainConfig, ranks: int | None) -> None:
    """Train on `ranks` ranks: start them, or be one of them.

    Raises typer.Exit with the ranks' exit code when they failed.
    """

    def command() -> list[str]:
        assert ranks is not None
        _check(config, ranks)
        return ["train", *to_options(config)]

    if started(ranks, command):
        return

    from dlio.comm import world
    from dlio.train.trainer import train

    done = train(config)
    if world().rank == 0:
        done.print()


def to_options(config: TrainConfig) -> list[str]:
    """The command line that asks for `config`."""
    options = [config.source]
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name == "source" or value is None:
            continue
        option = f"--{field.name.replace('_', '-')}"
        if isinstance(value, bool):
            options += [option] if value else []
            continue
        for each in value if isinstance(value, tuple) else (value,):
            options += [option, str(each)]
    return options


def find_parts(source: str, val: str | None) -> tuple[str, str | None]:
    """A folder that holds nothing but train/ and val/ stands for the two."""
    if not os.path.isdir(source):
        return source, val
    inside = sorted(entry.name for entry in os.scandir(source) if entry.is_dir())
    train = [name for name in inside if name.lower() in _TRAIN_FOLDERS]
    held_out = [name for name in inside if name.lower() in _VAL_FOLDERS]
    if len(train) != 1 or len(train) + len(held_out) != len(inside):
        return source, val
    if val is None and held_out:
        # val before test, whatever the alphabet says.
        val = os.path.join(source, min(held_out, key=lambda n: _VAL_FOLDERS.index(n.lower())))
    source = os.path.join(source, train[0])
    typer.echo(f"training on {source}" + (f", held out: {val}" if val else ""))
    return source, val


def _check(config: TrainConfig, ranks: int) -> None:
    """Tell the user what is wrong before ranks are started. Opens, and so lists, the data."""
    from dlio.data.reader import open_reader
    from dlio.storage.spec import choose_tiers
    from dlio.train.model import find_model

    if config.pretend_nodes is not None and not 1 <= config.pretend_nodes <= ranks:
        raise UsageError(f"--pretend-nodes {config.pretend_nodes}: 1 to {ranks}, the ranks of -n")
    find_model(config.model)
    config.check_outputs()
    choose_tiers(config.tiers, 0)
    for path in (config.source, config.val, *config.replica):
        if path is not None:
            open_reader(path).close()
