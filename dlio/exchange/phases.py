"""The phases of a step in which gradients are averaged, as a state machine."""

from enum import Enum, auto


class StepPhase(Enum):
    """A phase of one rank's step.

                      gradient, held
             +--------------------------->  HELD  <-- gradient, held --+
             |                               |                         |
             |                            gradient                     |
             |                               v                         |
           IDLE  ------- gradient ------> BACKWARD <-- gradient -- AVERAGED
             ^                            |      |                     ^
             |                            |      +-- backward ends ----+
             |                            |           (all messages)   |
             |               backward ends in a thread                 |
             |               that may not send                         |
             |                            v                            |
             |                        UNSENT ---- backward returns ----+
             |
             +--- before_step, from every phase

    "gradient": autograd has accumulated a parameter's gradient. "backward ends": autograd's
    callback at the end of a backward. "backward returns": `Tensor.backward` returns in the thread
    that called it.

    On its way to IDLE, `before_step` averages the gradients that other ranks still expect: from
    HELD and BACKWARD always; from IDLE if this rank announced its samples by `before_backward`,
    because a rank without samples runs no backward, and the others wait for its zeros; from
    AVERAGED never.
    """

    IDLE = auto()
    """No gradient since the last step."""
    HELD = auto()
    """Gradients that no other rank has received yet."""
    BACKWARD = auto()
    """A backward is running; complete buckets are being sent."""
    UNSENT = auto()
    """The backward is over; its messages wait for the thread that may send."""
    AVERAGED = auto()
    """`.grad` holds the mean over all ranks."""
