"""`dlio bench gpu`: everything that dlio does on a GPU, in one run of a few minutes.

    gpu_command         options, the cases in turn, exchanges of two ranks, the report
    gpu_cases           decoding, the tier of decoded images, training steps, the hand-over
    gpu_exchange_rank   the ranks of the exchanges

Each case, or a part of one, that cannot run is skipped by its name, with the reason. With
`--device cpu` all that needs no GPU runs in a small form.
"""
