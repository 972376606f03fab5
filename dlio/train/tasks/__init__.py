"""Tasks of `dlio train`: inputs, loss and metrics of each kind of training.

| file | contents |
|---|---|
| `task_base` | the contract of a task |
| `registry` | the task of a run: `--task`, or the one that the data call for |
| `metrics` | names of metrics, and sums that ranks add up exactly |
| `classification`, `regression`, `reconstruction`, `segmentation` | the tasks on images |
| `table_task`, `table_columns`, `column_statistics` | the task on tables, and its columns |
"""
