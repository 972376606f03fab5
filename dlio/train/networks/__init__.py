"""Networks of the field, as their papers define them.

| module | holds |
|---|---|
| `classic_networks` | LeNet-5, AlexNet, GoogLeNet |
| `resnet` | the small network for trials, and ResNet-50 |
| `transformer` | ViT |
| `mlp`, `autoencoder`, `unet` | for tables, images without labels, and masks |
| `convnet` | for arrays, such as volumes |

`dlio.train.model` has those for images by name.
"""
