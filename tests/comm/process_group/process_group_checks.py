"""Checks of torch.distributed's documented behaviour on MPI; run under mpirun.

Usage: python process_group_checks.py CHECK... runs the named checks on one default group.
"""

import os
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import DebugLevel, set_debug_level

from dlio.comm.process_group import init_process_group
from dlio.errors import CommError, CommTimeout, UsageError
from tests.comm.process_group import deadline_checks
from tests.comm.process_group.values import (
    FLOATS,
    NARROW,
    OP,
    RANK,
    SHAPES,
    SIZE,
    UNSIGNED,
    WHOLE,
    close,
    drawn,
    equal,
    everyone,
    expected,
    raises,
    ring,
    same_everywhere,
    strided,
)


def check_reductions() -> None:
    numbers: list[Any] = [OP.SUM, OP.AVG, OP.PRODUCT, OP.MIN, OP.MAX]
    bits: list[Any] = [OP.BAND, OP.BOR, OP.BXOR]
    cases: list[tuple[torch.dtype, Any]] = [(dtype, op) for dtype in FLOATS for op in numbers]
    cases += [(dtype, op) for dtype in WHOLE for op in numbers + bits]
    cases += [(torch.bool, op) for op in [OP.SUM, OP.PRODUCT, OP.MIN, OP.MAX, *bits]]
    cases += [(dtype, OP.SUM) for dtype in [torch.complex64, torch.complex128, *NARROW]]
    for dtype, op in cases:
        for shape in SHAPES:
            inputs = everyone(shape, dtype)
            wanted = expected(inputs, op)
            tensor = inputs[RANK].clone()
            dist.all_reduce(tensor, op)
            assert close(tensor, wanted), (dtype, op, shape, tensor, wanted)
            if dtype.is_floating_point and dtype not in NARROW:
                assert same_everywhere(tensor), (dtype, op, shape)
            if shape == (7, 3):
                tensor = strided(inputs[RANK])
                dist.all_reduce(tensor, op)
                assert close(tensor, wanted), ("strided", dtype, op)
    group: Any = dist.group.WORLD
    for dtype in UNSIGNED:
        for op in (each for each in numbers + bits if each != OP.AVG):
            inputs = everyone((33,), dtype)
            tensor = inputs[RANK].clone()
            dist.all_reduce(tensor, op)
            assert close(tensor, expected(inputs, op)), (dtype, op)
            rows = everyone((4 * SIZE,), dtype)
            out = torch.zeros(4, dtype=dtype)
            dist.reduce_scatter(out, list(rows[RANK].view(SIZE, 4)), op)
            assert close(out, expected(rows, op).view(SIZE, 4)[RANK]), (dtype, op)
    # torch refuses complex products; DDP's C++ calls the group directly.
    inputs = everyone((20_000,), torch.complex64)
    tensor = inputs[RANK].clone()
    opts: Any = dist.AllreduceOptions()
    opts.reduceOp = OP.PRODUCT
    group.allreduce([tensor], opts).wait()
    assert torch.allclose(tensor, expected(inputs, OP.PRODUCT), rtol=1e-4)
    # Each rank has a factor of its own.
    for dtype, count in [(torch.float32, 9), (torch.bfloat16, 9), (torch.bfloat16, 40_000)]:
        inputs = everyone((count,), dtype)
        tensor = inputs[RANK].clone()
        dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5 + RANK))  # type: ignore[attr-defined]
        scaled = [value.double() * (0.5 + rank) for rank, value in enumerate(inputs)]
        digits = 1e-5 if dtype == torch.float32 else 0.02
        assert torch.allclose(tensor.double(), sum(scaled[1:], scaled[0]), digits, 4 * digits)
    raises(UsageError, "no BAND of torch.float32", lambda: dist.all_reduce(torch.ones(1), OP.BAND))
    raises(UsageError, "no AVG of torch.bool", lambda: dist.all_reduce(torch.ones(1) > 0, OP.AVG))
    sparse = torch.eye(3).to_sparse()
    raises(UsageError, "dense", lambda: dist.all_reduce(sparse))


def check_reductions_to_one() -> None:
    for dtype in [*FLOATS, torch.int64, torch.bool]:
        for shape in [(3,), (60_000,)]:
            for root in range(SIZE):
                inputs = everyone(shape, dtype)
                tensor = inputs[RANK].clone()
                dist.reduce(tensor, root, OP.SUM)
                wanted = expected(inputs, OP.SUM) if root == RANK else inputs[RANK]
                assert close(tensor, wanted), (dtype, shape, root)
    for dtype in [*FLOATS, torch.int32, torch.bool]:
        for op in [OP.SUM, OP.MAX]:
            inputs = everyone((SIZE * 6, 5), dtype)
            wanted = expected(inputs, op).chunk(SIZE)[RANK]
            out = torch.zeros(6, 5, dtype=dtype)
            dist.reduce_scatter(out, list(inputs[RANK].chunk(SIZE)), op)
            assert close(out, wanted), (dtype, op)
            for given in [inputs[RANK], inputs[RANK].view(SIZE, 6, 5), strided(inputs[RANK])]:
                out = strided(torch.zeros(6, 5, dtype=dtype))
                dist.reduce_scatter_tensor(out, given, op)
                assert close(out, wanted), (dtype, op)
    out = torch.zeros(6, 5)
    dist.reduce_scatter_tensor(out, torch.ones(SIZE * 6, 5) * (RANK + 1), OP.AVG)
    assert torch.allclose(out, torch.full((6, 5), (SIZE + 1) / 2))


def check_movement() -> None:
    dtypes = [*FLOATS, *WHOLE, *UNSIGNED, *NARROW, torch.bool, torch.complex64]
    for dtype in dtypes:
        for shape in SHAPES:
            inputs = everyone(shape, dtype)
            mine = inputs[RANK]
            for root in range(SIZE):
                for form in (torch.clone, strided):
                    tensor = form(mine)
                    dist.broadcast(tensor, root)
                    assert equal(tensor, inputs[root]), (dtype, shape, root)
            outputs = [torch.zeros_like(mine) for _ in range(SIZE)]
            dist.all_gather(outputs, mine)
            assert all(map(equal, outputs, inputs)), (dtype, shape)
            outputs = [strided(torch.zeros_like(mine)) for _ in range(SIZE)]
            dist.all_gather(outputs, strided(mine))
            assert all(map(equal, outputs, inputs)), (dtype, shape)
            root = SIZE - 1
            outputs = [torch.zeros_like(mine) for _ in range(SIZE)]
            dist.gather(mine, outputs if root == RANK else None, root)
            assert root != RANK or all(map(equal, outputs, inputs)), (dtype, shape)
            tensor = torch.zeros_like(mine)
            dist.scatter(tensor, inputs if root == RANK else None, root)
            assert equal(tensor, mine), (dtype, shape)
            # Row k of rank r's table goes to rank k.
            tables = [[drawn(10 * r + k, shape, dtype) for k in range(SIZE)] for r in range(SIZE)]
            outputs = [torch.zeros_like(mine) for _ in range(SIZE)]
            dist.all_to_all(outputs, tables[RANK])
            assert all(equal(outputs[r], tables[r][RANK]) for r in range(SIZE)), (dtype, shape)


def check_single_tensors() -> None:
    inputs = everyone((2, 3), torch.float32)
    for out in [
        torch.zeros(2 * SIZE, 3),
        torch.zeros(SIZE, 2, 3),
        strided(torch.zeros(SIZE, 2, 3)),
    ]:
        dist.all_gather_into_tensor(out, inputs[RANK])
        assert torch.equal(out.reshape(SIZE, 2, 3), torch.stack(inputs))
    # As in FSDP, a rank's input is a part of its output.
    out = torch.zeros(SIZE, 6)
    out[RANK] = inputs[RANK].flatten()
    dist.all_gather_into_tensor(out.view(-1), out[RANK])
    assert torch.equal(out.view(SIZE, 2, 3), torch.stack(inputs))
    # Uneven gathering and the examples of all_to_all_single from torch's documentation.
    sizes = [rank + 1 for rank in range(SIZE)]
    outputs = [torch.zeros(size) for size in sizes]
    dist.all_gather(outputs, torch.full((sizes[RANK],), float(RANK)))
    assert all(torch.equal(o, torch.full((k + 1,), float(k))) for k, o in enumerate(outputs))
    given = torch.arange(SIZE) + RANK * SIZE
    got = torch.empty(SIZE, dtype=torch.int64)
    dist.all_to_all_single(got, given)
    assert got.tolist() == [SIZE * k + RANK for k in range(SIZE)]
    # Rank r sends k + r rows to rank k; some send nothing.
    sends, receives = [k + RANK for k in range(SIZE)], [k + RANK for k in range(SIZE)]
    given = torch.full((sum(sends), 3), RANK, dtype=torch.bfloat16)
    got = torch.empty(sum(receives), 3, dtype=torch.bfloat16)
    dist.all_to_all_single(got, given, receives, sends)
    assert got[:, 0].tolist() == [k for k in range(SIZE) for _ in range(k + RANK)]
    dist.barrier()
    raises(UsageError, "rows", lambda: dist.all_to_all_single(got[:1], given[:SIZE]))
    wrong = [*sends[1:], 99]
    raises(UsageError, "rows", lambda: dist.all_to_all_single(got, given, receives, wrong))
    raises(UsageError, "are needed", lambda: dist.all_gather_into_tensor(out[:, :5], out[0, :4]))
    to_oneself = [torch.zeros(1 + (rank == RANK)) for rank in range(SIZE)]
    ones = [torch.zeros(1)] * SIZE
    raises(UsageError, "are needed", lambda: dist.all_to_all(to_oneself, ones))
    short = [torch.zeros(1)] * (SIZE + 1)
    raises(UsageError, f"for {SIZE} ranks", lambda: dist.all_gather(short, torch.zeros(1)))


def check_coalesced() -> None:
    shapes = [(3,), (2, 2), (40_001,)]
    for dtype in [torch.float32, torch.bfloat16]:
        inputs = [everyone(shape, dtype) for shape in shapes]
        tensors = [each[RANK].clone() for each in inputs]
        with dist._coalescing_manager(async_ops=True) as all_of_them:  # type: ignore[attr-defined]
            for tensor in tensors:
                dist.all_reduce(tensor)
        all_of_them.wait()
        for tensor, each in zip(tensors, inputs, strict=True):
            assert close(tensor, expected(each, OP.SUM))
    group: Any = dist.group.WORLD
    given = [each[RANK] for each in inputs]
    outputs = [torch.zeros(SIZE, *shape, dtype=dtype) for shape in shapes]
    group.all_gather_single_coalesced(outputs, given).wait()
    for out, each in zip(outputs, inputs, strict=True):
        assert torch.equal(out, torch.stack(each))
    lists = [[torch.zeros_like(tensor) for tensor in given] for _ in range(SIZE)]
    group.allgather_coalesced(lists, given).wait()
    assert all(torch.equal(lists[r][k], inputs[k][r]) for r in range(SIZE) for k in range(3))
    opts = dist.ReduceScatterOptions()
    rows = [everyone((SIZE * 2, 3), dtype), everyone((SIZE * 501,), dtype)]
    outputs = [torch.zeros(2, 3, dtype=dtype), torch.zeros(501, dtype=dtype)]
    group.reduce_scatter_single_coalesced(outputs, [each[RANK] for each in rows], opts).wait()
    for out, each in zip(outputs, rows, strict=True):
        assert close(out, expected(each, OP.SUM).chunk(SIZE)[RANK])
    with dist._coalescing_manager(group, torch.device("cpu"), async_ops=True) as both:  # type: ignore[attr-defined]
        passed_on = ring(torch.full((5,), RANK))
    both.wait()
    assert passed_on.tolist() == [(RANK - 1) % SIZE] * 5


def check_messages() -> None:
    for dtype in [torch.float32, torch.bfloat16, torch.complex64, torch.bool]:
        for form in (torch.clone, strided):
            left = (RANK - 1) % SIZE
            assert equal(ring(form(drawn(RANK, (9, 2), dtype))), drawn(left, (9, 2), dtype))
    if RANK == 0:
        # A receive takes messages of its tag only, in the order in which they were sent.
        for peer in range(1, SIZE):
            for tag, value in [(7, 1), (8, 2), (7, 3)]:
                dist.send(torch.tensor([value, peer]), peer, tag=tag)
        senders = []
        for _ in range(1, SIZE):
            got = torch.zeros(1, dtype=torch.int64)
            sender = dist.recv(got, None, tag=5)
            assert got.item() == sender
            senders.append(sender)
        assert sorted(senders) == list(range(1, SIZE))
    else:
        got = torch.zeros(2, dtype=torch.int64)
        for tag, value in [(8, 2), (7, 1), (7, 3)]:
            assert dist.recv(got, 0, tag=tag) == 0
            assert got.tolist() == [value, RANK]
        dist.send(torch.tensor([RANK]), 0, tag=5)
    # isend and irecv allow messages to the own rank.
    got = torch.zeros(3)
    works = [dist.irecv(got, RANK), dist.isend(torch.ones(3), RANK)]
    assert all(work is not None and work.wait() for work in works)
    assert got.tolist() == [1, 1, 1]
    if RANK == 0:
        dist.send(torch.zeros(2), 1)
    elif RANK == 1:
        raises(CommError, "8 bytes came from rank 0", lambda: dist.recv(torch.zeros(3), 0))
        never = dist.irecv(torch.zeros(3), 0, tag=99)
        assert never is not None
        assert not never.is_completed()
        raises(CommTimeout, "receive from rank 0, tag 99", lambda: never.wait(timedelta(0, 0.2)))
    raises(UsageError, "tags", lambda: dist.isend(torch.zeros(1), 0, tag=-1))
    dist.barrier()


def check_objects() -> None:
    values: list[Any] = [None] * SIZE
    dist.all_gather_object(values, {"rank": RANK, "text": "x" * (1000 * RANK)})
    assert [len(value["text"]) for value in values] == [1000 * rank for rank in range(SIZE)]
    objects = [RANK, "hello"] if RANK == 1 else [None, None]
    dist.broadcast_object_list(objects, src=1)
    assert objects == [1, "hello"]
    gathered: list[Any] | None = [None] * SIZE if RANK == 0 else None
    dist.gather_object((RANK,), gathered)
    assert gathered is None or gathered == [(rank,) for rank in range(SIZE)]
    got: list[Any] = [None]
    dist.scatter_object_list(got, [f"for {k}" for k in range(SIZE)] if RANK == 0 else None)
    assert got == [f"for {RANK}"]


def check_groups() -> None:
    for members in [[0, 1], [1], list(range(SIZE)), [SIZE - 1, 0]]:
        group = dist.new_group(members)
        if RANK not in members:
            assert dist.get_rank(group) == -1
            continue
        assert dist.get_world_size(group) == len(members)
        assert dist.get_process_group_ranks(group) == sorted(members)
        tensor = torch.full((3,), 2.0**RANK)
        dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [sum(2.0**rank for rank in members)] * 3
        tensor = torch.tensor([RANK])
        dist.broadcast(tensor, max(members), group=group)
        assert tensor.item() == max(members)
        dist.destroy_process_group(group)
    # Only members make the call: pairs of neighbours, in an order that differs by rank.
    if SIZE > 2:
        pairs = [(k, (k + 1) % SIZE) for k in range(SIZE)]
        for pair in sorted(pairs):
            if RANK in pair:
                group = dist.new_group(list(pair), use_local_synchronization=True)
                tensor = torch.tensor([10**RANK])
                dist.all_reduce(tensor, group=group)
                assert tensor.item() == sum(10**rank for rank in pair)
    # Messages of two groups with the same ranks are kept apart, whatever the order.
    first, second = dist.new_group(), dist.new_group()
    a, b = torch.ones(5), torch.full((5,), 10.0)
    order = [(a, first), (b, second)]
    works = [dist.all_reduce(t, group=g, async_op=True) for t, g in order[:: 1 - 2 * (RANK % 2)]]
    for work in works:
        work.wait()
    assert a.tolist() == [SIZE] * 5
    assert b.tolist() == [10 * SIZE] * 5
    assert dist.get_backend(first) == "dlio-mpi"


def check_functional() -> None:
    import torch.distributed._functional_collectives as functional

    group: Any = dist.group.WORLD
    ones = torch.ones(SIZE, 2)
    assert functional.all_reduce(ones, "sum", group).tolist() == [[SIZE] * 2] * SIZE
    gathered = functional.all_gather_tensor(torch.full((1, 2), float(RANK)), 0, group)
    assert gathered[:, 0].tolist() == list(range(SIZE))
    mine = functional.reduce_scatter_tensor(ones * RANK, "sum", 0, group)
    assert mine.tolist() == [[sum(range(SIZE))] * 2]
    swapped = functional.all_to_all_single(ones * RANK, None, None, group)
    assert swapped[:, 0].tolist() == list(range(SIZE))
    assert functional.broadcast(ones * RANK, 1, group).tolist() == ones.tolist()


def check_async() -> None:
    # Several at once, awaited in another order; then through futures.
    tensors = [torch.full((30_000,), float(RANK + k), dtype=torch.bfloat16) for k in range(6)]
    works: list[Any] = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    works.append(dist.barrier(async_op=True))
    for work in reversed(works):
        assert work.wait()
        assert work.is_completed()
        assert work.exception() is None
    for k, tensor in enumerate(tensors):
        assert (tensor == k * SIZE + SIZE * (SIZE - 1) // 2).all()
        assert works[k].get_future().wait()[0] is tensor
        assert works[k].result()[0] is tensor
    # The thread completes it although no rank waits.
    tensor = torch.ones(30_000, dtype=torch.bfloat16)
    done = threading.Event()
    work = dist.all_reduce(tensor, async_op=True)
    work.get_future().add_done_callback(lambda _: done.set())
    assert done.wait(60)
    assert tensor[0] == SIZE
    # It completes on other ranks while rank 0 does not wait: it goes on once they tell it so.
    store: Any = dist.distributed_c10d._get_default_store()
    other = torch.ones(30_000, dtype=torch.bfloat16)
    work = dist.all_reduce(other, async_op=True)
    assert work is not None
    if RANK == 0:
        store.wait([f"rank {rank} has its sum" for rank in range(1, SIZE)], timedelta(seconds=60))
    work.wait()
    store.set(f"rank {RANK} has its sum", "1")
    # Rank 0 begins only when the others' calls have returned.
    if RANK == 0:
        store.wait([f"rank {rank} has called" for rank in range(1, SIZE)], timedelta(seconds=60))
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    if RANK:
        raises(CommTimeout, "all_reduce", lambda: work.wait(timedelta(seconds=0.05)))
    store.set(f"rank {RANK} has called", "1")
    work.wait()
    assert tensor[0] == SIZE * SIZE


def check_callbacks() -> None:
    """Callbacks start collectives and wait for them; some ranks run them late, some early."""
    results = []
    for k in range(8):
        if k % SIZE == RANK:
            time.sleep(0.02)
        work: Any = dist.all_reduce(torch.full((4,), float(k)), async_op=True)
        if (k + RANK) % 2:
            work.wait()  # On these ranks it completes before the callback is attached.

        def again(future: Any, k: int = k) -> Any:
            if (k * 7 + RANK) % 3 == 0:
                time.sleep(0.01)
            inner = dist.all_reduce(future.value()[0] + 1, async_op=True)
            return inner.get_future().wait()[0]

        def last(future: Any) -> Any:
            return dist.all_reduce(future.value(), async_op=True).get_future().wait()[0]

        results.append(work.get_future().then(again).then(last))
    for k, result in enumerate(results):
        assert result.wait().tolist() == [(k * SIZE + 1) * SIZE * SIZE] * 4, k

    def fails(_: Any) -> None:
        raise ValueError("a callback's own error")

    work = dist.all_reduce(torch.ones(1), async_op=True)
    raises(ValueError, "own error", work.get_future().then(fails).wait)


def check_unfinished() -> None:
    """A program with operations under way can end; their callbacks do not delay it."""
    init_process_group(timeout_s=600)
    if RANK == 0:
        work: Any = dist.all_reduce(torch.ones(3), async_op=True)
        work.get_future().then(lambda future: future.value())
    print("kept the promises", flush=True)


def check_mismatch() -> None:
    """With torch's debug level DETAIL, an error reports ranks that call different operations."""
    dist.all_reduce(torch.ones(100))
    odd = dist.new_group()
    size = 100 + RANK
    raises(CommError, f"{size} numbers", lambda: dist.all_reduce(torch.ones(size), group=odd))
    raises(CommError, "after a failure", lambda: dist.barrier(odd))
    call = dist.barrier if RANK else lambda: dist.broadcast(torch.ones(1), 0)
    raises(CommError, "different operations; this one: b", call)


def check_again() -> None:
    """A group is made again after its end, also as if each rank had a machine of its own."""
    raises(UsageError, "initialised already", init_process_group)
    dist.destroy_process_group()
    raises(UsageError, "for all devices or none", lambda: init_process_group("cpu:dlio-mpi"))
    os.environ["DLIO_NODE"] = f"node{RANK}"
    init_process_group(timeout_s=7)
    total = torch.ones(1)
    dist.all_reduce(total, group=dist.new_group())
    assert total.item() == SIZE
    group: Any = dist.new_group()
    assert group.timeout_s == 7
    dist.destroy_process_group()
    # Any of torch's backends can be made without environment variables.
    init_process_group("gloo")
    dist.all_reduce(total)
    assert total.item() == SIZE * SIZE
    group = dist.new_group(backend="dlio-mpi")
    dist.all_reduce(total, group=group)
    assert total.item() == SIZE**3


def main() -> None:
    if sys.argv[1:] == ["unfinished"]:
        check_unfinished()
        return
    if "mismatch" in sys.argv:
        # As with TORCH_DISTRIBUTED_DEBUG=DETAIL, which torch reads when it is imported.
        set_debug_level(DebugLevel.DETAIL)
    init_process_group()
    assert dist.get_rank() == RANK
    assert dist.get_world_size() == SIZE
    checks = {**globals(), **vars(deadline_checks)}
    for name in sys.argv[1:]:
        checks[f"check_{name}"]()
    dist.destroy_process_group()
    left = [
        thread.name for thread in threading.enumerate() if thread is not threading.main_thread()
    ]
    assert left == [], left
    print("kept the promises", flush=True)


if __name__ == "__main__":
    main()
