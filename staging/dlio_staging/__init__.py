"""The staging tool: `dlio pack`, `stage`, `verify`, `status`, `evict` and `pin`.

| module | contents |
|---|---|
| `pack` | `dlio pack`, a command of the next three |
| `pack_plan` | which samples go into which file |
| `pack_folder`, `pack_shard` | the folder that is written, and one file of it |
| `pack_writers` | the formats of these files |
| `stage` | `dlio stage`: fills a node's tiers by `stage_plan` |
| `stage_plan` | the blocks that each tier is to hold, and the report |
| `replication` | blocks from node to node |
| `verify`, `tier_verification` | `dlio verify`: a data set; the tiers, which it can heal |
| `manage` | `dlio status`, `dlio evict`, `dlio pin` |
| `pipe_workers`, `hung_source`, `byte_progress` | processes; a source that hangs; progress |
"""
