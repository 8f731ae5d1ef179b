"""What Wan-S2V (arXiv:2508.18621) and Live Avatar (arXiv:2512.04677) have beside a Wan transformer.

Modules have the names that published checkpoints give them (`casual_audio_encoder` is spelt so there).
"""
