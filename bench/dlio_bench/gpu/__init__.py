"""`dlio bench gpu`: everything that dlio does on a GPU, in one run of a few minutes.

    command.py     options, the cases in turn, the report
    measuring.py   parts that cases share: settings, rates, reasons to skip
    decode.py      decoding by the loader's threads and on the device, and by other libraries
    dali.py        NVIDIA DALI's pipeline on the device
    tier.py        the tier of decoded images, and its kernel alone
    handover.py    a loop of computation that the loader feeds: stalls, and copies in its trace
    profiled.py    copies and kernels in a trace of torch.profiler
    step.py        training steps of a ResNet-50 fed by dlio, and on a resident batch
    exchanges.py   exchanges of two ranks on one device
    exchanged.py   the ranks of the former

Each case, or a part of one, that cannot run is skipped by its name, with the reason. With
`--device cpu` all that needs no GPU runs in a small form.
"""
