"""Decoding and cropping batches of images on the device that trains.

- `crops.crop_batch`: crop, resize, mirror and normalise a batch of decoded images, on any device
- `triton_crops`: its form for CUDA, one kernel a batch
"""
