"""Where images of approximate strategies differ from those of one process."""
