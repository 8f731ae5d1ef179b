"""Step times of piped stages over a delayed link, beside the formula for them."""
