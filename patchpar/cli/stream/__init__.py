"""The verbs `patchpar stream` and `patchpar replay`."""
