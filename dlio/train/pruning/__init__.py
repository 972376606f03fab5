"""Neurons that a network can do without, found while it trains and cut out of it.

| file            | holds                                                                   |
|-----------------|-------------------------------------------------------------------------|
| `groups.py`     | groups of neurons that go together, as values                           |
| `find.py`       | the groups of a model; heads of attention; what is left alone, and why  |
| `follow.py`     | what torch-pruning's graph says; `activations.py`: what lies on the way |
| `verify.py`     | groups tried out on a copy                                              |
| `layers.py`     | which tensors of a layer belong to its neurons                          |
| `statistics.py` | what neurons do, from hooks                                             |
| `plan.py`       | which neurons go (pure); `similar.py`: which do the same                |
| `apply.py`      | a plan carried out in place; `cutting.py`: tensors and optimizers' state |
| `layout.py`     | what has been cut, for checkpoints; `saved.py`: beside saved weights    |
| `pace.py`       | when to look and how many may go, from what the last rounds did (pure)  |
| `trial.py`      | plans tried on a copy; `ranks.py`: one decision of all ranks            |
| `apoptosis.py`  | `dlio.Apoptosis`, which does all of it while a network trains           |
| `seen.py`       | parameters and FLOPs                                                    |

    found = find_groups(model, example)
    with Collector(model, found.groups) as collector:
        ...  # train: backward, collector.step(), optimizer.step()
    weights = weights_of(model, found.groups)
    removals = plan_removals(found.groups, weights, collector.statistics(), Limits())
    applied = apply(model, found.groups, removals, [optimizer])
"""

from dlio.train.cut import Cut
from dlio.train.pruning.apply import Applied, apply
from dlio.train.pruning.find import find_groups
from dlio.train.pruning.groups import Activation, Group, LeftAlone, Member, PrunableGroups
from dlio.train.pruning.pace import Schedule
from dlio.train.pruning.pruned_layout import PrunedLayout, shrink_to
from dlio.train.pruning.removal import Limits, Removal, RemovalPlan, plan_removals, weights_of
from dlio.train.pruning.statistics import Collector, Moments, Statistics, merge

__all__ = [
    "Activation",
    "Applied",
    "Collector",
    "Cut",
    "Group",
    "LeftAlone",
    "Limits",
    "Member",
    "Moments",
    "PrunableGroups",
    "PrunedLayout",
    "Removal",
    "RemovalPlan",
    "Schedule",
    "Statistics",
    "apply",
    "find_groups",
    "merge",
    "plan_removals",
    "shrink_to",
    "weights_of",
]
