"""Momentum of what brings ranks together.

The momentum of a rank's own optimizer holds gradients of earlier steps that no other rank has seen.
It goes on moving the rank away after its weights have been averaged, by as much as ten more steps.
Averaging momentum, too, would double the messages. But the difference that an exchange finds is
what the momentum made, and so the move towards the partner goes into a momentum, as well:

    w <- w + c + u,    u <- b (u + g c),

where c is the move of an exchange. NoLoCo's modified
Nesterov momentum (arXiv 2506.10911) has this term, too, for the momentum of its outer optimizer;
here it is for that of the steps themselves, and no optimizer has to give access to it.
"""

import torch


class ConsensusMomentum:
    """The momentum of one bucket.

    Args:
        like: a tensor of the kind and shape of the weights, (entries,).
        share: total further move, relative to the move of an exchange.
        decay: b above, over the steps between two calls; 0 < b < 1.
    """

    def __init__(self, like: torch.Tensor, share: float, decay: float) -> None:
        self._decay = decay
        self._gain = share * (1 - decay) / decay
        self.velocity = torch.zeros_like(like)

    def move(self, change: torch.Tensor) -> None:
        """Add the momentum to the move of an exchange, in place; shape (entries,)."""
        later = self.velocity.add(change, alpha=self._gain).mul_(self._decay)
        change += self.velocity
        self.velocity = later

    def coast(self) -> torch.Tensor:
        """Return the move of a step without an exchange; shape (entries,)."""
        move = self.velocity.clone()
        self.velocity *= self._decay
        return move
