"""The state of a run in the memory of its nodes, so that it goes on when one of them is lost.

| module | idea |
|---|---|
| `copying` | a callback that copies the state between two optimizer steps |
| `saved` | the newest state that the living nodes have together, as `restore` takes it |
| `journal` | the trace of an epoch that is under way |
| `resuming` | going on after a start: state, trace, and the losses of the report |
"""
