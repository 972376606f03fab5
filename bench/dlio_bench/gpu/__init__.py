"""`dlio bench gpu`: everything that dlio does on a GPU, in one run of a few minutes.

    gpu_command         options, the cases in turn, exchanges of two ranks, the report
    gpu_measurements    parts that cases share: settings, rates, reasons to skip
    decode_case         decoding by the loader's threads and on the device, and by other libraries
    tier_case           the tier of decoded images, and its kernel alone
    handover_case       a loop of computation that the loader feeds: stalls, and copies in its trace
    gpu_step            training steps of a ResNet-50 fed by dlio, and on a resident batch
    gpu_exchange_rank   the ranks of the exchanges

Each case, or a part of one, that cannot run is skipped by its name, with the reason. With
`--device cpu` all that needs no GPU runs in a small form.
"""
