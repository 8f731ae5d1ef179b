"""What a strategy hides of a slow link."""
