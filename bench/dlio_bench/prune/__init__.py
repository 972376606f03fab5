"""`dlio bench prune`: training with neurons and samples left out, compared with training without.

| file                       | holds                                                    |
|----------------------------|----------------------------------------------------------|
| `command.py`, `options.py` | the command                                              |
| `images.py`                | networks for images, and samples left out; `dlio train`  |
| `tabular.py`               | wide perceptrons that a small one teaches                |
| `rows.py`                  | perceptrons that skip rows that they have learnt         |
| `removal.py`, `chance.py`  | other ways to remove neurons, to compare with            |
| `curves.py`, `drawing.py`  | tables and pictures of trainings                         |
"""
