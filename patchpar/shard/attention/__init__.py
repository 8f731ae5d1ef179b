"""Attention over tokens split between ranks: exact by all-gather, rings, Ulysses or hybrids; or with stale keys."""
