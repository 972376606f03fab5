"""Loaders that save and restore the states of data sets and samplers, as torchdata's does.

`iteration_state` holds a loader's iterator and the state that its next pass begins with; the
iterators are `inline_iterator` without workers and `parallel_iterator` with them; `worker_server`
is a worker's side of it, `transports` bring tasks to worker processes or threads;
`stateful_samplers` are torch's, with states.
"""
