"""Helpers for all packages, which know nothing of samples or training.

| module | contents |
|---|---|
| `options`, `settings` | options of commands; `DLIO_*` |
| `arguments`, `units` | checks of values; sizes and times such as `20GiB` |
| `folders`, `trusted_files`, `user_folders` | files that no other user may plant |
| `owned_descriptors` | descriptors of owners that nobody closes |
| `link_free` | files that are opened by paths without links |
| `whole_files` | files that appear complete or not at all |
| `input_files` | files that users name, and state, read within bounds |
| `limits`, `decompression_limits`, `printable` | data and names that are not trusted |
| `shared_folders`, `reaper` | folders in shared memory that end with their job |
| `kept_memory` | memory of decompressed files, counted together |
| `memory`, `buffer_pool`, `heap` | memory that is used again |
| `threads`, `forks` | threads that are joined; locks in forked children |
| `parallel` | calls that wait for a source, many at a time |
| `signals`, `early_interrupt`, `child_processes` | processes: how they start, and how they end |
| `live_figures`, `live_line`, `progress_bar`, `plot_files` | what users see of a run |
| `mount_points`, `cores`, `machine_memory`, `private_sockets` | the machine |
| `object_graph`, `extras` | what an object refers to; how to install a missing package |
"""
