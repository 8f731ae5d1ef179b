"""Facts about models, before and after they are loaded, as data."""
