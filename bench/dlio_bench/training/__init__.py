"""`dlio bench train`: training on ranks as a whole, measured here and forecast for more ranks.

| module | holds |
|---|---|
| `command`, `options` | the command, and its cases |
| `networks` | networks of the field, and batches for them |
| `rank`, `stepping` | the program of the ranks, and the parts of a step |
| `measuring` | rounds of measurements on 1, 2, 4 ... ranks |
| `forecasting` | steps on more ranks, from those of one and two |
| `shown` | tables, figures, curves and waterfalls |
| `scaling`, `ettr` | the cases |
"""
