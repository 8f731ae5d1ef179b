"""The verb `patchpar stream`, and `patchpar replay`."""
