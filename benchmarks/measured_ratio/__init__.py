"""Parts of an image in the ratio of measured speeds, against the ideal split."""
