"""Exchanges of tensors in a device's memory, by torch.distributed.

| module | contents |
|---|---|
| `device_group` | the ranks as a process group: sums, pairs, and bytes from each rank to each |
| `default_group` | torch's default group of the ranks' GPUs, for `dlio train` |
| `side_stream` | the stream of an exchange, and the time that the training waits for it |
| `group_paths` | a bucket's sum on its device: plain, compressed, or along a route |
| `tensor_codec`, `compressors` | compressors of tensors: the contract, and the ones by name |
| `device_half`, `device_int8`, `device_onebit`, `device_sparse` | those of a device |
| `levels`, `numbers` | their parts |

One code path serves GPUs, by NCCL, and the CPU, by gloo; tests run the latter. On a GPU the host
launches all of a sum and waits for none of it.
"""
