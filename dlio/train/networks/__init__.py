"""Networks of the field, as their papers define them.

| module | holds |
|---|---|
| `classic_networks` | LeNet-5, AlexNet, GoogLeNet |
| `resnet` | the small network for trials, and ResNet-50 |
| `transformer` | ViT |
| `mlp`, `autoencoder` | for tables, and for images without labels |
| `convnet` | for arrays, such as volumes; `UNet` for masks |

`dlio.train.model` has those for images by name.
"""
