"""Which request runs next, on how many devices: policies as pure functions, and their simulation in virtual time."""
