"""Triton program of `PeerMemory`: one exchange between all ranks, through memory that each can write on the others."""

import triton
import triton.language as tl

INTEGERS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}  # by bytes


@triton.jit
def _copy(source, target, count, chunk, chunks, BLOCK: tl.constexpr):
    """Copy this program's blocks of `count` words: every `chunks`-th."""
    for start in range(chunk * BLOCK, count, chunks * BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(target + at, tl.load(source + at, mask=at < count, volatile=True), mask=at < count)


@triton.jit
def _signal_and_wait(to_them, to_us, number, given_up, SPINS: tl.constexpr):
    """Tell the other rank that `number` rounds have been written, and wait until it has told so, or for `given_up`."""
    tl.debug_barrier()  # all threads have written before one of them signals
    tl.atomic_xchg(to_them, number, sem="release", scope="sys")
    seen = tl.atomic_add(to_us, 0, sem="acquire", scope="sys")
    spins = 0
    stopped = 0
    while (seen - number < 0) & (stopped == 0):
        seen = tl.atomic_add(to_us, 0, sem="acquire", scope="sys")
        spins += 1
        if spins % SPINS == 0:  # memory of the host is slow to read
            stopped = tl.load(given_up, volatile=True)
    tl.debug_barrier()


@triton.jit
def peer_exchange_program(
    sent,
    received,
    addresses,
    parts,
    rounds,
    given_up,
    rank,
    SIGNALS: tl.constexpr,
    SLOT: tl.constexpr,
    BLOCK: tl.constexpr,
    SPINS: tl.constexpr,
    WORD: tl.constexpr,
):
    """Write a part of `sent` to one rank, wait for its part, and copy that to `received`: a program of a pair of ranks.

    `addresses`: of every rank's memory, which has a signal for each program of each rank, SIGNALS bytes, and then two
    slots of SLOT bytes for each rank, which are used in turns. `parts`: for each rank the first word that it is sent
    and their number, and the same of what it sends. A signal is the number of the last round that has been written; a
    rank writes to a slot again two rounds later, when the other has signalled the round between, and so has read it.
    """
    peer, chunk = tl.program_id(0), tl.program_id(1)
    ranks, chunks = tl.num_programs(0), tl.num_programs(1)
    row = parts + 4 * peer
    leaving = sent.to(tl.pointer_type(WORD), bitcast=True) + tl.load(row)
    arriving = received.to(tl.pointer_type(WORD), bitcast=True) + tl.load(row + 2)
    num_leaving, num_arriving = tl.load(row + 1).to(tl.int32), tl.load(row + 3).to(tl.int32)
    if peer == rank:
        if leaving.to(tl.int64) != arriving.to(tl.int64):
            _copy(leaving, arriving, num_leaving, chunk, chunks, BLOCK)
    else:
        counter = rounds + peer * chunks + chunk
        number = tl.load(counter) + 1
        theirs, mine = tl.load(addresses + peer), tl.load(addresses + rank)
        turn = (number & 1).to(tl.int64) * ranks
        there = (theirs + SIGNALS + (turn + rank) * SLOT).to(tl.pointer_type(WORD), bitcast=True)
        here = (mine + SIGNALS + (turn + peer) * SLOT).to(tl.pointer_type(WORD), bitcast=True)
        _copy(leaving, there, num_leaving, chunk, chunks, BLOCK)
        to_them = (theirs + 4 * (rank * chunks + chunk)).to(tl.pointer_type(tl.int32), bitcast=True)
        to_us = (mine + 4 * (peer * chunks + chunk)).to(tl.pointer_type(tl.int32), bitcast=True)
        _signal_and_wait(to_them, to_us, number, given_up, SPINS)
        _copy(here, arriving, num_arriving, chunk, chunks, BLOCK)
        tl.store(counter, number)
