"""What is known of models before and after they are loaded, as data."""
