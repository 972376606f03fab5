"""Remove redundant neurons from a network while it trains.

The idea is that of neuron apoptosis (Siegel, Daily and Vishnu, arXiv 1610.00790).

| module                | contents                                                             |
|-----------------------|----------------------------------------------------------------------|
| `groups.py`           | values: groups of coupled neurons, and their members in each layer   |
| `find.py`             | search a model for groups, heads of attention included               |
| `dependency_graph.py` | translate torch-pruning's dependency graph into groups               |
| `activations.py`      | classify the operations between a layer and its consumers            |
| `verify.py`           | confirm each group on a copy of the model                            |
| `layers.py`           | tensors and attributes of a layer, per side and dimension            |
| `compiled.py`         | models that torch.compile has compiled                               |
| `statistics.py`       | collect activation and gradient statistics with hooks                |
| `removal.py`          | choose the neurons to remove (pure)                                  |
| `similar.py`          | find pairs of neurons with proportional weights (pure)               |
| `apply.py`            | carry a removal plan out in place                                    |
| `cutting.py`          | cut tensors, gradients and optimizer state                           |
| `pruned_layout.py`    | record of everything cut so far, for checkpoints                     |
| `pruned_file.py`      | weights files of pruned models                                       |
| `pace.py`             | when rounds happen, and how much each may remove (pure)              |
| `trial.py`            | try removal plans on a copy of the model                             |
| `agreement.py`        | reductions that give all ranks the same decision                     |
| `window.py`           | the statistics of one round, and the time that they cost             |
| `rounds.py`           | the record of one round                                              |
| `apoptosis.py`        | `dlio.Apoptosis`, which runs all of the above during training        |
| `model_size.py`       | count parameters and FLOPs                                           |
| `copies.py`           | copies of a model for experiments                                    |

    prunable = find_groups(model, example)
    with Collector(model, prunable.groups) as collector:
        ...  # train: backward, collector.step(), optimizer.step()
    weights = weights_of(model, prunable.groups)
    plan = plan_removals(prunable.groups, weights, collector.statistics(), Limits())
    applied = apply(model, prunable.groups, plan, [optimizer])
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dlio.exchange.cut import TensorCut
    from dlio.features.pruning.group_search import find_groups
    from dlio.features.pruning.input_statistics import Collector, InputMoments, Statistics, merge
    from dlio.features.pruning.model_surgery import SurgeryResult, apply
    from dlio.features.pruning.neuron_groups import (
        Activation,
        GroupMember,
        NeuronGroup,
        PrunableGroups,
        UnprunableLayer,
    )
    from dlio.features.pruning.pruned_layout import PrunedLayout, shrink_to
    from dlio.features.pruning.pruning_pace import Schedule
    from dlio.features.pruning.removal_plan import (
        Limits,
        Removal,
        RemovalPlan,
        plan_removals,
        weights_of,
    )

__all__ = [
    "Activation",
    "Collector",
    "GroupMember",
    "InputMoments",
    "Limits",
    "NeuronGroup",
    "PrunableGroups",
    "PrunedLayout",
    "Removal",
    "RemovalPlan",
    "Schedule",
    "Statistics",
    "SurgeryResult",
    "TensorCut",
    "UnprunableLayer",
    "apply",
    "find_groups",
    "merge",
    "plan_removals",
    "shrink_to",
    "weights_of",
]

_WHERE = {
    "Activation": "dlio.features.pruning.neuron_groups",
    "Collector": "dlio.features.pruning.input_statistics",
    "GroupMember": "dlio.features.pruning.neuron_groups",
    "InputMoments": "dlio.features.pruning.input_statistics",
    "Limits": "dlio.features.pruning.removal_plan",
    "NeuronGroup": "dlio.features.pruning.neuron_groups",
    "PrunableGroups": "dlio.features.pruning.neuron_groups",
    "PrunedLayout": "dlio.features.pruning.pruned_layout",
    "Removal": "dlio.features.pruning.removal_plan",
    "RemovalPlan": "dlio.features.pruning.removal_plan",
    "Schedule": "dlio.features.pruning.pruning_pace",
    "Statistics": "dlio.features.pruning.input_statistics",
    "SurgeryResult": "dlio.features.pruning.model_surgery",
    "TensorCut": "dlio.exchange.cut",
    "UnprunableLayer": "dlio.features.pruning.neuron_groups",
    "apply": "dlio.features.pruning.model_surgery",
    "find_groups": "dlio.features.pruning.group_search",
    "merge": "dlio.features.pruning.input_statistics",
    "plan_removals": "dlio.features.pruning.removal_plan",
    "shrink_to": "dlio.features.pruning.pruned_layout",
    "weights_of": "dlio.features.pruning.removal_plan",
}


def __getattr__(name: str) -> object:
    # The options of the feature lie in this package, and are read without torch.
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)
