"""What is decided before there is a tensor: degrees, meshes, bands, what is exchanged and when. No torch."""
