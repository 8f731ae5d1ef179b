"""A diffusers pipeline on several devices: what a user holds, and what one rank runs."""
