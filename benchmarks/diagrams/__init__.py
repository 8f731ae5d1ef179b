"""The diagrams of the README and the docs: one style, light and dark, from the arithmetic of the package itself."""
