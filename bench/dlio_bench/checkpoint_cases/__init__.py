"""`dlio bench checkpoint`: checkpoints written, read back and taken during training.

sizes      bytes of models' checkpoints: pure
methods    dlio's checkpoints, torch.distributed.checkpoint's and dd's, behind one interface
stalls     a training loop that each of them interrupts
command    the command
"""
