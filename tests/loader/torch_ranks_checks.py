"""Epochs of ranks of torch.distributed, without MPI; run as torchrun would.

Prints JSON lines: those of ranks_checks, and who had which numbers of a list, alone and in a mesh.
"""

import json
import runpy
import sys
from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import dlio

main = runpy.run_path(str(Path(__file__).with_name("ranks_checks.py")))["main"]


def numbers(loader: dlio.DataLoader) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    main(*sys.argv[1:4], "sample", *map(int, sys.argv[4:7]))
    data = list(range(43))
    shared = numbers(dlio.DataLoader(data, 4, shuffle=True, num_workers=1))
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    in_mesh = numbers(dlio.DataLoader(data, 4, shuffle=True, mesh=mesh, num_workers=2))
    with (
        dlio.open(sys.argv[1], tiers="ram:64MiB", image_size=32) as images,
        dlio.DataLoader(images, 4, True, mesh=mesh) as loader,
    ):
        of_images = [loader.last_samples.tolist() for _ in loader]
    print(
        json.dumps({"numbers": shared, "mesh": in_mesh, "images": of_images, "rank": rank}),
        flush=True,
    )
    dist.destroy_process_group()
