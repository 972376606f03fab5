"""Remove redundant neurons from a network while it trains.

The idea is that of neuron apoptosis (Siegel, Daily and Vishnu, arXiv 1610.00790).

| module | contents |
|---|---|
| `neuron_groups` | values: groups of coupled neurons, and their tensors in each layer |
| `group_search` | search a model for groups, heads of attention included; verify them on a copy |
| `dependency_graph` | translate torch-pruning's dependency graph into groups |
| `input_statistics` | collect activation and gradient statistics with hooks, in windows |
| `removal_plan` | choose the neurons to remove (pure) |
| `model_surgery` | carry a removal plan out in place; the record of all cuts, for checkpoints |
| `pruned_file` | weights files of pruned models |
| `pruning_pace` | when rounds happen, and how much each may remove (pure) |
| `plan_trials` | try removal plans on a copy of the model |
| `model_wrappers` | models in torch.compile and DistributedDataParallel |
| `apoptosis` | `dlio.Apoptosis`, which runs all of the above during training |
| `pruner` | the pruning of one rank of `dlio train` |
| `model_size` | count parameters and FLOPs; widths for a given fraction of the parameters |

    prunable = find_groups(model, example)
    with Collector(model, prunable.groups) as collector:
        ...  # train: backward, collector.step(), optimizer.step()
    weights = weights_of(model, prunable.groups)
    plan = plan_removals(prunable.groups, weights, collector.statistics(), Limits())
    result = apply(model, prunable.groups, plan, [optimizer])
"""

from typing import TYPE_CHECKING

from dlio.util.lazy import lazy_names

if TYPE_CHECKING:
    from dlio.features.pruning.pruning_pace import Schedule
    from dlio.features.pruning.removal_plan import Limits

__all__ = ["Limits", "Schedule"]

# The options of `dlio train` stand in this package, too: `dlio --help` must not import torch.
__getattr__ = lazy_names(
    {
        "Limits": "dlio.features.pruning.removal_plan",
        "Schedule": "dlio.features.pruning.pruning_pace",
    },
)
