"""What the emulation reports."""


class EmulationError(Exception):
    """What a compiler would refuse, or what is undefined on the device."""


def check(holds: bool, message: str) -> None:
    if not holds:
        raise EmulationError(message)
