"""`dlio bench train`: training on ranks as a whole, measured here and forecast for more ranks.

| module | holds |
|---|---|
| `training_command`, `training_options` | the command, and its cases |
| `bench_networks` | networks of the field, and batches for them |
| `training_rank` | the ranks, and the parts of a step |
| `scaling_measurements` | rounds of measurements on 1, 2, 4 ... ranks |
| `forecast_check` | steps on more ranks, from those of one and two |
| `scaling_case`, `checkpoint_case`, `ettr`, `script_case` | the cases |
"""
