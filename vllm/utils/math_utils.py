"""Integer arithmetic shared by every layer."""


def cdiv(a: int, b: int) -> int:
    """The quotient a / b rounded up."""
    return -(a // -b)


def round_up(x: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least x."""
    return cdiv(x, multiple) * multiple


def round_down(x: int, multiple: int) -> int:
    """The largest multiple of `multiple` that is at most x."""
    return x // multiple * multiple


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n (1 for n below 1)."""
    return 1 if n < 1 else 1 << (n - 1).bit_length()


def largest_power_of_2_divisor(n: int) -> int:
    """The largest power of two that divides n, for n of at least 1."""
    return n & -n
