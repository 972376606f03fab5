"""Run a script on this rank, with parts of torch replaced while it runs."""

import builtins
import contextlib
import logging
import os
import random
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_pre_hook,
    register_module_parameter_registration_hook,
)

from dlio.comm import Communicator, world
from dlio.comm.job_nodes import find_nodes
from dlio.comm.launch_detection import hidden_launch, show_launch
from dlio.comm.survival.recovery import check_survival, once_on_rank_0, recovery_of, uniform
from dlio.errors import UsageError
from dlio.exchange import Exchange, parse_exchange
from dlio.exchange.buckets import Named, broadcast_tensors, has_shape
from dlio.exchange.distribute import OF_SAMPLES, ExchangeHandle, trained_by
from dlio.exchange.script_takeover import on_takeover
from dlio.integrations.script import share
from dlio.integrations.script.compiled_calls import around_compile
from dlio.integrations.script.file_calls import keep_files_private
from dlio.integrations.script.gradient_hooks import GradientHooks
from dlio.integrations.script.guard import ScriptGuard
from dlio.integrations.script.input_gradients import InputGradients
from dlio.integrations.script.joined_rows import follow_trainer
from dlio.integrations.script.lightning_means import follow_lightning
from dlio.integrations.script.loss_weights import ScriptLossWeights
from dlio.integrations.script.muted_output import muted
from dlio.integrations.script.readings import METHODS, Readings
from dlio.integrations.script.run_options import RunOptions
from dlio.integrations.script.script_failure import telling_failures
from dlio.integrations.script.script_lines import script_line
from dlio.integrations.script.script_randoms import ScriptRandoms
from dlio.integrations.script.share import ScriptContext, SharingLoader
from dlio.train.model_copies import is_bare_copy
from dlio.util.arguments import script_in
from dlio.util.signals import freeing_children
from dlio.util.units import counted

_PLACE: Final = "_dlio_place"
_NAME: Final = "_dlio_name"


def run_script(
    path: str,
    arguments: Sequence[str],
    options: RunOptions,
    observed: Callable[[int, Callable[[], float]], AbstractContextManager[None]] | None = None,
) -> None:
    """Run a script on this rank. Collective. Errors of the script propagate.

    Args:
        observed: the context in which the script runs, of this rank and a function that returns
            the number of its samples in the present batch.

    Raises UsageError if the script does not exist.
    """
    script_in(path)
    comm = world()
    check_survival(comm, options.fault_tolerance, options.min_ranks)
    spec = parse_exchange(options.exchange)
    together = spec.payload == "gradient" and not spec.pairwise
    script = os.path.abspath(path)
    guard = ScriptGuard(comm, together)
    context = ScriptContext(comm, options.batch, options.tiers, guard)
    context.balance = options.balance
    _seed(options.seed)
    argv, folders = sys.argv, list(sys.path)
    sys.argv = [path, *arguments]
    # Python puts a script's folder first, and so a program's of ours unless it is safe from that.
    sys.path[: 0 if sys.flags.safe_path else 1] = [os.path.dirname(script)]
    takeover = _ScriptTakeover(comm, context, options)
    # A log that the script makes of everything holds what it would hold without dlio.
    log = logging.getLogger("dlio")
    propagates, log.propagate = log.propagate, False
    around = observed(comm.rank, lambda: context.weight) if observed else contextlib.nullcontext()
    try:
        with guard.watching(recovery_of(comm) is not None):
            failures = telling_failures(script, comm.rank, context.sizes_in)
            with takeover.installed(), failures, around, freeing_children():
                runpy.run_path(script, run_name="__main__")
            with telling_failures(script, comm.rank):
                takeover.finish()
    finally:
        sys.argv, sys.path[:] = argv, folders
        log.propagate = propagates
        takeover.close()
    if comm.rank == 0:
        for note in takeover.notes():
            sys.stderr.write(f"dlio run: {note}\n")


def _seed(seed: int) -> None:
    """Seed all generators alike on all ranks, so that an unseeded script draws the same numbers."""
    import numpy as np

    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - scripts draw from the global generator
    torch.manual_seed(seed)


class _ScriptTakeover:
    """The replacements of torch's parts, and the objects that the script created with them."""

    def __init__(self, comm: Communicator, context: ScriptContext, options: RunOptions) -> None:
        self._comm, self._context = comm, context
        spec = parse_exchange(options.exchange)
        self._ranks = ExchangeHandle(
            spec,
            comm,
            options.seed,
            options.pretend_nodes,
            naming=self._named,
            added=self._begun_later,
            values=context.guard,
        )
        self._modules: dict[nn.Module, tuple[Exchange, ...]] = {}
        self._made = 0
        """Number of parameters registered so far; each keeps its number as an attribute.

        The number identifies a parameter on all ranks and survives pruning; a memory address does
        neither.
        """
        self._buffers: dict[int, torch.Tensor] = {}
        """Buffers that were broadcast from rank 0, by `id`. Keeping them keeps their ids unique."""
        self._holders: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        """Names of modules with buffers, but for norms."""
        self._computed: WeakSet[nn.Module] = WeakSet()
        """Modules with parameters that have computed."""
        self._unlike: set[nn.Module] = set()
        """Batch norms that have seen other samples than those of other ranks since `eval`."""
        self._watched: set[tuple[nn.Module, Exchange]] = set()
        self._steps = 0
        """Number of optimizer steps so far."""
        self._losses_told = 0
        self._has_told_norm = False
        if (recovery := recovery_of(comm)) is not None:
            nodes = find_nodes(comm, options.pretend_nodes)
            names = [nodes.names[node] for node in nodes.node_of]
            recovery.describe(names, lambda: (0, self._steps))
        context.guard.parameters = self._exchanged
        context.guard.unowned = self._unowned
        context.guard.buffers = self._script_buffers
        self._losses = ScriptLossWeights(comm, context, lambda: self._ranks.exchanges)
        self._hooks = GradientHooks(self._has_means, lambda: context.part, context.say)
        self._inputs = InputGradients(context, lambda: self._ranks.parameters)
        context.mixed_inputs.requires_gradient = self._inputs.require
        self._readings = Readings(context)
        self._randoms = ScriptRandoms(comm.rank, context, lambda: self._ranks.parameters)
        context.between_passes = self._pass_begins
        context.before_backward = self._follow
        context.waited = lambda: self._losses.wait_s + self._ranks.statistics().get("wait_s", 0.0)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Replace parts of torch inside the `with` block; do nothing with one rank."""
        if self._comm.size == 1:
            yield
            return
        share.use(self._context)
        self._files = keep_files_private(self._comm, self._context)
        with hidden_launch(), contextlib.ExitStack() as stack, on_takeover(self._step_aside):

            def put(owner: Any, name: str, value: Any) -> None:
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, value)

            put(torch.utils.data, "DataLoader", SharingLoader)
            put(torch.utils.data.dataloader, "DataLoader", SharingLoader)
            put(torch.optim.Optimizer, "__init__", self._optimizer_made(torch.optim.Optimizer))
            put(nn.Module, "train", self._mode_set(nn.Module.train))
            put(torch, "save", self._saved(torch.save))
            for name in METHODS:
                put(torch.Tensor, name, self._readings.around(getattr(torch.Tensor, name)))
            randoms = self._randoms
            stack.enter_context(randoms.installed())

            compiled = around_compile(
                torch.compile, randoms.show_compiler, self._forward, randoms.inside
            )
            put(torch, "compile", compiled)
            kind = torch.Tensor
            put(kind, "register_hook", self._hooks.around_register(kind.register_hook))
            name = "register_post_accumulate_grad_hook"
            put(kind, name, self._hooks.around_register_after(getattr(kind, name)))
            put(kind, "requires_grad_", self._inputs.around_requiring(kind.requires_grad_))
            put(kind, "retain_grad", self._inputs.around_retaining(kind.retain_grad))
            put(torch.autograd, "grad", self._grad(torch.autograd.grad))
            weighed = self._losses.around_backward(torch.autograd.backward)
            put(torch.autograd, "backward", self._backward(weighed))
            put(
                torch.amp.GradScaler, "scale", self._losses.around_scale(torch.amp.GradScaler.scale)
            )
            for name in ("clip_grad_norm_", "clip_grad_value_"):
                clip = self._clipping(getattr(nn.utils, name))
                put(nn.utils, name, clip)
                put(nn.utils.clip_grad, name, clip)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
            put(plateau, "step", self._plateau_step(plateau.step))
            put(torch.amp.GradScaler, "step", self._scaled_step(torch.amp.GradScaler.step))
            made = self._group_made(torch.distributed.init_process_group)
            put(torch.distributed, "init_process_group", made)
            for hook in (
                register_module_forward_pre_hook(self._called),
                register_module_parameter_registration_hook(self._registered),
            ):
                stack.callback(hook.remove)
            if self._comm.rank:
                os.environ["TQDM_DISABLE"] = "1"
                put(sys, "stdout", muted(sys.stdout, self._comm))
                put(warnings, "showwarning", self._by_rank_0(warnings.showwarning))
                emit = logging.StreamHandler.emit
                put(logging.StreamHandler, "emit", self._emit_by_rank_0(emit))
                put(builtins, "__import__", _without_writers(builtins.__import__))
            yield

    def _pass_begins(self) -> None:
        self._tell()
        context = self._context
        follow_lightning(context)
        if not context.aside:
            follow_trainer(context.comm, context.guard, lambda: context.counts_now)

    def _tell(self) -> None:
        self._readings.tell()
        self._randoms.tell()

    def _by_rank_0(self, original: Callable[..., None]) -> Callable[..., None]:
        """Wrap a function that prints the same on every rank."""

        def show(*args: Any, **options: Any) -> None:
            if self._comm.rank == 0:  # By now, if those before have been lost.
                original(*args, **options)

        return show

    def _emit_by_rank_0(self, original: Callable[..., None]) -> Callable[..., None]:
        """Wrap the output of log records; errors are printed by every rank, as they may be its."""
        printed = self._by_rank_0(original)

        def emit(handler: Any, record: logging.LogRecord) -> None:
            is_report = record.levelno < logging.ERROR and handler.stream is sys.stderr
            (printed if is_report else original)(handler, record)

        return emit

    def _step_aside(self) -> None:
        """Leave the rest of the script to itself, but for the output of ranks other than 0."""
        self._context.aside = True
        show_launch()

    def finish(self) -> None:
        """Complete pending messages, so that weights are those of the next step. Collective."""
        if not self._context.aside:
            self._context.guard.meet("its end", weights=True)
        self._ranks.finish()
        if not self._context.aside:
            self._context.end_passes()
            self._tell()
        uniform(self._comm, self._comm.barrier)  # Nobody leaves while others need it.
        if self._comm.size > 1:
            self._files.hand_over()
        self._tell_losses()

    def close(self) -> None:
        share.use(None)
        # After an error other ranks may not reach a collective.
        if sys.exc_info()[0] is None:
            self._ranks.close()
            self._losses.close()
        self._context.assigner.close()
        self._context.claims.close()
        self._context.worker_draws.close()

    def notes(self) -> list[str]:
        """Limits that the user should know of, one line each."""
        context = self._context
        notes = [*context.notes, *context.guard.notes]
        if context.aside:
            return notes
        if context.assigner.missed:
            notes.append(
                f"not trained on: {counted(context.assigner.missed, 'sample')} of lost ranks, as "
                "the script had taken all batches of the pass before it trained on the last ones"
            )
        if context.last_shares is not None:
            counts = ", ".join(map(str, context.last_shares.counts))
            notes.append(f"samples per batch on each rank in the last training pass: {counts}")
        if self._comm.size > 1 and not context.has_optimizer:
            notes.append(
                "the script created no torch optimizer: every rank did all of the work; the result "
                "is correct, but no faster than one process"
            )
        elif self._comm.size > 1 and self._steps and not context.shared and not context.undivided:
            notes.append(
                "the script trained without a torch DataLoader or without backward(), or had taken "
                "all batches before it trained on the first: every rank computed all samples; the "
                "result is correct, but no faster than one process"
            )
        return notes

    def _optimizer_made(self, kind: type[torch.optim.Optimizer]) -> Callable[..., None]:
        original = kind.__init__

        def made(optimizer: torch.optim.Optimizer, *args: Any, **options: Any) -> None:
            original(optimizer, *args, **options)
            if not self._context.aside:
                self._adopt(optimizer)

        return made

    def _registered(self, module: nn.Module, name: str, parameter: object) -> None:
        if isinstance(parameter, torch.Tensor):
            setattr(parameter, _PLACE, self._made)
            setattr(parameter, _NAME, f"{type(module).__name__}.{name}")
            self._made += 1

    def _adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Synchronise an optimizer's parameters from now on, starting from rank 0's. Collective."""
        self._context.guard.meet("the making of an optimizer")
        fresh = trained_by(optimizer)
        if self._are_of_samples(fresh):
            for parameter in fresh:
                setattr(parameter, OF_SAMPLES, True)
            return
        if any(p.grad is not None and self._ranks.exchange_of(p) is None for p in fresh):
            self._tell_gradients()
        named = self._named([p for p in fresh if self._ranks.exchange_of(p) is None])
        uniform(self._comm, lambda: broadcast_tensors([p for _, p in named], self._comm))
        self._ranks.add(optimizer, named)
        if any(group.get("line_search_fn") for group in optimizer.param_groups):
            # A search decides by comparing losses: by the last bit of a sum it ends elsewhere.
            self._context.divide_no_more()
            self._context.note(
                f"{type(optimizer).__name__} searches along a line, where rounding decides: from "
                "then on every rank computed whole batches, as one process does, and no faster"
            )
        optimizer.register_step_post_hook(self._has_stepped)
        self._context.has_optimizer = True
        self._modules.clear()

    def _are_of_samples(self, parameters: Sequence[torch.Tensor]) -> bool:
        """True if parameters are tensors with a part for each of the rank's samples, such as
        adversarial changes of them. Collective."""
        if not any(self._context.places()):
            return False
        mine = bool(parameters) and all(map(self._inputs.is_of_samples, parameters))
        return all(uniform(self._comm, lambda: self._comm.allgather(mine)))

    def _tell_gradients(self) -> None:
        """Tell of gradients that backward has left before any optimizer had the parameters."""
        self._context.say(
            f"{script_line()}: parameters that no optimizer had have gradients of earlier "
            "batches there, each rank's of its parts, and ranks average their sums: they are "
            "not quite one process's; call zero_grad first if they are not to count"
        )

    def _named(self, parameters: Sequence[nn.Parameter]) -> Named:
        # In the order of the model, in which backward reaches them, not that of parameter groups.
        ordered = sorted(parameters, key=lambda p: getattr(p, _PLACE, -1))
        number = len(self._ranks.exchanges)
        return [(f"parameter {k} of optimizer {number}", p) for k, p in enumerate(ordered)]

    def _exchanged(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, parameter in enumerate(self._ranks.parameters):
            name = getattr(parameter, _NAME, f"number {number}")
            yield f"parameter {name} of shape {tuple(parameter.shape)}", parameter

    def _unowned(self) -> Iterator[tuple[str, torch.Tensor]]:
        of_place = {
            getattr(each, _PLACE): each
            for module in self._computed
            for each in module.parameters(recurse=False)
            # A copy of a model has no places; it is an average of weights, or the best ones.
            if each.requires_grad
            and self._ranks.exchange_of(each) is None
            and has_shape(each)
            and hasattr(each, _PLACE)
        }
        for place, parameter in sorted(of_place.items(), key=lambda item: item[0]):
            # Only the place tells apart those of one kind of module.
            name = f"{getattr(parameter, _NAME, '')} of shape {tuple(parameter.shape)}"
            yield f"parameter {place} ({name})", parameter

    def _script_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        for module, name in self._holders.items():
            for key, buffer in module.named_buffers(recurse=False):
                yield f"buffer {name}.{key}", buffer

    def _follow(self) -> None:
        """Exchange parameters that optimizers have got since the backward before, from the first
        gradient on: the script may read it, such as for SAM."""
        known = len(self._ranks.exchanges)
        self._ranks.follow()
        fresh = self._ranks.exchanges[known:]
        if fresh:
            mine = [p for p in self._ranks.parameters if self._ranks.exchange_of(p) in fresh]
            if any(p.grad is not None and bool(p.grad.any()) for p in mine):
                self._tell_gradients()

    def _begun_later(self, exchange: Exchange) -> None:
        """Prepare the exchange of parameters that an optimizer has got since it was made."""
        weight = self._losses.latest
        exchange.weigh(self._context.weight if weight is None else weight)
        self._modules.clear()

    def _has_stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._steps += 1
        rates = [float(group.get("lr", 0) or 0) for group in optimizer.param_groups]
        self._context.guard.stepped(rates)
        self._files.met()
        self._context.stepped()
        self._tell_losses()

    def _tell_losses(self) -> None:
        """Say that ranks were lost; the lowest of those that are left says it."""
        recovery = recovery_of(self._comm)
        if recovery is None or self._context.aside or self._losses_told == len(recovery.losses):
            return
        for loss in recovery.losses[self._losses_told :]:
            if self._comm.rank == 0:
                sys.stderr.write(f"dlio run: {loss.sentence()}\n")
            if 0 in loss.ranks:
                self._context.note(
                    "rank 0 was lost: progress bars and TensorBoard files of the script end there"
                )
        self._losses_told = len(recovery.losses)

    def _backward(self, original: Callable[..., None]) -> Callable[..., None]:
        def backward(tensors: Any, *args: Any, **options: Any) -> None:
            if self._context.aside:
                original(tensors, *args, **options)
                return
            keeps_graph = bool(options.get("retain_graph") or options.get("create_graph"))
            keeps_graph |= any(args[1:3])  # In torch's order, after the gradients of `tensors`.
            roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            # Of one inside of another, as of checkpoints, gradients go on into the outer one.
            scales = self._inputs.is_used and not self._hooks.is_inside
            with (
                self._hooks.backward(),
                self._inputs.backward(roots, keeps_graph) if scales else nullcontext(),
                self._context.guard.backward(tensors, keeps_graph) as losses,
            ):
                original(tensors, *args, **options)
            if len(losses) < 2:
                return
            if losses[0] in self._context.whole_losses:
                self._context.whole_losses.set(losses, True)
            elif losses[0] in self._context.mixed_losses:
                self._context.mixed_losses.set(losses, True)

        return backward

    def _has_means(self, parameter: torch.Tensor) -> bool:
        exchange = self._ranks.exchange_of(parameter)
        return exchange is not None and exchange.alike and not self._context.aside

    def _grad(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `torch.autograd.grad`, whose gradients of parameters nobody averages."""

        def grad(outputs: Any, inputs: Any, *args: Any, **options: Any) -> Any:
            several = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
            # A compiler calls it, too, for the graph of a backward pass.
            if self._hooks.is_inside or torch.compiler.is_compiling():
                return original(outputs, several, *args, **options)
            if any(self._context.places()) and any(map(self._has_means, several)):
                self._ranks.expect_changes(several)
                self._context.say(
                    f"{script_line()}: torch.autograd.grad gives the gradient of each rank's part "
                    "of a batch there. Ranks average what is added to .grad, by their samples of "
                    "the latest batch, and the gradients of losses that are made of it: one "
                    "process's, where the loss is a mean over samples, of one batch for each step, "
                    "and all between is linear; sums, means over tokens or by class weights, and "
                    "lengths, signs and angles of such gradients are those of the parts"
                )
            else:
                roots = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
                of_samples = all(
                    isinstance(each, torch.Tensor) and self._inputs.is_of_samples(each, roots)
                    for each in several
                )
                if of_samples and not _is_transformed():
                    with self._losses.of_samples(roots):
                        return original(outputs, several, *args, **options)
            return original(outputs, several, *args, **options)

        return grad

    def _clipping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def clip(parameters: Any, *args: Any, **options: Any) -> Any:
            # An iterator can be read once.
            several = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            if not self._context.aside:
                self._ranks.take_clipped(several)
            norm = original(several, *args, **options)
            if isinstance(norm, torch.Tensor):
                self._context.whole_losses.set([norm], True)
            return norm

        return clip

    def _plateau_step(self, original: Callable[..., None]) -> Callable[..., None]:
        """Give a schedule that follows a metric the mean of all ranks' metrics."""

        def step(scheduler: Any, metrics: Any, *args: Any, **options: Any) -> None:
            if not self._context.aside:
                self._context.guard.meet("ReduceLROnPlateau.step")
                mine = [float(metrics), self._context.take_samples()]
                metrics_of_all: list[list[float]] = uniform(
                    self._comm, lambda: self._comm.allgather(mine)
                )
                if any(value != metrics_of_all[0][0] for value, _ in metrics_of_all):
                    total = sum(samples for _, samples in metrics_of_all)
                    metrics = sum(value * samples for value, samples in metrics_of_all) / total
            original(scheduler, metrics, *args, **options)

        return step

    def _scaled_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap GradScaler.step so that the exchange runs even when it skips the optimizer's step.

        Each rank may skip on its own when gradients overflow; in exchanges of weights, other ranks
        would otherwise wait for its message.
        """

        def step(scaler: Any, optimizer: torch.optim.Optimizer, *args: Any, **options: Any) -> Any:
            before = self._steps
            result = original(scaler, optimizer, *args, **options)
            if self._steps == before:
                self._context.stepped()
                self._ranks.before_step(optimizer)
                self._ranks.after_step(optimizer)
            return result

        return step

    def _called(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if not torch.compiler.is_compiling():
            self._forward(module, inputs)

    def _forward(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Prepare a module's forward pass.

        At a module's first pass, its buffers are overwritten with rank 0's. Every pass sets the
        weight of its gradients: the number of samples in this rank's batch. In evaluation, pending
        messages are completed first.

        The weight is set here, not when the loader returns the batch: a script may ask for the next
        batch before it calls backward on this one.
        """
        # Called for each module of each step: cheap questions, and the likely answers first.
        exchanges = self._modules.get(module)
        if self._context.aside or (exchanges is None and is_bare_copy(module)):
            return  # Pruning tries its plan on this copy; it is not trained.
        if self._losses.is_inside:
            return  # A checkpoint computes again: the weight is that of the loss.
        with_gradients = torch.is_grad_enabled()
        if with_gradients:
            self._inputs.computes_on(inputs)
            self._context.use(inputs)
            self._ranks.samples = self._context.weight
        if module.training and isinstance(module, nn.modules.batchnorm._BatchNorm):
            self._unlike.add(module)
            if self._context.divides_now and not self._has_told_norm:
                self._has_told_norm = True
                self._context.note(
                    "batch norm uses the statistics of each rank's share of a batch, and rank 0's "
                    "are saved: weights and losses, also of evaluations, are not those of one "
                    "process, and the fewer samples a rank has the further from them"
                )
        if exchanges is None:
            exchanges = self._look_at(module)
        if exchanges:
            is_training = self._context.training
            for exchange in exchanges:
                if with_gradients:
                    exchange.weigh(self._context.weight)
                if not is_training:
                    exchange.finish()

    def _look_at(self, module: nn.Module) -> tuple[Exchange, ...]:
        buffers = [b for b in module.buffers(recurse=False) if id(b) not in self._buffers]
        if buffers:
            uniform(self._comm, lambda: broadcast_tensors(buffers, self._comm))
            self._buffers.update((id(buffer), buffer) for buffer in buffers)
            if not isinstance(module, nn.modules.batchnorm._NormBase):
                kind = type(module).__name__
                number = sum(name.partition(" ")[0] == kind for name in self._holders.values())
                self._holders.setdefault(module, f"{kind} {number + 1}" if number else kind)
        mine = list(module.parameters(recurse=False))
        if mine:
            self._computed.add(module)
        own = {self._ranks.exchange_of(p) for p in mine}
        exchanges = tuple(exchange for exchange in own if exchange is not None)
        for exchange in exchanges:
            if (module, exchange) not in self._watched:
                self._watched.add((module, exchange))
                exchange.watch(module)
                exchange.finish()  # The hook just registered does not run in this pass.
        self._modules[module] = exchanges
        return exchanges

    def _mode_set(self, original: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        def train(module: nn.Module, mode: bool = True) -> nn.Module:
            self._context.evaluating = not mode
            if not mode and not self._context.aside:
                self._even_out(module)
            return original(module, mode)

        return train

    def _even_out(self, module: nn.Module) -> None:
        """Give batch norms that are evaluated next the statistics of rank 0, which are saved: a
        metric is the same on all ranks then, and so are decisions by it. Collective."""
        mine = [each for each in module.modules() if each in self._unlike]
        if mine:
            self._context.guard.meet("eval()")
            buffers = [buffer for each in mine for buffer in each.buffers(recurse=False)]
            uniform(self._comm, lambda: broadcast_tensors(buffers, self._comm))
            self._unlike.difference_update(mine)

    def _group_made(self, original: Callable[..., None]) -> Callable[..., None]:
        def made(*args: Any, **options: Any) -> None:
            if not self._context.aside:
                raise UsageError(_REFUSED)
            original(*args, **options)

        return made

    def _saved(self, original: Callable[..., None]) -> Callable[..., None]:
        def save(*args: Any, **options: Any) -> None:
            if self._context.aside:
                original(*args, **options)
                return
            self._ranks.finish()
            into = args[1] if len(args) > 1 else options.get("f")
            if not isinstance(into, str | os.PathLike):
                original(*args, **options)  # Into an object of this rank's.
                return
            self._context.guard.meet("torch.save", weights=True)
            name = self._files.saving(into)
            # Other ranks may read the file next: they wait until it is complete.
            act = once_on_rank_0(self._comm, lambda: original(*args, **options))
            uniform(self._comm, act)
            # Names with a time in them differ between ranks.
            own = (name, self._files.is_temporary(name))
            real, is_temporary = uniform(self._comm, lambda: self._comm.tell(own))
            if is_temporary:
                uniform(self._comm, lambda: self._files.spread(name))
            else:
                self._files.saved(name, real)

        return save


_REFUSED: Final = (
    "the script, or a framework in it such as Accelerate, calls torch.distributed's "
    "init_process_group, so it is distributed already: start it with mpirun or torchrun, or remove "
    "that call and use `dlio run`"
)


def _is_transformed() -> bool:
    """True within `torch.func.grad` and its like."""
    return torch._C._functorch.peek_interpreter_stack() is not None


class _MutedWriter:
    """A stand-in for TensorBoard's SummaryWriter that writes nothing, for all ranks but 0."""

    def __init__(self, *_: object, **__: object) -> None:
        self.log_dir = os.devnull

    def __getattr__(self, name: str) -> "_MutedWriter":
        if name.startswith("__"):
            raise AttributeError(name)
        return self  # Frameworks go on to use a writer's parts, such as its file writer.

    def __call__(self, *_: object, **__: object) -> "_MutedWriter":
        return self

    def __enter__(self) -> "_MutedWriter":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _without_writers(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `__import__`: an imported TensorBoard SummaryWriter is replaced by `_MutedWriter`."""

    def imported(name: str, *args: Any, **options: Any) -> Any:
        imported_module = original(name, *args, **options)
        if "tensorboard" in name:
            for module in ("torch.utils.tensorboard", "tensorboardX"):
                there = sys.modules.get(module)
                if (
                    there is not None
                    and getattr(there, "SummaryWriter", _MutedWriter) is not _MutedWriter
                ):
                    there.SummaryWriter = _MutedWriter  # type: ignore[attr-defined]
        return imported_module

    return imported
