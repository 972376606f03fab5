"""Ranks that leave as planned, run by MPI: `planned_checks.py`. Prints `well` on rank 0."""

import numpy as np

from dlio.comm import world
from dlio.comm.planned_membership import PlannedMembership, planned_world
from dlio.comm.survival.membership import RankLeft
from dlio.comm.survival.recovery import recovery_of


def main() -> None:
    """Let rank 1 leave, then rank 0."""
    everyone = world()
    with planned_world() as membership:
        _leave(membership)
    assert world() is everyone


def _leave(membership: PlannedMembership) -> None:
    comm = world()
    me, ranks = comm.rank, comm.size
    assert recovery_of(comm) is recovery_of(world())
    copy, pair = comm.dup(), comm.split(comm.rank % 2)
    pairs = pair.split(0)
    comm.dup().close()  # Not rebuilt.
    left = list(range(ranks))
    for leaver in (1, 0):
        left.remove(leaver)
        membership.plan(left)
        try:
            reports = membership.renew({"rank": me})
        except RankLeft:
            assert me == leaver
            return
        assert reports == [{"rank": rank} for rank in left]
        assert membership.members == tuple(left)
        like_me = [rank for rank in left if rank % 2 == me % 2]
        for each, of in ((world(), left), (copy, left), (pair, like_me), (pairs, like_me)):
            assert (each.rank, each.size) == (of.index(me), len(of))
            total = np.array([me], np.int64)
            each.wait([each.iallreduce(total)], "the sum")
            assert total[0] == sum(of)
            assert each.allgather(me) == of
    assert membership.number == 2
    membership.end()
    if world().rank == 0:
        print("well", flush=True)


if __name__ == "__main__":
    main()
