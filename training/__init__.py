"""Training of the embedded model: data drawn by code, latents, tokenizer, model, training and evaluation."""
