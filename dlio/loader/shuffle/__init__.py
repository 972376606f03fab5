"""Samples on their way between nodes, planned ahead by the ranks that send and receive them.

| module | contents |
|---|---|
| `sample_shuffle` | a pass: windows of steps, messages between ranks, steps for the loader |
| `sample_message` | the format of a message, and messages whose size the receiver cannot know |
"""
