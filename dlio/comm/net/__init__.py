"""The sockets of ranks: where they listen, whom they let in, and what they believe.

| module | contents |
|---|---|
| `address` | the address at which ranks listen: loopback on one node |
| `keys` | keys of a job's ranks, and the greeting by which two of them prove who they are |
| `door` | a listener that holds few connections of strangers, and those for seconds |
| `hub` | the links of one rank with all others |
| `gloo_gate` | gloo's listener, which is closed while no group is made |
| `peer_link` | a connection of two ranks: frames with a running number and a MAC |

A secret never travels: ranks exchange public values (Diffie-Hellman), and mix in the job's secret
where its launcher has given them one. SECURITY.md says against whom this protects.
"""
