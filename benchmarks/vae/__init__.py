"""VAEs in bands of rows."""
