"""Random numbers that are a function of a seed and a place: Philox 4x32 with ten rounds.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. The specification of what the
kernels compute; imports no torch.
"""

# Multipliers of the counter, and what a round adds to the key.
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
_WORD = 0xFFFFFFFF


def philox(seed: int, counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Four random 32-bit words of a 64-bit seed and a counter of four words."""
    keys = [seed & _WORD, seed >> 32 & _WORD]
    first, second, third, fourth = counter
    for _ in range(ROUNDS):
        high, low = divmod(MULTIPLIERS[0] * first, 1 << 32)
        other_high, other_low = divmod(MULTIPLIERS[1] * third, 1 << 32)
        first, second = other_high ^ second ^ keys[0], other_low
        third, fourth = high ^ fourth ^ keys[1], low
        keys = [(key + step) & _WORD for key, step in zip(keys, KEY_STEPS, strict=True)]
    return first, second, third, fourth


def uniform(seed: int, sample: int, position: int) -> float:
    """The number in [0, 1) that the token at an absolute position is drawn by: a multiple of 2^-24, so
    that float32 holds it."""
    return (philox(seed, (position, 0, sample, 0))[0] >> 8) * 2.0**-24
