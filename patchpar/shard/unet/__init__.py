"""Convolutional denoisers in bands of rows: layers, the hooks that exchange, the search for them."""
