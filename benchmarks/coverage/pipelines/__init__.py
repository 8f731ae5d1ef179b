"""Pipeline classes in small, and each under several plans."""
