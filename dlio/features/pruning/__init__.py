"""Remove redundant neurons from a network while it trains.

The idea is that of neuron apoptosis (Siegel, Daily and Vishnu, arXiv 1610.00790).

| module | contents |
|-----------------------|----------------------------------------------------------------------|
| `neuron_groups.py` | values: groups of coupled neurons, and their members in each layer |
| `group_search.py` | search a model for groups, heads of attention included |
| `dependency_graph.py` | translate torch-pruning's dependency graph into groups |
| `activations.py` | classify the operations between a layer and its consumers |
| `group_verifier.py` | confirm each group on a copy of the model |
| `layer_sides.py` | tensors and attributes of a layer, per side and dimension |
| `eager_steps.py` | models that torch.compile has compiled |
| `input_statistics.py` | collect activation and gradient statistics with hooks |
| `removal_plan.py` | choose the neurons to remove (pure) |
| `twins.py` | find pairs of neurons with proportional weights (pure) |
| `model_surgery.py` | carry a removal plan out in place |
| `layer_cuts.py` | cut tensors, gradients and optimizer state |
| `pruned_layout.py` | record of everything cut so far, for checkpoints |
| `pruned_file.py` | weights files of pruned models |
| `pruning_pace.py` | when rounds happen, and how much each may remove (pure) |
| `plan_trials.py` | try removal plans on a copy of the model |
| `pruning_sums.py` | reductions that give all ranks the same decision |
| `statistics_window.py` | the statistics of one round, and the time that they cost |
| `rounds.py` | the record of one round |
| `apoptosis.py` | `dlio.Apoptosis`, which runs all of the above during training |
| `model_size.py` | count parameters and FLOPs |
| `copies.py` | copies of a model for experiments |

    prunable = find_groups(model, example)
    with Collector(model, prunable.groups) as collector:
        ...  # train: backward, collector.step(), optimizer.step()
    weights = weights_of(model, prunable.groups)
    plan = plan_removals(prunable.groups, weights, collector.statistics(), Limits())
    applied = apply(model, prunable.groups, plan, [optimizer])
"""

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
