"""Scripts that people use, run as they are by `dlio run`, and compared with one process.

    python -m tests.field --repositories FOLDER [NAME ...] [--ranks 2] [--keep FOLDER]

FOLDER has a checkout of each repository, named as `FieldScript.repository` with `-` for `/`. It is
not part of a suite: the repositories are not this project's, and their libraries are not installed
for it.

| module | holds |
|---|---|
| `field_script` | a script of others and the way it is run |
| `pytorch_examples` | scripts of pytorch/examples |
| `inputs` | small data sets, made by code |
| `trial` | the runs of a script |
| `differences` | outputs, files and weights of two runs, compared |
| `keeper/` | saves parameters at a script's end, by Python's `sitecustomize` |
"""
