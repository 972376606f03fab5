"""Blocks, shards, tiers, and the hierarchy that reads a sample from the fastest of them.

| module | contents |
|---|---|
| `block` | a block: a run of samples with their offsets and checksums; FORMAT.md |
| `shard_file` | a file of many blocks, with an index |
| `tier` | a folder of blocks in memory or on a disk, shared by the ranks of a node |
| `block_tables` | tables of many blocks in memory, as one array |
| `hierarchy` | a sample from the fastest place that has it |
| `sample_locations` | where the samples of a batch lie, for reads outside of Python |
| `block_fetcher` | the block path: whole blocks from the source into their tiers |
| `source_requests` | reads of the source: a block at a time, with many requests in flight |
| `sample_fetcher` | the sample path: samples, as they are needed, until a block is complete |
| `partial_blocks` | the blocks that the sample path has not completed yet |
| `block_stream` | blocks that are in memory only while their samples are used |
| `decoded_tier`, `device_tier` | decoded images: shared by a node, or on a rank's device |
| `mount` | a data set on the nodes of a job: homes of blocks, tiers, fillers |
| `tier_spec`, `file_system_kind` | tiers as users write them; where a path is stored |
| `inventory`, `manifest` | the data sets in a node's disk tiers, their leases and lists of blocks |
| `counters` | counts and sentences for reports |

# Two ways into a tier

Every block belongs in at most one tier of a node. Two paths bring it there, each in the background
by a filler, in the order of the epoch, and at once for a sample that is wanted now:

| | the block path | the sample path |
|---|---|---|
| acts for | files, archives, packed data | sources with a latency, a request for each sample |
| that is | a reader without a `Flow` | map-style data sets; files and large samples on a network |
| unit | a block, of some MiB | a sample, or neighbours of up to 1 MiB together |
| requests | fixed: `SourceRequests` | adapted to the latency: `Flow` |
| a sample wanted now | its block is brought, or it is read alone (a budget) | it is read next |
| a first batch | its samples are read before their blocks | as any other |
| among processes | one claims a block, the others wait | one claims a sample, the others use it |
| written | once, when all samples are here | each sample where it will stay |

`Hierarchy` decides when it is made: a `Flow` means the sample path. `mount` makes a `Flow` for a
source behind a network where `by_sample` asks for it and samples can be read on their own; a reader
may bring one. Both are a `Fetcher` to the hierarchy, and share the rest: the claims and the
knowledge of where blocks are (`BlockFetcher`), requests for large samples (`SourceRequests`), the
publishing of blocks, notes and counters. Streamed blocks take the block path on both.

The two are not one fetcher of runs of samples, for which there are measured reasons:

- A whole block is one range of a file: 32 requests of 1 MiB read 198 of 200 MiB/s over 5 ms, into
  memory that is used again and is checked once. As runs of samples it would be written sample by
  sample, with an entry of the table each.
- A claim on a block costs one lock of one file. A claim on each sample costs a system call a run,
  after each of which a thread waits for the interpreter's lock; that pays where a sample takes
  milliseconds.
- A block that is begun in parts has to be completed in parts. The samples of a first batch
  therefore stay in memory: the block is written once, by whoever fills it.
"""
