"""Ranks that share samples or layers: the option `--mesh`, and its rules."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from dlio.errors import UsageError
from dlio.features.mesh.mesh_axes import parse_axes, parse_sizes
from dlio.train.config import TrainConfig
from dlio.train.feature_spec import FeatureSpec, refuse
from dlio.util.options import CheckedOptions, Option


@dataclass(frozen=True, slots=True)
class MeshOptions(CheckedOptions):
    """The axes along which ranks share samples or layers."""

    mesh: Annotated[
        str | None,
        Option(
            "Axes of the ranks: data=2,space=2 arranges 4, of which each two share all samples, in "
            "slabs that they read alone; data=2,model=2: linear layers and heads of attention.",
            metavar="AXES",
            default_text="each rank has samples of its own",
        ),
    ] = None


class MeshFeature(FeatureSpec):
    """`--mesh`."""

    name, order = "mesh", 10
    options = MeshOptions
    hooks = "dlio.features.mesh.mesh_layout:MeshHooks"
    layout = "dlio.features.mesh.mesh_layout:make_layout"
    evaluates = True

    def check(self, options: MeshOptions, config: TrainConfig) -> None:
        if options.mesh is None:
            return
        sizes = parse_sizes(options.mesh)
        parts, slabs = sizes.get("model", 1) > 1, sizes.get("space", 1) > 1
        if parts and slabs:
            raise UsageError(
                f"--mesh {options.mesh}: a model cannot have both layers in parts (model=) and "
                "samples in parts (space=): leave one of them out"
            )
        if not parts and not slabs:
            return
        exchange, tolerance = config.ranks.exchange, config.survival.fault_tolerance
        labels = config.labels()
        of_parts = {
            **config.labelled("layerwise"),
            "--check-weights": config.callbacks.check_weights is not None,
            "--precision fp16": config.model.precision == "fp16",
        }
        refuse(
            {
                f"--exchange {exchange}": not config.ranks.spec.alike,
                f"--fault-tolerance {tolerance}": tolerance != "off",
                "--nodes": config.ranks.nodes is not None,
                "--pretend-nodes": config.ranks.pretend_nodes is not None,
                **config.labelled("balance", "pruning", "skipping"),
                "--on-error skip": config.data.on_error == "skip",
                **config.labelled("compilation"),
                labels.get("batch_norm", ""): "ghost" in labels.get("batch_norm", ""),
                "--trace": config.results.trace is not None,
                "--replay": config.results.replay is not None,
                **(of_parts if parts else {}),
            },
            f"{{option}} does not go with --mesh {options.mesh}, whose ranks share "
            f"{'layers' if parts else 'samples'}: leave one of them out",
        )

    def check_ranks(self, options: MeshOptions, ranks: int) -> None:
        if options.mesh is not None:
            parse_axes(options.mesh, ranks)

    def continues_exchange(self, options: MeshOptions, about: Mapping[str, object]) -> bool:
        before = about.get("mesh")
        return before == options.mesh or not (_cuts_layers(before) or _cuts_layers(options.mesh))


def _cuts_layers(mesh: object) -> bool:
    """True if ranks have parts of layers, for a value of `--mesh` that may have been saved."""
    return isinstance(mesh, str) and parse_sizes(mesh).get("model", 1) > 1
