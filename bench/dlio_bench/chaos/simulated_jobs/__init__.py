"""Schedules of losses, through the real code that decides, without processes and messages.

| module | holds |
|---|---|
| `turns` | threads of which one runs at a time, chosen by a seed |
| `memory_network` | ranks that are lost, a membership and a communicator in memory |
| `simulated_ranks` | a rank's training, with the real `Recovery` and assigner |
| `schedule_draws` | a schedule of a seed: sizes, and losses at any message |
| `outcome_check` | a schedule's run, and what must hold after it |

Ranks that are always at the same place are one object, a cohort, of which there are eight at most;
up to eight ranks are a cohort each. All decisions are made of the reports of all ranks.
"""
