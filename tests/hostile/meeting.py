"""A rank that meets others by MASTER_ADDR alone, then prints where it listens."""

import os

import torch
import torch.distributed as dist

from dlio.comm.torchdist import environment_world
from tests.hostile.sockets import listening

comm = environment_world()
everyone = comm.allgather(comm.rank)
# A script's own group uses the same store.
dist.init_process_group("gloo")
one = torch.ones(1)
dist.all_reduce(one)
places = sorted({host for host, _ in listening(os.getpid())})
print(everyone, int(one), *places)
dist.barrier()
dist.destroy_process_group()
comm.close()
