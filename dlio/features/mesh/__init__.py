"""Beyond data parallelism: ranks that share samples, and ranks that share layers.

| module | contents |
|---|---|
| `mesh_feature`, `mesh_layout` | `dlio train --mesh`: its rules, and its part in a run |
| `mesh_axes` | names and sizes of the axes |
| `rank_mesh` | `dlio.Mesh`: communicators, slabs, data sets and gradients of the axes |
| `slab` | the part of a dimension that a rank has, and the part that a layer needs |
| `halo` | messages between neighbours, in forward and backward passes |
| `tensor_sharing`, `split_tensor` | tensors that ranks share, on which models run unchanged |
| `spatial_layers`, `spatial_norms`, `spatial_reductions` | torch's functions of these tensors |
| `dtensor_layers` | linear layers in parts, by torch's DTensor |
| `layer_parts` | layers in parts of plain tensors, for `dlio train` |
"""

from typing import TYPE_CHECKING

from dlio.util.lazy import lazy_names

if TYPE_CHECKING:
    from dlio.features.mesh.dtensor_layers import average_gradients, tensor_parallel
    from dlio.features.mesh.split_tensor import SplitTensor, gather

__all__ = ["SplitTensor", "average_gradients", "gather", "tensor_parallel"]

# The options of `dlio train` stand in this package, too: `dlio --help` must not import torch.
__getattr__ = lazy_names(
    {
        "SplitTensor": "dlio.features.mesh.split_tensor",
        "average_gradients": "dlio.features.mesh.dtensor_layers",
        "gather": "dlio.features.mesh.split_tensor",
        "tensor_parallel": "dlio.features.mesh.dtensor_layers",
    },
)
