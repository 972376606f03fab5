"""Communication between ranks: one protocol, one implementation per file.

| module | contents |
|---|---|
| `comm_protocol`, `communicator_base` | `Communicator` and `Request`, the contract; shared calls |
| `mpi`, `single`, `torchdist` | its implementations: mpi4py, one process, torch.distributed |
| `torch_mail` | messages over TCP for `torchdist` and `store_comm` |
| `net` | the sockets of ranks: where they listen, whom they let in, what they believe |
| `survival` | ranks that survive each other's loss; its docstring says in which order |
| `planned_membership` | ranks that leave by plan, for a replay of a job that lost some |
| `board` | what each rank of a node does, for the others to see |
| `private_store`, `script_store` | the launcher's stores: dlio's own, and torch's for scripts |
| `world` | selects the implementation for this process |
| `launch_environment`, `launch_detection` | the launcher of this process, and its rank |
| `allocation` | the nodes that a batch system has granted |
| `job_nodes`, `data_ranks`, `devices` | facts: nodes, ranks that share data, MPI on GPU memory |
| `gloo`, `common_store` | what torch's gloo needs: devices, and a store of all ranks |
| `float_order` | maxima of floats that keep a NaN of any rank |
| `deadlines`, `progress_thread`, `funnel` | deadlines, background progress, MPI_THREAD_FUNNELED |
| `process_group` | torch.distributed's ProcessGroup over MPI |
"""

from dlio.comm.comm_protocol import Buffer, Communicator, Json, Op, Request
from dlio.comm.world import abort, mpi_ranks, world

__all__ = ["Buffer", "Communicator", "Json", "Op", "Request", "abort", "mpi_ranks", "world"]
