"""Every figure that the docs state, as a script."""
