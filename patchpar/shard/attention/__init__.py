"""Attention over tokens split between ranks: exact by all-gather, rings, Ulysses or hybrids; or with stale keys.

Sources: ring attention (arXiv:2310.01889), Ulysses (arXiv:2309.14509), hybrids of both (USP, arXiv:2405.07719),
TokenRing (arXiv:2412.20501), stale keys of DistriFusion (arXiv:2402.19481) with corrections of ours
(docs/decisions/0017).
"""
