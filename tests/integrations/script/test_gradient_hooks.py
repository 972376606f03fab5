"""Hooks of a script on gradients of samples: those that depend on a rank's part are told."""

from collections.abc import Callable

import pytest
import torch

from dlio.integrations.script.gradient_hooks import GradientHooks


@pytest.mark.parametrize(
    ("hook", "told"),
    [
        (lambda gradient: gradient.clamp(-0.1, 0.1), ""),
        (lambda gradient: gradient / gradient.norm(), "a norm of it"),
        (lambda gradient: gradient - gradient.mean(0), "a mean of it"),
        (lambda gradient: print(gradient.norm()), ""),
    ],
)
def test_a_hook_that_joins_samples_is_told(
    hook: Callable[[torch.Tensor], torch.Tensor | None], told: str
) -> None:
    notes: list[str] = []
    hooks = GradientHooks(lambda _: False, lambda: 0.5, notes.append)
    register = hooks.around_register(torch.Tensor.register_hook)
    x = torch.ones(4, 2, requires_grad=True)
    register(x, hook)
    with hooks.backward():
        torch.autograd.backward(x.square().mean())
    assert (told in notes[0]) if told else not notes
