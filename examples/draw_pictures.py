"""Draw a small data set of shapes in class folders.

python examples/draw_pictures.py pictures
"""

import sys

from dlio.cli.demo_pictures import draw_dataset

draw_dataset(sys.argv[1], images=120, validation=30, classes=3)
