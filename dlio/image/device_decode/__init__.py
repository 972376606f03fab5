"""Decoding and cropping batches of images on the device that trains.

- `encoded`: the bytes of a JPEG that its crops need, and which images a device takes
- `codec.Codec`: decodes a batch of them in a slot, and crops it
- `library`: nvImageCodec, loaded at first use
- `queue`: the order of work on a device, a CUDA stream or the CPU
- `crops.crop_batch`: crops, resizes, mirrors and normalises a batch of decoded images
- `triton_crops`: its form for CUDA, one kernel a batch; `normal`: its mean and deviation
"""
