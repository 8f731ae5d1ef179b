"""The tests of patchpar. Run them with `make test`."""
