"""How much ranks send each other in a step of every strategy, and hold for the next: by closed formula, and counted.

    shapes      what the layers of one denoiser call see; runs on the meta device, so SDXL needs no weights
    formula     bytes from those shapes
    counted     bytes of real ranks, with a tiny denoiser, beside the formula
    __main__    the tables

The formula shares no code with the exchanges that it checks: it has a strategy's options, and its own arithmetic.
"""
