"""Networks of the field, as their papers define them, and random batches for them.

| module | holds |
|---|---|
| `convolutions` | LeNet-5, AlexNet, GoogLeNet |
| `transformer`, `recurrent`, `volumes` | ViT, LSTM, 3-D U-Net |
| `registry` | all by name, and their batches |
"""

__all__: list[str] = []
