"""Is an image larger than its model was trained for still one image: calibration, seams, repetition, objects."""
