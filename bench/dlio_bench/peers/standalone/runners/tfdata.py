"""tf.data, as TensorFlow's own ImageNet pipelines have it: only the crop is decoded."""

from collections.abc import Iterator
from typing import Any

from .protocol import Pass, Task


def tfdata(task: Task) -> Pass:
    """Return a pass that reads the files and ends in uint8 HWC."""
    import tensorflow as tf

    def decode(path: Any, label: Any) -> Any:
        encoded = tf.io.read_file(path)
        begin, extent, _ = tf.image.sample_distorted_bounding_box(
            tf.image.extract_jpeg_shape(encoded),
            bounding_boxes=tf.zeros([1, 0, 4]),
            aspect_ratio_range=(3 / 4, 4 / 3),
            area_range=(0.08, 1.0),
            max_attempts=10,
            use_image_if_no_bounding_boxes=True,
        )
        window = tf.stack([begin[0], begin[1], extent[0], extent[1]])
        image = tf.image.decode_and_crop_jpeg(encoded, window, channels=3)
        image = tf.cast(tf.image.resize(image, [task.size, task.size]), tf.uint8)
        return tf.image.random_flip_left_right(image), label

    options = tf.data.Options()
    options.threading.private_threadpool_size = task.workers
    options.threading.max_intra_op_parallelism = 1  # Otherwise it has more threads than that.
    data = (
        tf.data.Dataset.from_tensor_slices((task.files, task.labels))
        .shuffle(len(task.files))
        .map(decode, num_parallel_calls=task.workers)
        .batch(task.batch_size)
        .prefetch(2)
        .with_options(options)
    )

    def run() -> Iterator[tuple[Any, Any]]:
        for images, labels in data:
            yield images.numpy(), labels.numpy()

    return run
