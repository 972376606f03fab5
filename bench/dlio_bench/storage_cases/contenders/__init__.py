"""Loaders that `dlio bench storage` measures.

rank_loader    what each of them gives
torch_loader   torch's DataLoader with a data set per format, dlio's, and a user's own; and reads
               without a loader: the most that the storage gives
"""
