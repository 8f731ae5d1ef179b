"""One network on several ranks."""
