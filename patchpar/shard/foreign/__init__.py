"""Code of other libraries, or of the user's own, in a network: seen in every call, or compared with the plain call."""
