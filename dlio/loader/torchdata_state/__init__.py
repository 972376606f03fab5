"""Loaders that save and restore the states of data sets and samplers, as torchdata's does.

`keeper` holds a loader's iterator and the state that its next pass begins with; `inline` and
`parallel` are the iterators, without and with workers; `server` is a worker's side of a parallel
one, `transports` bring tasks to worker processes or threads; `samplers` are torch's, with states.
"""
