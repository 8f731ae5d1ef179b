"""One network split over several ranks."""
