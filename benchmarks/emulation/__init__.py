"""What ranks compute with stale or partial exchange, in one process: the oracle that real ranks are held to.

    policy      which values a place has of the others
    sight       what one place makes of them: a convolution, a group norm, an attention. Pure functions
    oracle      puts those into a UNet, and remembers the evaluation before
    __main__    a table of policies on the embedded model

Everything between convolutions, group norms and self-attention works on each position by itself. So the whole image
goes through the network in one piece, and only those three are computed place by place: from the place's own rows of
this step and the others' rows as that place has them. Shares no code with the seams that it checks.
"""

from benchmarks.emulation.oracle import Emulation
from benchmarks.emulation.policy import EmulatedPolicy

__all__ = ["EmulatedPolicy", "Emulation"]
