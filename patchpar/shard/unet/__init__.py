"""Convolutional denoisers in bands of rows: layer arithmetic, exchange hooks, discovery of layers that need them."""
