"""The staging tool: `dlio pack`, `stage`, `verify`, `status`, `evict` and `pin`.

| module | contents |
|---|---|
| `pack` | `dlio pack`, a command of the next three |
| `pack_plan` | which samples go into which file |
| `pack_folder` | the folder that is written, its files, and the processes that write them |
| `pack_writers` | the formats of these files |
| `stage` | `dlio stage`: fills a node's tiers by `stage_plan`, also from node to node |
| `stage_plan` | the blocks that each tier is to hold, and the report |
| `verify` | `dlio verify`: a data set; the tiers, which it can heal |
| `manage` | `dlio status`, `dlio evict`, `dlio pin` |
| `byte_progress` | progress |
"""
