"""Decoding and cropping batches of images on the device that trains: see `jpeg_codec.JpegCodec`."""
