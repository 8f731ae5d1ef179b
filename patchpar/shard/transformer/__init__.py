"""Transformers with their tokens split between ranks: a search finds the tokens, hooks on the blocks split them."""
