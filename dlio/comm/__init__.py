"""Communication between ranks: one protocol, one implementation per file.

| module | contents |
|---|---|
| `comm_protocol` | `Communicator` and `Request`, the contract |
| `mpi`, `single`, `torchdist` | its implementations: mpi4py, one process, torch.distributed |
| `torch_mail` | messages over TCP for `torchdist` and `store_comm` |
| `net` | the sockets of ranks: where they listen, whom they let in, what they believe |
| `membership`, `ulfm`, `recovery`, `stopped` | ranks that survive each other's loss, over MPI |
| `store_membership`, `store_comm`, `job_store`, `rendezvous` | the same over torch.distributed |
| `private_store`, `script_store` | the launcher's stores: dlio's own, and torch's for scripts |
| `world` | selects the implementation for this process |
| `job_nodes`, `launch_environment`, `devices` | facts: nodes, launcher, MPI on GPU memory |
| `deadlines`, `progress_thread`, `funnel` | deadlines, background progress, MPI_THREAD_FUNNELED |
| `process_group` | torch.distributed's ProcessGroup over MPI |
"""

from dlio.comm.comm_protocol import Buffer, Communicator, Json, Op, Request
from dlio.comm.world import abort, mpi_ranks, world

__all__ = ["Buffer", "Communicator", "Json", "Op", "Request", "abort", "mpi_ranks", "world"]
