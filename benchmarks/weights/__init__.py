"""Memory and time of loading a model and generating with it, by where its weights are kept."""
