"""The state of a run in the memory of its nodes, so that it goes on when one of them is lost.

| module | idea |
|---|---|
| `snapshot_callback` | a callback that copies the state between two optimizer steps |
| `snapshot_state` | the newest state that the living nodes have together, as `restore` takes it |
| `journal` | the trace of an epoch that is under way |
| `job_restart` | going on after a start: state, trace, and the losses of the report |
"""
