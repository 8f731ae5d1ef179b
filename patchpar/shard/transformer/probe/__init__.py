"""Find where the tokens of a transformer are, by running it with perturbed inputs."""
