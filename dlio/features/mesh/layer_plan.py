"""Which layers of a model ranks can share, and how: see `layer_parts`."""

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Final, Literal

from torch import nn
from torch.nn import functional

from dlio.errors import UsageError

Kind = Literal["columns", "rows", "gathered", "heads"]
"""`columns` and `rows` are the first and second layer of a pair, `gathered` is a linear layer on
its own, `heads` an attention."""
_LARGE: Final = 65_536
"""Weights from which a linear layer on its own is cut: the messages of smaller ones cost more."""
_POINTWISE: Final = (
    *(nn.ReLU, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Tanh, nn.Sigmoid, nn.Identity),
    nn.Dropout,
)
"""Layers between those of a pair, which work on parts as on the whole; dropout if it drops none."""
_FUNCTIONS: Final = (functional.relu, functional.gelu)


def plan_parts(model: nn.Module, ranks: int) -> dict[str, tuple[Kind, nn.Module]]:
    """Return the layers to cut, by name, with how to cut them. Pure.

    Raises UsageError if there are none.
    """
    modules = list(model.modules())
    used = Counter(id(each) for module in modules for each in module.parameters(recurse=False))
    placed = Counter(id(child) for module in modules for child in module._modules.values())

    def own(layer: nn.Module) -> bool:
        """True if it has one place in the model, and no other layer uses its parameters."""
        return placed[id(layer)] <= 1 and all(used[id(each)] == 1 for each in layer.parameters())

    names = {module: name for name, module in model.named_modules()}
    plan: dict[nn.Module, Kind] = {}
    for module in modules:
        for first, second in _pairs(module):
            both = own(first) and own(second) and first not in plan and second not in plan
            if both and first.out_features % ranks == 0:
                plan[first], plan[second] = "columns", "rows"
        for attention in _attentions(module):
            if own(attention) and attention.num_heads % ranks == 0:
                plan[attention] = "heads"
    for module in modules:
        if type(module) is not nn.Linear or module in plan or not own(module):
            continue
        if module.weight.numel() >= _LARGE and module.out_features % ranks == 0:
            plan[module] = "gathered"
    if not plan:
        raise UsageError(
            f"--mesh model={ranks}: the model has no layer that {ranks} ranks can share: heads of "
            f"nn.TransformerEncoderLayer, or linear layers of {_LARGE:,} weights or more, whose "
            f"outputs are a multiple of {ranks}; give another --model or number of ranks"
        )
    return {names[module]: (kind, module) for module, kind in plan.items()}


def _pairs(module: nn.Module) -> Iterator[tuple[nn.Linear, nn.Linear]]:
    """Yield linear layers, of which the second takes the first one's outputs and nothing else."""
    if type(module) in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer):
        first, second, between = module.linear1, module.linear2, module.activation
        pointwise = between in _FUNCTIONS or type(between) in _POINTWISE
        if pointwise and not _drops(module.dropout) and type(first) is nn.Linear is type(second):
            yield first, second
    if type(module) is nn.Sequential:
        kept = [each for each in module if type(each) not in _POINTWISE or _drops(each)]
        for one, other in itertools.pairwise(kept):
            if type(one) is nn.Linear is type(other):
                yield one, other


def _attentions(module: nn.Module) -> Iterator[nn.MultiheadAttention]:
    """Yield those attentions of a layer of torch's transformers that can be cut by heads."""
    if type(module) in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer):
        for each in module.children():
            if type(each) is nn.MultiheadAttention and not (
                each.dropout
                or not each._qkv_same_embed_dim
                or each.bias_k is not None
                or each.add_zero_attn
            ):
                yield each


def _drops(layer: object) -> bool:
    return isinstance(layer, nn.Dropout) and layer.p > 0
