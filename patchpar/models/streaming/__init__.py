"""Models that are streamed: their folders and weights, noise schedules, networks and decoders."""
