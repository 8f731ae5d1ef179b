"""Communication between ranks: collectives, tensors in flight, transports, and statistics of what was sent."""
