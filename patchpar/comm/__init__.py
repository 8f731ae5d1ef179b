"""Communication between ranks: collectives, tensors still on their way, what was sent and when."""
