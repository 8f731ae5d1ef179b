"""Is a picture larger than its model was trained for still one picture: calibration, seams, repetition, objects."""
