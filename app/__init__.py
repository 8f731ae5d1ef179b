"""The demo: a page on which the package can be tried, seen and measured. `patchpar app` starts it."""
