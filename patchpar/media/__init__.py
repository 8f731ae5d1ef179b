"""Files of images, video and audio, capture devices, and encoding: what has no model, and no ranks."""
