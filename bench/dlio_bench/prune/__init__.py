"""`dlio bench prune`: training with neurons and samples left out, compared with training without.

| file | holds |
|----------------------------|----------------------------------------------------------|
| `prune_command.py`, `prune_options.py` | the command |
| `images.py` | networks for images, and samples left out; `dlio train` |
| `tabular.py` | wide perceptrons that a small one teaches |
| `rows.py` | perceptrons that skip rows that they have learnt |
| `removal_case.py` | other ways to remove neurons, to compare with |
| `curves.py` | tables and pictures of trainings |
"""
