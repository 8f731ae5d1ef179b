"""What of diffusers is split exactly, class by class: the generator of docs/coverage.md."""
