"""`dlio bench prune`: training with neurons and samples left out, compared with training without.

| module | holds |
|---|---|
| `prune_command`, `prune_options` | the command |
| `images` | networks for images; `dlio train` |
| `tabular` | wide perceptrons that a small one teaches, and those that skip rows |
| `samples` | samples left out, compared with trainings of fewer epochs |
| `removal_case`, `rivals` | other ways to remove neurons, to compare with |
| `skipping_rivals` | other ways to leave out samples |
| `curves` | tables and pictures of trainings |
"""
