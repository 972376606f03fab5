"""Beyond data parallelism: ranks that share samples, and ranks that share layers.

| module | contents |
|---|---|
| `rank_mesh` | `dlio.Mesh`: communicators, slabs, data sets and gradients of the axes |
| `slab` | which part of a dimension a rank has, and which part a layer needs |
| `halo` | parts and sums between ranks, in forward and backward passes |
| `tensor_sharing`, `split_tensor` | tensors that ranks share, on which models run unchanged |
| `spatial_layers`, `spatial_norms`, `spatial_reductions` | torch's functions of these tensors |
| `tensor_parallel` | linear layers in parts, by torch's DTensor |
| `layer_plan`, `layer_parts`, `sharded_layers` | layers in parts of plain tensors: `dlio train` |
"""

from dlio.features.mesh.mesh_axes import AXES, Axes, parse_axes
from dlio.features.mesh.rank_mesh import Mesh
from dlio.features.mesh.slab import Slab
from dlio.features.mesh.split_tensor import SplitTensor, gather, local_part
from dlio.features.mesh.tensor_parallel import (
    AveragedGradients,
    average_gradients,
    tensor_parallel,
)

__all__ = [
    "AXES",
    "AveragedGradients",
    "Axes",
    "Mesh",
    "Slab",
    "SplitTensor",
    "average_gradients",
    "gather",
    "local_part",
    "parse_axes",
    "tensor_parallel",
]
