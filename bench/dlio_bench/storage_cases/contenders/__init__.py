"""Loaders that `dlio bench storage` measures.

contract   what each of them gives
torch      torch's DataLoader with a data set per format, as users write it
formats    those data sets
own        dlio.DataLoader
factory    a loader of the user's own, by `module:function`
bare       parallel reads of the files without a loader: the most that the storage gives
"""
