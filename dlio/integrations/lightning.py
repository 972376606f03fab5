"""PyTorch Lightning on dlio's ranks and exchanges.

    import dlio.integrations.lightning

    lightning.Trainer(strategy="dlio", devices=4)
    lightning.Trainer(strategy=DlioStrategy(exchange="gossip+adaptive"))

Start one process per rank with mpirun, srun or torchrun. Importing this module registers the
strategy; Lightning has no plug-in mechanism to find it. Works with both of Lightning's packages,
`lightning` and `pytorch_lightning`; if both are installed, with the one that was imported first.
"""

import atexit
import contextlib
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist

from dlio.comm import Communicator, mpi_ranks, world
from dlio.comm.board import end_step
from dlio.comm.launch_detection import whole_number
from dlio.comm.launch_environment import local_rank, under_mpi
from dlio.comm.survival.recovery import once_on_rank_0, recovery_of, uniform
from dlio.errors import CommError, UsageError
from dlio.exchange import parse_exchange
from dlio.exchange.batch_share import listen, stop_listening
from dlio.exchange.buckets import averaged_state
from dlio.exchange.distribute import ExchangeHandle, distribute
from dlio.exchange.script_takeover import take_over
from dlio.integrations.batch_size import BatchSize
from dlio.integrations.lightning_logs import Logged, LoggedMeans
from dlio.integrations.lightning_losses import LightningLosses, deals_itself
from dlio.integrations.lightning_shares import SharedBatches, count_batches, uncounted
from dlio.integrations.objects import REDUCED, AllGather, broadcast_object, gather_tensor
from dlio.integrations.rank_metrics import keeps_together, reduce_over_ranks
from dlio.util.arguments import unknown_word
from dlio.util.printable import warn_user

_T = TypeVar("_T")


def _package() -> str:
    """Return the name of the Lightning package in use. Raises UsageError if there is none."""
    here = [name for name in ("lightning", "pytorch_lightning") if find_spec(name) is not None]
    if not here:
        raise UsageError("Lightning is not installed: `pip install lightning`")
    return next((name for name in here if name in sys.modules), here[0])


_PACKAGE: Final = _package()
_PYTORCH: Final = "lightning.pytorch" if _PACKAGE == "lightning" else "pytorch_lightning"
_MARK: Final = "of_dlio"
"""Attribute of a function that takes the place of Lightning's."""
_FABRIC: Final = "lightning.fabric" if _PACKAGE == "lightning" else "lightning_fabric"
_strategies: Any = import_module(f"{_PYTORCH}.strategies")
_environments: Any = import_module(f"{_FABRIC}.plugins.environments")
_rank_zero: Any = import_module(f"{_PYTORCH}.utilities.rank_zero")
_seed: Any = import_module(f"{_FABRIC}.utilities.seed")
_data: Any = import_module(f"{_FABRIC}.utilities.data")
_callbacks: Any = import_module(f"{_PYTORCH}.callbacks")
_results: Any = import_module(f"{_PYTORCH}.trainer.connectors.logger_connector.result")


@dataclass(frozen=True, slots=True)
class LaunchInfo:
    """Place of this process among the ranks."""

    by: str
    """The launcher: `mpi`, `torchrun`, or `nobody` for a process started by itself."""
    rank: int
    ranks: int
    local_rank: int
    """Number of this rank among those of its machine."""
    machine: int
    """Number of its machine, in the order of ranks."""

    def now(self) -> "LaunchInfo":
        """Return the place with the present rank and number of ranks, if others have been lost."""
        if self.by == "nobody" or recovery_of(comm := world()) is None:
            return self
        return replace(self, rank=comm.rank, ranks=comm.size)


def launch_info() -> LaunchInfo:
    """Return this process's place. Collective under MPI; torch.distributed need not be set up."""
    if under_mpi() or mpi_ranks() > 1:
        comm = world()
        hosts = uniform(comm, lambda: comm.allgather(socket.gethostname()))
        here = hosts[comm.rank]
        machines = list(dict.fromkeys(hosts))
        return LaunchInfo(
            "mpi", comm.rank, comm.size, hosts[: comm.rank].count(here), machines.index(here)
        )
    rank, ranks = whole_number("RANK"), whole_number("WORLD_SIZE")
    if rank >= 0 and ranks > 0:
        machine = max(0, whole_number("GROUP_RANK"))
        return LaunchInfo("torchrun", rank, ranks, local_rank(rank), machine)
    return LaunchInfo("nobody", 0, 1, 0, 0)


class DlioEnvironment(_environments.ClusterEnvironment):  # type: ignore[misc]
    """The ranks as numbered by their launcher (mpirun, srun or torchrun)."""

    def __init__(self, place: LaunchInfo) -> None:
        self._place = place

    creates_processes_externally = True

    @property
    def main_address(self) -> str:
        raise UsageError("strategy 'dlio' has no main address: its ranks are already connected")

    @property
    def main_port(self) -> int:
        raise UsageError("strategy 'dlio' has no main port: its ranks are already connected")

    @staticmethod
    def detect() -> bool:
        return False  # The strategy brings its environment; Lightning need not look for it.

    def world_size(self) -> int:
        return self._place.now().ranks

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return self._place.now().rank

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return self._place.local_rank

    def node_rank(self) -> int:
        return self._place.machine


class DlioStrategy(_strategies.ParallelStrategy):  # type: ignore[misc]
    """Train on all ranks with one of dlio's exchanges.

    The launcher determines the number of ranks. `devices` and `num_nodes` only select the devices,
    which the ranks of a machine take in turn. A rank's gradients are weighted by the number of
    samples in its batch. Nothing is exchanged while Lightning accumulates gradients.

    With `gossip` and `asgd`, weights differ between ranks. Checkpoints, and the model after `fit`,
    hold the mean over all ranks.

    A `dlio.DataLoader` divides its data among the ranks itself; torch's loaders get Lightning's
    DistributedSampler. Under MPI, torch.distributed is initialised from set-up to teardown, for
    metrics that use it.

    A mean that is logged without `sync_dist` is over the samples of all ranks, in an epoch and in
    the steps that loggers or progress bars get.

    Where ranks survive the loss of others, training continues without them: each sample of a
    `dlio.DataLoader` is still used once an epoch. Rank and world size are then those of the
    survivors. torch.distributed is not initialised then; the module's torchmetrics are
    reduced over the survivors.

    Args:
        exchange: name of an exchange, as for `dlio train --exchange`.
        seed: seed for the choice of partners (gossip, asgd).
        pretend_nodes: divide the ranks into this many groups and treat each as a node.
        options: arguments of Lightning's ParallelStrategy.

    Raises UsageError for an invalid exchange. Create it on all ranks with the same arguments.
    """

    strategy_name = "dlio"
    model: Any

    def __init__(
        self,
        exchange: str = "allreduce",
        *,
        seed: int = 0,
        pretend_nodes: int | None = None,
        **options: Any,
    ) -> None:
        self._spec = parse_exchange(exchange)
        self._start = partial(
            distribute,
            exchange=exchange,
            seed=seed,
            pretend_nodes=pretend_nodes,
            follow_steps=False,
        )
        take_over()
        self._began = launch_info()
        options.setdefault("cluster_environment", DlioEnvironment(self._began))
        super().__init__(**options)
        self.num_nodes = 1
        self._ranks: ExchangeHandle | None = None
        self._losses: LightningLosses | None = None
        """None where the job ends with any rank."""
        self._batch_size = BatchSize()
        self._owns_group = self._failed = False
        self._batches = SharedBatches()
        self._weight = self._latest_weight = 1.0
        """Of this rank in means over ranks, inside a step; and in the latest step."""
        self._logs: LoggedMeans | None = None

    @property
    def _place(self) -> LaunchInfo:
        return self._began.now()

    @property
    def is_distributed(self) -> bool:
        return self._place.ranks > 1

    @property
    def root_device(self) -> torch.device:
        devices: Any = self.parallel_devices or [torch.device("cpu")]
        device: torch.device = devices[self._began.local_rank % len(devices)]
        return device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        place = self._place
        return {"num_replicas": place.ranks, "rank": place.rank}

    def set_world_ranks(self) -> None:
        """Called by Lightning when it creates the trainer."""
        _rank_zero.rank_zero_only.rank = self._place.rank
        devices: Any = self.parallel_devices or []
        if self._place.by == "nobody" and len(devices) > 1 and devices[0].type == "cpu":
            warn_user(
                f"devices={len(devices)}, but this is the only process: strategy 'dlio' starts "
                f"none; start the script with mpirun -n {len(devices)}, srun or torchrun",
                stacklevel=2,
            )

    def statistics(self) -> dict[str, float]:
        """Totals of this rank by name: `wait_s`, `messages`, `bytes`, in some exchanges more."""
        return {} if self._ranks is None else self._ranks.statistics()

    # Set-up and teardown.

    def setup_environment(self) -> None:
        super().setup_environment()
        _seed.reset_seed()
        if self._place.ranks == 1 or dist.is_initialized() or recovery_of(world()) is not None:
            return
        if self._place.by == "mpi":
            from dlio.comm.process_group import check_threads, init_process_group

            try:
                check_threads()
            except CommError as error:
                # The exchange does not need a process group, but torchmetrics does.
                _rank_zero.rank_zero_warn(f"torchmetrics will not average over ranks: {error}")
                return
            init_process_group()
            self._owns_group = True
        else:
            on_gpu = self.root_device.type == "cuda"
            if on_gpu:
                torch.cuda.set_device(self.root_device)
            dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
            # Not in teardown: torchrun's store serves only one initialisation per process.
            atexit.register(_destroy_group)

    def setup(self, trainer: Any) -> None:
        self._failed = False
        _leave_loaders_of_ours(trainer)
        self._prepare_for_losses(trainer)
        if trainer.state.fn == "fit" and self._layer_sync is not None:
            self.model = self._layer_sync.apply(self.model)
        super().setup(trainer)
        optimizers = list(self.optimizers) if trainer.state.fn == "fit" else []
        self._ranks = self._start(self.model, optimizers)
        if self.is_distributed:
            listen(self._batches)
            trainer.fit_loop.epoch_loop._get_monitor_value = self._monitored
            self._logs = LoggedMeans(
                trainer,
                self._gathered,
                lambda: self._latest_weight,
                _rank_zero.rank_zero_warn,
            )

    def _prepare_for_losses(self, trainer: Any) -> None:
        if self._losses is not None:
            self._losses.close()
            self._losses = None
        comm = world()
        recovery = recovery_of(comm)
        if recovery is None:
            return
        rank_zero, reset = _rank_zero.rank_zero_only, _data._set_sampler_epoch
        self._losses = LightningLosses(recovery, comm, trainer, rank_zero, reset)
        reduce_over_ranks(self.lightning_module)
        keeps_together(_results._ResultMetric, "compute", _logged_states)
        if not any(isinstance(each, _EpochStart) for each in trainer.callbacks):
            trainer.callbacks.append(_EpochStart())

    def model_to_device(self) -> None:
        self.model.to(self.root_device)

    def on_exception(self, exception: BaseException) -> None:
        self._failed = True

    def teardown(self) -> None:
        stop_listening(self._batches)
        if self._logs is not None:
            self._logs.close()
            self._logs = None
        vars(self.lightning_module.trainer.fit_loop.epoch_loop).pop("_get_monitor_value", None)
        # After an error other ranks may not reach a collective.
        if not self._failed:
            if self._ranks is not None:
                self._ranks.close()
            if self._owns_group and dist.is_initialized():
                dist.destroy_process_group()
                self._owns_group = False
        self._ranks = None
        if self._losses is not None:
            self._losses.close()
            self._losses = None
        super().teardown()

    # Training.

    def finish(self) -> None:
        """Complete pending messages, so that weights are those of the next step. Collective."""
        if self._ranks is not None:
            self._ranks.finish()

    def on_train_start(self) -> None:
        count_batches(self.lightning_module.trainer.fit_loop)

    def on_train_epoch_start(self) -> None:
        """Called by Lightning through a callback of ours. Collective."""
        if self._losses is not None:
            self._losses.begin_epoch()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self._losses is not None:
            self._losses.begin_batch()
        if self._ranks is None:
            return
        share = self._batches.share
        if share is not None and self._ranks.batches is not None:
            self._ranks.batches.use(share)
            return
        fit = self.lightning_module.trainer.fit_loop
        loaders = [] if fit._combined_loader is None else fit._combined_loader.flattened
        usual = getattr(loaders[0], "batch_size", None) if len(loaders) == 1 else None
        for exchange in self._ranks.exchanges:
            exchange.weigh(self._batch_size.of(batch, usual))

    def batch_to_device(self, batch: Any, *args: Any, **options: Any) -> Any:
        moved = super().batch_to_device(batch, *args, **options)
        self._batches.moves(batch, moved)
        return moved

    def training_step(self, *args: Any, **options: Any) -> Any:
        if any(True for _ in self.lightning_module.parameters(recurse=False)):
            self.finish()  # The module's own parameters are read without a forward hook being run.
        with self._counted():
            return super().training_step(*args, **options)

    def validation_step(self, *args: Any, **options: Any) -> Any:
        with self._counted():
            return super().validation_step(*args, **options)

    def test_step(self, *args: Any, **options: Any) -> Any:
        with self._counted():
            return super().test_step(*args, **options)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Have ranks count by their samples of the batch in means over ranks. One that repeats
        other ranks' samples is kept out of the module's metrics."""
        share = self._batches.share
        self._latest_weight = 1.0 if share is None else share.weight
        if share is None:
            yield
            return
        self._weight = share.weight
        try:
            with contextlib.nullcontext() if share.samples else uncounted(self.lightning_module):
                yield
        finally:
            self._weight = 1.0

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        if self._ranks is None:
            yield
            return
        self._ranks.hold(True)
        try:
            yield
        finally:
            self._ranks.hold(False)

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **options: Any
    ) -> Any:
        """Step an optimizer, with the exchange between backward and gradient clipping.

        Lightning's closure runs forward and backward, so the exchange is called at its end. It is
        also called after the step, even if a gradient scaler has skipped the step.
        """
        ranks = self._ranks
        if ranks is None:
            return super().optimizer_step(optimizer, closure, model, **options)

        def with_exchange() -> Any:
            result = closure()
            ranks.before_step(optimizer)
            return result

        agreed = ranks.agreed(optimizer, with_exchange)
        output = super().optimizer_step(optimizer, agreed, model, **options)
        ranks.after_step(optimizer)
        if self._losses is not None:
            self._losses.end_step(optimizer)
        return output

    def on_train_end(self) -> None:
        self.finish()
        if self._ranks_differ:
            self.lightning_module.load_state_dict(self._mean_state())

    def _monitored(self, name: str) -> Any:
        """Return the logged value that a schedule of learning rates follows: its mean over ranks,
        as ranks with other learning rates would get other weights. Collective."""
        own = self.lightning_module.trainer.callback_metrics.get(name)
        if own is None:
            return None
        of_all = self.all_gather(torch.as_tensor(own, dtype=torch.float64))
        if torch.allclose(of_all, of_all[0], rtol=0.0, atol=0.0, equal_nan=True):
            return own
        _rank_zero.rank_zero_warn(
            f"each rank has another {name!r}, which a learning rate follows: the rate follows the "
            "mean over ranks; log the value with sync_dist=True to have it the same everywhere"
        )
        return of_all.mean()

    def on_validation_start(self) -> None:
        end_step()  # It may take any time.
        self.finish()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write a checkpoint on rank 0, or on the next one if that is lost meanwhile. Collective
        where ranks survive others."""
        save = super().save_checkpoint
        if self._losses is None:
            save(checkpoint, filepath, storage_options)
            return
        end_step()  # It may take any time.
        act = once_on_rank_0(world(), lambda: save(checkpoint, filepath, storage_options))
        self._losses.together(act)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """State to be saved, the same on all ranks. Collective."""
        self.finish()
        if self._ranks_differ:
            return self._mean_state()
        state: dict[str, Any] = super().lightning_module_state_dict()
        return state

    def _mean_state(self) -> dict[str, Any]:
        return self._together(lambda: averaged_state(self.lightning_module, world()))

    @property
    def _ranks_differ(self) -> bool:
        return self._place.ranks > 1 and self._spec.ranks_differ

    # Between ranks.

    def _together(self, act: Callable[[], _T]) -> _T:
        """Return `act()` when it has succeeded on all survivors. Collective."""
        return uniform(world(), act) if self._losses is None else self._losses.together(act)

    def _comm(self) -> Communicator | None:
        """Return the ranks' communicator; None if this process is (still) the only rank."""
        comm = world()
        return comm if comm.size > 1 else None

    def _gathered(self, logged: Logged) -> list[Logged]:
        comm = self._comm()
        return [logged] if comm is None else self._together(lambda: comm.allgather(logged))

    def barrier(self, name: str | None = None) -> None:
        if (comm := self._comm()) is not None:
            self._together(comm.barrier)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return rank `src`'s object. Collective.

        If that rank is lost meanwhile, it is the object of the first one that is left.

        Args:
            obj: a tensor, or plain values and containers (see `objects.broadcast_object`).

        Raises UsageError for any other type.
        """
        comm = self._comm()
        if comm is None:
            return obj
        recovery = recovery_of(comm)
        if recovery is None:
            return broadcast_object(obj, comm, src)
        membership = recovery.membership
        member = membership.members[src]

        def tell() -> object:
            left = membership.members
            return broadcast_object(obj, comm, left.index(member) if member in left else 0)

        return self._together(tell)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over all ranks, in place as Lightning's own strategies do. Collective.

        In a step on a batch of dlio's loader, ranks count by their samples in a mean: that of a
        value over each rank's samples is the one over the whole batch.

        Args:
            reduce_op: `mean`, `sum`, `max`, `min` or `product`. The mean of integers is a new float
                tensor.

        Raises UsageError for any other `reduce_op`.
        """
        comm = self._comm()
        if comm is None or not isinstance(tensor, torch.Tensor):
            return tensor
        if group is not None:
            distributed: Any = import_module(f"{_FABRIC}.utilities.distributed")
            return distributed._sync_ddp_if_available(tensor, group, reduce_op)
        name = "mean" if reduce_op is None else str(reduce_op).rpartition(".")[2].lower()
        if name not in REDUCED:
            raise unknown_word("reduce_op", reduce_op, REDUCED)
        if name in ("mean", "avg") and not tensor.is_floating_point():
            tensor = tensor.float()
        own = tensor.detach() * self._weight if name in ("mean", "avg") else tensor
        rows = self._together(lambda: gather_tensor(own, comm))
        reduced = REDUCED[name](rows).to(tensor.dtype)
        return tensor.detach().copy_(reduced)

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        comm = self._comm()
        if comm is None:
            return tensor
        if group is not None:
            return super().all_gather(tensor, group, sync_grads)
        if sync_grads:
            return AllGather.apply(tensor, comm)  # type: ignore[no-untyped-call]
        return self._together(lambda: gather_tensor(tensor, comm))


def _leave_loaders_of_ours(trainer: Any) -> None:
    """Keep Lightning from adding a sampler to a loader that shares its data itself.

    Lightning versions without the hook that this replaces do add a sampler, and the loader uses it.
    """
    connector = trainer._data_connector
    asked = getattr(connector, "_requires_distributed_sampler", None)
    if asked is None or getattr(asked, _MARK, False):
        return

    def requires(loader: Any) -> bool:
        # For predictions Lightning needs its own sampler, to restore the order of samples.
        return not (deals_itself(loader) and not trainer.predicting) and bool(asked(loader))

    setattr(requires, _MARK, True)
    connector._requires_distributed_sampler = requires


class _EpochStart(_callbacks.Callback):  # type: ignore[misc]
    """Tells the strategy that an epoch begins, which Lightning does not."""

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        trainer.strategy.on_train_epoch_start()


def _logged_states(metric: Any) -> tuple[str, ...]:
    """Return the attributes of Lightning's logged value that its computation changes."""
    return ("cumulated_batch_size",) if hasattr(metric, "cumulated_batch_size") else ()


def _destroy_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


_strategies.StrategyRegistry.register(
    "dlio", DlioStrategy, description="dlio's exchanges, on ranks of MPI or torchrun", override=True
)
