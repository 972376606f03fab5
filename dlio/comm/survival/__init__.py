"""Ranks that survive each other: the events from the death of a rank until training continues.

docs/design/recovery.md tells it in the order of the code. In short: a wait ends by `PeerLost`; the
waiting rank calls `Recovery.recover`; all survivors vote a new generation of ranks into being
(`Membership.renew`), which carries the typed report of each part; parts that are behind get what
they lack (`RecoveryPart.reconcile`); a vote ends it, or starts it again.

| module | contents |
|---|---|
| `recovery`, `reports` | the order of a recovery; its parts and their reports |
| `membership` | the contract: generations of ranks |
| `rank_survivors` | the bookkeeping that both memberships share |
| `ulfm` | membership over MPI with User Level Failure Mitigation |
| `store_membership`, `store_comm` | membership without MPI: gloo, and a store in the launcher |
| `job_store`, `rendezvous` | its events, and the part of it by which gloo connects ranks |
| `active_ranks`, `rank_requests` | who trains next (pure), and what the user has asked for |
| `suspicion`, `node_watch` | which rank hangs or is slow (pure), and the thread that kills it |
"""
