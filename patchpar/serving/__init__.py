"""`patchpar serve`: images over HTTP, in the format of OpenAI's image interface."""
