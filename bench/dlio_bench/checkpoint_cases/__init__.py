"""`dlio bench checkpoint`: checkpoints written, read back and taken during training.

methods              dlio's checkpoints, torch.distributed.checkpoint's and dd's, alike, and a
                     training loop that each of them interrupts
checkpoint_command   the command, and bytes of models' checkpoints
"""
