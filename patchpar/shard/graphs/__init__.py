"""Steps of a denoiser captured as graphs of the device and replayed."""
