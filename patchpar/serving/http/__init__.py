"""The HTTP side of `patchpar serve`: routes, errors, access and counts. Nothing here knows how images are generated."""
