"""Exact attention over tokens that several ranks share: everybody's keys at once, rings, heads for tokens, hybrids."""
