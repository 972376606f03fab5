"""Networks of the field, as their papers define them.

| module | holds |
|---|---|
| `classic_networks` | LeNet-5, AlexNet, GoogLeNet |
| `resnet` | the small network for trials, and ResNet-50 |
| `transformer` | ViT |
| `convnet` | networks of arrays of one to three dimensions, with `UNet` |

`dlio.train.model` has those for images by name.
"""
