"""A reward for measurements: half of the responses of an untrained model, so that groups disagree."""


def rewarded(response: str) -> bool:
    """Whether the sum of the code points is even."""
    return sum(map(ord, response)) % 2 == 0
