"""Plans as data: degrees, meshes, bands, and what is exchanged when. No torch."""
