"""Start ranks on the nodes of an allocation: under mpirun, or by srun or a remote shell.

mpirun of Open MPI starts its daemons by srun within Slurm, and by ssh otherwise. Without MPI the
ranks of Slurm are tasks of srun, which take their places as `dlio.launch.slurm_tasks` does; on
other batch systems each node has an agent for its ranks (`dlio.launch.node_ranks`). It gets its
orders on its standard input, where nobody else on the host reads the job's secret, and ends its
ranks when that closes.
"""

import os
import secrets
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Final

from dlio.comm.launch_detection import meeting_port, whole_number
from dlio.launch import mpi_launch
from dlio.launch.agent_links import NodeProcess, no_agent
from dlio.launch.job_folder import open_job_folder
from dlio.launch.rank_environment import rank_environment, root_permission
from dlio.launch.rank_log import logged
from dlio.launch.rank_output import ErrorFilter, RankOutput
from dlio.util.child_processes import module_command, printed_by
from dlio.util.live_line import LiveLine
from dlio.util.settings import SECRET, settings
from dlio.util.signals import RESUME_CODE, receiving, say_nothing_is_saved

_PASSED: Final = (
    *"PATH LD_LIBRARY_PATH PYTHON VIRTUAL_ENV CONDA_ LANG LC_ TZ TMPDIR XDG_CACHE_HOME".split(),
    *"DLIO_ OMP_ MKL_ KMP_ TORCH NCCL_ GLOO_ CUDA_HOME CUDA_LAUNCH HF_ WANDB_ MLFLOW_".split(),
    *"AWS_ UCX_ FI_ MPI4PY_".split(),
)
"""Beginnings of the variables that mpirun passes to other nodes: those of a node stay with it."""
_NODE_LOST: Final = 1
_LOOK_S: Final = 0.1
_ANSWER_TIMEOUT_S: Final = 30.0
_END_TIMEOUT_S: Final = 15.0
_NO_SHELL: Final = 255
"""Exit code of ssh where it does not reach the host."""


def passed_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the names of the variables to pass to other nodes."""
    return sorted(name for name in environment if name.startswith(_PASSED))


def mpirun_command(
    mpirun: str,
    argv: Sequence[str],
    counts: Mapping[str, int],
    environment: Mapping[str, str],
    machines: str | None,
) -> list[str]:
    """Return the command that starts `argv` by mpirun, on each host as often as `counts` says; with
    a file of the hosts, `machines`, for another mpirun than Open MPI's.
    """
    ranks = str(sum(counts.values()))
    if machines is not None:
        return [mpirun, "-machinefile", machines, "-n", ranks, *argv]
    hosts = ",".join(f"{host}:{count}" for host, count in counts.items())
    passed = [word for name in passed_variables(environment) for word in ("-x", name)]
    options = ["--host", hosts, "--bind-to", "none", "--oversubscribe", *passed]
    return [mpirun, *options, "-n", ranks, *argv]


def run_under_mpirun(argv: Sequence[str], counts: Mapping[str, int]) -> int:
    """Run a program on the hosts of `counts` under mpirun, and return its exit code.

    Raises UsageError if mpirun is not installed.
    """
    mpirun = mpi_launch.find_mpirun()
    environment = _environment(counts)
    with ExitStack() as stack:
        machines = None
        if mpi_launch.is_open_mpi(mpirun):
            environment |= root_permission()
            if (shell := settings().remote_shell) is not None:
                environment.setdefault("PRTE_MCA_plm_ssh_agent", shell)
        else:
            file = stack.enter_context(tempfile.NamedTemporaryFile("w", suffix=".hosts"))
            file.writelines(f"{host}:{count}\n" for host, count in counts.items())
            file.flush()
            machines = file.name
        command = mpirun_command(mpirun, logged(argv), counts, environment, machines)
        return _relayed(command, environment)


def srun_command(argv: Sequence[str], counts: Mapping[str, int]) -> list[str]:
    """Return the command that starts `argv` by srun, on each host as often as `counts` says."""
    ranks, per_node = sum(counts.values()), max(counts.values())
    # Tasks fill the nodes in the order of the list, so that nodes may have unequal numbers.
    hosts = ",".join(host for host, count in counts.items() for _ in range(count))
    equal = len(set(counts.values())) == 1
    placed = [f"--ntasks-per-node={per_node}"] if equal else ["--distribution=arbitrary"]
    return [
        "srun",
        *"--mpi=none --overlap --overcommit --cpu-bind=none --export=ALL".split(),
        *(f"--nodes={len(counts)}", f"--ntasks={ranks}", *placed),
        f"--nodelist={','.join(counts) if equal else hosts}",
        # One that ends may wait for the others' last checkpoint.
        f"--wait={max(60, int(settings().timeout_s))}",
        *argv,
    ]


def run_under_srun(words: Sequence[str], counts: Mapping[str, int]) -> int:
    """Run the words of `dlio launch` in tasks of srun, which meet by torch.distributed.

    Returns the exit code.
    """
    port = meeting_port(secrets.randbits(32))
    environment = _environment(counts)
    environment.setdefault("MASTER_ADDR", slurm_address(next(iter(counts))))
    environment.setdefault("MASTER_PORT", str(port))
    environment.setdefault(SECRET, secrets.token_hex(32))
    # Of the allocation: srun would take them for options of the step.
    for name in ("SLURM_NTASKS_PER_NODE", "SLURM_CPUS_PER_TASK", "SLURM_NTASKS", "SLURM_NPROCS"):
        environment.pop(name, None)
    task = module_command("dlio.cli", "launch", "--backend", "torch", *words)
    return _relayed(srun_command(task, counts), environment)


def slurm_address(node: str) -> str:
    """Return the address by which Slurm reaches a node; its name if Slurm does not say."""
    said, _ = printed_by(["scontrol", "--oneliner", "show", "node", node], _ANSWER_TIMEOUT_S)
    words = [word.partition("=") for word in said.split()]
    return next((value for key, _, value in words if key == "NodeAddr" and value), node)


def _environment(counts: Mapping[str, int]) -> dict[str, str]:
    cores = max(0, whole_number("SLURM_CPUS_ON_NODE")) or None
    return rank_environment(max(counts.values()), cores=cores, terminal=False)


def _relayed(command: Sequence[str], environment: Mapping[str, str]) -> int:
    sorter = ErrorFilter()
    output = RankOutput(1, LiveLine("", shown=False), sorter)
    with open_job_folder() as folder:
        code = mpi_launch.relayed(command, environment, output, folder)
    if sorter.lost_node and not code:
        sys.stderr.write("dlio: error: mpirun lost a node, and the ranks with it\n")
        return _NODE_LOST
    return code


def run_by_remote_shell(argv: Sequence[str], counts: Mapping[str, int]) -> int:
    """Run a program on the hosts of `counts`, and return the first failure's exit code.

    SIGUSR1 is passed on to the ranks. The end of one host's ranks by a failure ends all.
    """
    with ExitStack() as stack:
        agents = []
        for host, order in zip(counts, _orders(logged(argv), counts), strict=True):
            agent = NodeProcess(host, "dlio.launch.node_ranks")
            stack.callback(agent.end, _END_TIMEOUT_S)
            stack.callback(agent.close)
            agents.append(agent)
            agent.order(order)

        def ask_to_end() -> None:
            for agent in agents:
                agent.order({"signal": "USR1"})

        with receiving(ask_to_end) as end_order:
            code = _wait(agents)
        if not end_order.explains(code):
            return code
        if code != RESUME_CODE:
            say_nothing_is_saved()
        return RESUME_CODE


def _orders(argv: Sequence[str], counts: Mapping[str, int]) -> list[dict[str, object]]:
    """Return the first order of each host's agent: its ranks and their environment."""
    common = {name: os.environ[name] for name in passed_variables(os.environ)}
    common |= {
        "MASTER_ADDR": os.environ.get("MASTER_ADDR") or next(iter(counts)),
        "MASTER_PORT": os.environ.get("MASTER_PORT") or str(meeting_port(secrets.randbits(32))),
        "WORLD_SIZE": str(sum(counts.values())),
        SECRET: os.environ.get(SECRET) or secrets.token_hex(32),
    }
    orders: list[dict[str, object]] = []
    first = 0
    for node, count in enumerate(counts.values()):
        own = {"LOCAL_WORLD_SIZE": str(count), "GROUP_RANK": str(node)}
        order = {"argv": list(argv), "folder": os.getcwd(), "first": first, "count": count}
        orders.append({**order, "environment": {**common, **own}})
        first += count
    return orders


def _wait(agents: Sequence[NodeProcess]) -> int:
    while True:
        codes = [agent.process.poll() for agent in agents]
        for agent, code in zip(agents, codes, strict=True):
            if code == _NO_SHELL:
                sys.stderr.write(f"dlio: error: {no_agent(agent.node)}\n")
            if code:
                return 128 - code if code < 0 else code
        if all(code == 0 for code in codes):
            return 0
        time.sleep(_LOOK_S)
