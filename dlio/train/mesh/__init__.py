"""Beyond data parallelism: ranks that share samples, and ranks that share layers.

| module | contents |
|---|---|
| `axes` | `data=2,space=2`, parsed and checked |
| `mesh` | `dlio.Mesh`: communicators, slabs, data sets and gradients of the axes |
| `slab` | which part of a dimension a rank has, and which part a layer needs |
| `messages` | parts and sums between ranks, in forward and backward passes |
| `sharing`, `tensor` | tensors that ranks share, on which models run unchanged |
| `layers`, `norms`, `reductions` | torch's functions of these tensors |
| `tensor_parallel` | linear layers in parts, by torch's DTensor |
"""

from dlio.train.mesh.axes import AXES, Axes, parse_axes
from dlio.train.mesh.mesh import Mesh
from dlio.train.mesh.slab import Slab
from dlio.train.mesh.tensor import SplitTensor, gather, local_part
from dlio.train.mesh.tensor_parallel import (
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
