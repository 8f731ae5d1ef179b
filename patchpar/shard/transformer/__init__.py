"""Transformers with their tokens shared between ranks: found out by watching the model, carried out by hooks."""
